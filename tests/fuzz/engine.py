"""Runs cases of one target and keeps the books: how many, how fast, what was slow, large, or broke.

A case's time is processor time: what other processes of the machine do doesn't make it slow.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.target import Target
from wire.errors import DCNRError

SEEDS = Path(__file__).parent / "seeds"
BATCH = 256
MAX_S = 1.0
MAX_BYTES = 100 << 20


@dataclass
class Figures:
    """What a campaign found. `broke`: kind of exception and place -> how often; `saved`: the files of new seeds."""

    cases: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    largest_bytes: int = 0
    too_slow: int = 0
    too_large: int = 0
    broke: dict[str, int] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Take in those of another worker."""
        self.cases += other.cases
        self.accepted += other.accepted
        self.seconds = max(self.seconds, other.seconds)
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.largest_bytes = max(self.largest_bytes, other.largest_bytes)
        self.too_slow += other.too_slow
        self.too_large += other.too_large
        for kind, count in other.broke.items():
            self.count(kind, count)
        self.saved += other.saved

    def count(self, kind: str, times: int = 1) -> None:
        """It broke in this way."""
        self.broke[kind] = self.broke.get(kind, 0) + times

    @property
    def good(self) -> bool:
        """Nothing broke, was too slow or too large."""
        return not (self.broke or self.too_slow or self.too_large)

    def lines(self, name: str) -> Iterator[str]:
        """For a person."""
        rate = self.cases / self.seconds if self.seconds else 0.0
        yield (
            f"{name}: {self.cases:,} cases in {self.seconds:.1f} s ({rate:,.0f}/s), {self.accepted:,} accepted, "
            f"slowest {self.slowest_s * 1000:.1f} ms, largest {self.largest_bytes / 2**20:.1f} MiB; "
            f"broke {sum(self.broke.values())}, too slow {self.too_slow}, too large {self.too_large}"
        )
        for kind, count in sorted(self.broke.items(), key=lambda item: -item[1]):
            yield f"  {count} times {kind}"
        for path in self.saved:
            yield f"  kept as {path}"


class Memory:
    """Peak of this process's memory, on Linux; elsewhere always 0."""

    def __init__(self) -> None:
        self._can = sys.platform == "linux" and self._reset()

    def _reset(self) -> bool:
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            return False
        return True

    def _field(self, name: bytes) -> int:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(name):
                    return int(line.split()[1]) << 10
        return 0

    def begin(self) -> int:
        """The memory held now; the peak is counted from here."""
        return self._field(b"VmRSS") if self._can and self._reset() else 0

    def grown(self, before: int) -> int:
        """By how much the peak since `begin` was above it."""
        return max(0, self._field(b"VmHWM") - before) if self._can else 0


def judge(target: Target, data: bytes) -> tuple[bool, str]:
    """Runs one case: (it was accepted, what broke or "")."""
    try:
        target.run(data)
    except DCNRError:
        return False, ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a library written in Rust may raise something that is no Exception
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/tests/" not in frame.filename and "site-packages" not in frame.filename]
        place = ours[-1] if ours else frames[-1]
        return False, f"{type(error).__name__} in {Path(place.filename).name}:{place.name}: {str(error)[:120]!r}"
    return True, ""


def cases_of(target: Target, seed: str, batch: int, most: int = BATCH) -> Iterator[bytes]:
    """The cases of one batch: always the same ones for the same seed and number."""
    random = Random(f"{seed}/{target.name}/{batch}")
    corpus = target.valid()
    for _ in range(most):
        base = corpus[int(random.random() * len(corpus))]
        data = target.change(random, base, corpus)
        yield data if len(data) <= target.max_bytes else data[: target.max_bytes]


def campaign(
    target: Target,
    *,
    cases: int,
    seconds: float,
    seed: str,
    most: int = BATCH,
    current: mmap.mmap | None = None,
    keep: Callable[[str, bytes, str], str] | None = None,
) -> Figures:
    """Cases until there were so many, or so long. `most`: in a batch; `current`: where each is put before it runs."""
    figures = Figures()
    memory = Memory()
    corpus = target.valid()
    for data in corpus:
        accepted, broke = judge(target, data)  # what is warmed up or imported late does not count
        if not accepted:
            raise AssertionError(f"a valid {target.name} was not accepted {broke}: {data[:200]!r}")
    kinds: set[str] = set()
    started = time.perf_counter()
    batch = 0
    while figures.cases < cases and time.perf_counter() - started < seconds:
        before = memory.begin()
        ran: list[bytes] = []
        for data in cases_of(target, seed, batch, most):
            if current is not None:
                current[0:8] = len(data).to_bytes(8, "little")
                current[8 : 8 + len(data)] = data
            ran.append(data)
            begun = time.process_time()
            accepted, broke = judge(target, data)
            took_s = time.process_time() - begun
            figures.accepted += accepted
            figures.slowest_s = max(figures.slowest_s, took_s)
            if took_s > MAX_S:
                figures.too_slow += 1
                broke = broke or f"slow: {took_s:.1f} s"
            if broke:
                if not broke.startswith("slow"):
                    figures.count(_kind(broke))
                if _kind(broke) not in kinds and keep is not None:
                    kinds.add(_kind(broke))
                    figures.saved.append(keep(target.name, data, broke))
        figures.cases += len(ran)
        grown = memory.grown(before)
        if grown > MAX_BYTES:
            grown = 0
            for data in ran:
                before = memory.begin()
                judge(target, data)
                one = memory.grown(before)
                grown = max(grown, one)
                if one > MAX_BYTES:
                    figures.too_large += 1
                    if keep is not None and "large" not in kinds:
                        kinds.add("large")
                        figures.saved.append(keep(target.name, data, f"large: {one >> 20} MiB"))
        figures.largest_bytes = max(figures.largest_bytes, grown)
        batch += 1
    figures.seconds = time.perf_counter() - started
    return figures


def _kind(broke: str) -> str:
    """One kind of fault at one place."""
    return broke.partition(": ")[0] if not broke.startswith("slow") else "slow"


def keep_seed(name: str, data: bytes, why: str, folder: Path = SEEDS) -> str:
    """Write a case that broke something to the seeds; `why` goes to standard error."""
    path = folder / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"{name}: {why}", file=sys.stderr, flush=True)
    return str(path)
