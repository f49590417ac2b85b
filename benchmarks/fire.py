"""What the measurements under fire share: a fleet that trains, progress with an ETA, results as JSON and Markdown."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cli.chaos.engine import Engine, Rules
from cli.chaos.faults import Kind, Schedule
from cli.chaos.fleet import Fleet, Shape
from cli.chaos.trial import SESSION, begin, join
from cli.preparing import Overrides, Prepared, prepare
from cli.terminal import Terminal

FOREVER = 1_000_000


def network(name: str, sets: Sequence[str], every: int) -> Prepared:
    """A shipped network that trains for ever and saves every so many steps."""
    chosen = [*sets, f"train.steps={FOREVER}", f"train.checkpoint.every={every}"]
    return prepare(name, Overrides.of(chosen), Terminal("json"), cache=Path(tempfile.gettempdir()) / "dcnr-bench-data")


@asynccontextmanager
async def burning(
    prepared: Prepared, *, pnodes: int, members: int, lease_s: float, seed: int, keep: Path | None = None
) -> AsyncIterator[Engine]:
    """A fleet that trains, watched; all of it is ended afterwards. The caller decides what is hurt."""
    home = Path(tempfile.mkdtemp(prefix="dcnr-fire-"))
    fleet = Fleet(Shape(home, pnodes, lease_s, seed=seed))
    try:
        await fleet.open()
        await join(fleet)
        await begin(fleet, prepared, members, Terminal("json"))
        schedule = Schedule(seed, {Kind.KILL: 1.0}, lease_s=lease_s, gap_s=0.0)
        engine = Engine(fleet, SESSION, schedule, Rules(stuck_s=max(120.0, 20 * lease_s)))
        async with engine.watching():
            yield engine
    finally:
        await fleet.close()
        if keep is not None:
            shutil.copytree(home / "logs", keep, dirs_exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)


class Progress:
    """One line now and then, with the time that is left."""

    def __init__(self, what: str, every_s: float = 5.0) -> None:
        self.what = what
        self.every_s = every_s
        self._began = self._said = time.monotonic()

    def __call__(self, done: float, total: float, text: str = "") -> None:
        """So much of so much is done."""
        now = time.monotonic()
        if now - self._said < self.every_s and done < total:
            return
        self._said = now
        left = (now - self._began) / done * (total - done) if done else 0.0
        eta = f", {left / 60:.1f} min left" if done else ""
        print(f"{self.what}: {done:g} of {total:g}{eta}  {text}", file=sys.stderr, flush=True)


def machine() -> str:
    """Where this was measured."""
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def append(path: Path | None, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a result to those of earlier calls in a JSON file (if one is given); all of them."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path is not None and path.exists() else []
    found.append(entry)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found
