"""Results of seeds, kept in a file of JSON lines: what has been run is not run again, and all of it counts together.

A result belongs to the code that gave it: `code_digest` is of the product and of the simulated world. Runs of other
code stay in the file, and are counted apart.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("wire", "storage", "networks", "pnode", "orchestrator")
REPLACED = (
    "networks/schema.py", "networks/summary.py", "orchestrator/main.py", "pnode/logs.py", "pnode/main.py",
    "pnode/metrics.py", "pnode/reference.py", "pnode/waiting.py", "storage/s3", "storage/stall.py", "wire/loop.py",
    "wire/sockets.py", "wire/zmq_bus.py",
)  # fmt: skip
"""Beginnings of the names of files that no run loads: the world has its own network, store and clock instead."""

APART = (
    "planted", "broken.py", "handmade.py", "fake_worker.py", "campaign.py", "shrink.py", "pool.py", "coverage.py",
    "results.py", "__main__.py",
)  # fmt: skip
"""Files of the simulator that change no run."""

KEPT_BREACHES = 50


def code_files(root: Path = ROOT) -> list[Path]:
    """All code that a result depends on."""
    files = [path for package in PRODUCT for path in (root / package).rglob("*.py")]
    files = [path for path in files if not path.relative_to(root).as_posix().startswith(REPLACED)]
    own = [path for path in (root / "tests" / "sim").rglob("*.py") if not path.name.startswith("test_")]
    return sorted(files + [path for path in own if not set(path.parts) & set(APART)])


def code_digest(root: Path = ROOT) -> str:
    """Of all that."""
    found = hashlib.sha256()
    for path in code_files(root):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def default_state() -> Path:
    """Where results are kept unless said otherwise."""
    import platformdirs

    return platformdirs.user_cache_path("dcnr") / "simulator" / "results.jsonl"


@dataclass(slots=True)
class Totals:
    """What many runs come to."""

    runs: int = 0
    steps: int = 0
    recoveries: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    slowest_s: float = 0.0
    """Longest virtual time from the last fault's end to the run's."""
    faults: Counter[str] = field(default_factory=Counter)
    visited: set[str] = field(default_factory=set)
    breached: int = 0
    breaches: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        """One more run."""
        self.runs += 1
        self.steps += result["steps"]
        self.recoveries += result["recoveries"]
        self.messages += result["messages"]
        self.virtual_s += result["virtual_s"]
        self.wall_s += result["wall_s"]
        self.slowest_s = max(self.slowest_s, result["after_s"])
        self.faults.update(result["faults"])
        self.visited.update(result["visited"])
        if result["breaches"]:
            self.breached += 1
            if len(self.breaches) < KEPT_BREACHES:
                self.breaches.append({"seed": result["seed"], **result["breaches"][0]})

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "runs": self.runs, "steps": self.steps, "recoveries": self.recoveries, "messages": self.messages,
            "virtual_s": round(self.virtual_s, 1), "wall_s": round(self.wall_s, 1),
            "slowest_after_last_fault_s": self.slowest_s, "faults": dict(sorted(self.faults.items())),
            "faults_in_all": self.faults.total(), "breached": self.breached, "breaches": self.breaches,
        }  # fmt: skip


class StateFile:
    """See the module. One writer at a time; `path` None: nothing is kept."""

    def __init__(self, path: Path | None, code: str) -> None:
        self.code = code
        self.done: set[int] = set()
        self.totals = Totals()
        self.other = 0
        """Runs of other code."""
        self._file: IO[str] | None = None
        self._told: set[str] = set()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for result in _read(path):
                self._take(result)
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size and path.read_bytes()[-1:] != b"\n":
            self._file.write("\n")  # the last line was cut short

    def _take(self, result: dict[str, Any]) -> None:
        if result.get("code") != self.code:
            self.other += 1
        elif result["seed"] not in self.done:
            self.done.add(result["seed"])
            self.totals.add(result)
            self._told.update(result["visited"])

    def add(self, result: dict[str, Any]) -> None:
        """Keep a result; states that were seen before are not written again."""
        self.done.add(result["seed"])
        self.totals.add(result)
        if self._file is not None:
            fresh = [text for text in result["visited"] if text not in self._told]
            self._told.update(fresh)
            self._file.write(json.dumps({**result, "visited": fresh, "code": self.code}, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut short by a kill
            if isinstance(result, dict) and "seed" in result:
                yield result
