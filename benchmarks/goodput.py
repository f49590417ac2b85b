"""Useful steps while one process a minute is killed, against the undisturbed run; beside it torch elastic.

    python -m benchmarks.goodput [--minutes 20] [--rounds 4] [--only DCNR|elastic] [--out FILE.json]

gpt-char trains on four PNodes, in turn with the same model in plain torch on four ranks under torchrun, which restarts
all ranks from the newest save. In each round each of the two is started, runs undisturbed for a while, then loses one
of its four processes each minute at a random moment: kill -9, and whoever supervises it starts it again at once. Useful
is a step that had not been made before. Since what else the machine does changes over the minutes, the time without any
new step after a kill is told too. With `--out` the rounds of several calls are put together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.fire import Progress, burning, machine, network, percentile
from cli.chaos.engine import Engine

PROCESSES = 4
WARM_STEPS = 50
LOOK_S = 0.02
LOST_S = 0.5
"""A kill shows within this time at the earliest; until then steps made before it may still be told."""


class Runner(Protocol):
    """Something that trains and can be hurt."""

    def highest(self) -> int:
        """The highest step made so far."""

    def redone(self) -> int:
        """Steps made again so far."""

    def hurt(self, draw: random.Random) -> None:
        """kill -9 one of its processes; it is started again at once."""


class Ours:
    """DCNR on four PNodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def highest(self) -> int:
        return self._engine.sight.highest

    def redone(self) -> int:
        return self._engine.sight.redone

    def hurt(self, draw: random.Random) -> None:
        fleet, members = self._engine.fleet, self._engine.sight.members
        victim = draw.choice(sorted(name for name in members if name in fleet.able()))
        fleet.kill(victim)
        fleet.start(victim)


class Elastic:
    """torchrun with four ranks."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder = folder
        self._torchrun = psutil.Process(pid)
        self._place = self._highest = self._redone = 0

    def highest(self) -> int:
        self._read()
        return self._highest

    def redone(self) -> int:
        self._read()
        return self._redone

    def hurt(self, draw: random.Random) -> None:
        ranks = [child for child in self._torchrun.children() if child.status() != psutil.STATUS_ZOMBIE]
        draw.choice(sorted(ranks, key=lambda child: child.pid)).kill()

    def _read(self) -> None:
        path = self._folder / "steps"
        if not path.exists():
            return
        with path.open() as source:
            source.seek(self._place)
            whole = source.read().rpartition("\n")[0]
        self._place += len(whole) + 1 if whole else 0
        for line in whole.split():
            step = int(line)
            self._redone += step <= self._highest
            self._highest = max(self._highest, step)


@asynccontextmanager
async def ours(every: int, lease_s: float, seed: int) -> AsyncIterator[Runner]:
    """DCNR, ended afterwards."""
    prepared = network("gpt-char", [], every)
    async with burning(prepared, pnodes=PROCESSES, members=PROCESSES, lease_s=lease_s, seed=seed) as engine:
        yield Ours(engine)


@asynccontextmanager
async def elastic(every: int, lease_s: float, seed: int) -> AsyncIterator[Runner]:
    """torch elastic, ended afterwards."""
    del lease_s, seed
    folder = Path(tempfile.mkdtemp(prefix="dcnr-elastic-"))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES),
        "--max-restarts", "1000", str(Path(__file__).with_name("goodput_peer.py")), str(folder), "--every", str(every),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)  # noqa: ASYNC220
    try:
        yield Elastic(folder, process.pid)
        if process.poll() is not None:
            raise SystemExit(f"torchrun ended:\n{(folder / 'log').read_text()[-2000:]}")
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


RUNNERS = {"DCNR": ours, "elastic": elastic}
NAMES = {"DCNR": "DCNR", "elastic": "torch elastic"}


@dataclass(slots=True)
class Stretch:
    """A while of one of them. `stills`: from each kill to the first new step; `standing`: all time without one."""

    kills: int
    seconds: float = 0.0
    steps: int = 0
    redone: int = 0
    standing: float = 0.0
    load: float = 0.0
    stills: list[float] = field(default_factory=list)


async def stretch(runner: Runner, seconds: float, kills: int, draw: random.Random) -> Stretch:
    """Watch for so long, with so many kills spread evenly, each at a random moment of the first half of its share."""
    share = seconds / max(1, kills)
    due = [share * number + draw.uniform(0.0, share / 2) for number in range(kills)]
    found = Stretch(kills)
    began = moved = time.monotonic()
    first, redone, highest = runner.highest(), runner.redone(), runner.highest()
    open_kills: list[float] = []
    while (past := time.monotonic() - began) < seconds or open_kills:
        if due and past >= due[0]:
            due.pop(0)
            runner.hurt(draw)
            open_kills.append(time.monotonic())
        await asyncio.sleep(LOOK_S)
        now, step = time.monotonic(), runner.highest()
        if step == highest:
            continue
        if open_kills and now > open_kills[0] + LOST_S:
            found.stills += [now - at for at in open_kills]
            found.standing += now - max(moved, open_kills[0])
            open_kills.clear()
        highest, moved = step, now
    found.seconds, found.steps = time.monotonic() - began, highest - first
    found.redone, found.load = runner.redone() - redone, os.getloadavg()[1]
    return found


async def measure(
    minutes: float,
    rounds: int,
    calm_s: float,
    names: list[str],
    every: int,
    lease_s: float,
    seed: int,
    out: Path | None,
) -> dict[str, list[Stretch]]:
    """All of it, in turn."""
    progress = Progress("stretches", every_s=0.0)
    draw, found = random.Random(seed), kept(out)
    kills = round(minutes / rounds)
    for number in range(rounds):
        for place, name in enumerate(names):
            async with RUNNERS[name](every, lease_s, seed + number) as runner:
                while runner.highest() < WARM_STEPS:  # noqa: ASYNC110, nothing tells of it
                    await asyncio.sleep(0.1)
                calm = await stretch(runner, calm_s, 0, draw)
                hurt = await stretch(runner, 60.0 * minutes / rounds, kills, draw)
            found.setdefault(name, []).extend([calm, hurt])
            rates = f"{calm.steps / calm.seconds:.1f} and {hurt.steps / hurt.seconds:.1f} steps a second"
            progress(number * len(names) + place + 1, rounds * len(names), f"{name}: {rates}, load {hurt.load:.1f}")
            keep(found, out)
    return found


def kept(out: Path | None) -> dict[str, list[Stretch]]:
    """What earlier calls measured."""
    if out is None or not out.exists():
        return {}
    found = json.loads(out.read_text())
    return {name: [Stretch(**entry) for entry in entries] for name, entries in found.items()}


def keep(found: dict[str, list[Stretch]], out: Path | None) -> None:
    """Write all so far as JSON, if a file is given."""
    if out is not None:
        plain = {name: [asdict(entry) for entry in entries] for name, entries in found.items()}
        out.write_text(json.dumps(plain) + "\n")


def rate(entries: list[Stretch]) -> float:
    """Useful steps a second."""
    return sum(entry.steps for entry in entries) / sum(entry.seconds for entry in entries)


def row(name: str, entries: list[Stretch]) -> str:
    """One line of the table."""
    calm, hurt = [one for one in entries if not one.kills], [one for one in entries if one.kills]
    stills = [still for one in hurt for still in one.stills]
    ratios = [rate([after]) / rate([before]) for before, after in zip(calm, hurt, strict=True)]
    standing = sum(one.standing for one in hurt) / sum(one.seconds for one in hurt)
    return (
        f"| {NAMES[name]} | {rate(calm):.2f} | {rate(hurt):.2f} | {rate(hurt) / rate(calm):.1%} "
        f"({min(ratios):.1%} to {max(ratios):.1%}) | {statistics.median(stills):.1f} | {percentile(stills, 0.95):.1f} "
        f"| {1 - standing:.1%} | {sum(one.redone for one in hurt) / len(stills):.1f} |"
    )


def table(found: dict[str, list[Stretch]], lease_s: float, every: int) -> str:
    """Markdown."""
    hurt = [entry for entries in found.values() for entry in entries if entry.kills]
    kills, minutes = sum(one.kills for one in hurt), sum(one.seconds for one in hurt) / 60
    lines = [
        f"{kills} kills in {minutes:.0f} minutes, lease {lease_s:g} s, saved every {every} steps; "
        f"load average {statistics.mean(one.load for one in hurt):.1f} on {machine()}", "",
        "| | steps/s undisturbed | with a kill a minute | goodput (by round) | still after a kill, s: median | p95 "
        "| share of time not still | steps redone per kill |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join([*lines, *(row(name, entries) for name, entries in found.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="with a kill a minute, for each of the two")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--calm", type=float, default=75.0, metavar="SECONDS", help="undisturbed, in each round")
    parser.add_argument("--only", choices=list(RUNNERS), default=None)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    names = [options.only] if options.only else list(RUNNERS)
    found = asyncio.run(
        measure(
            options.minutes,
            options.rounds,
            options.calm,
            names,
            options.every,
            options.lease,
            options.seed,
            options.out,
        )
    )
    print(table(found, options.lease, options.every))


if __name__ == "__main__":
    main()
