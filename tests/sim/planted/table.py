"""Looks for planted bugs: each is planted in a process of its own, and seeds are run until a promise is broken.

A seed counts only if it breaks nothing without the bug.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.sim.planted import BUGS, Bug, bug
from tests.sim.pool import Pool, ranges
from tests.sim.worker import judged

WORLD = "the world runs"
"""What a run is said to break that raised an exception or took too long."""

HANG_S = 600.0
"""A run with a bug may take longer: it may never come to its end, and the world gives up late."""


@dataclass(frozen=True, slots=True)
class Catch:
    """A bug and what found it. `seeds`: how many runs it took, 0: not found."""

    name: str
    breaks: str
    seeds: int
    seed: int = -1
    invariants: list[str] = field(default_factory=list)
    text: str = ""
    seconds: float = 0.0
    excused: int = 0
    """Seeds that broke something without the bug too."""


def hunt(planted: Bug, *, start: int, limit: int, jobs: int = 1) -> Catch:
    """Plant it and look."""
    began = time.monotonic()
    excused = 0
    seeds = 0
    hunting = Pool(jobs, planted=planted.name, hang_s=HANG_S).results(ranges(range(start, start + limit), 1))
    try:
        for result in hunting:
            if result is None:
                continue
            seeds += 1
            if all(breach["invariant"] == WORLD for breach in result["breaches"]):
                continue  # nothing, or a run that gave no history: that is no promise that was seen to be broken
            if _broken(result["seed"]):
                excused += 1
                continue
            first: dict[str, Any] = result["breaches"][0]
            invariants = list(dict.fromkeys(breach["invariant"] for breach in result["breaches"]))
            seconds = time.monotonic() - began
            text = f"{first['t']:.2f}: {first['text']}"
            return Catch(planted.name, planted.breaks, seeds, result["seed"], invariants, text, seconds, excused)
    finally:
        hunting.close()  # type: ignore[attr-defined]
    return Catch(planted.name, planted.breaks, 0, seconds=time.monotonic() - began, excused=excused)


def _broken(seed: int) -> bool:
    """Whether it breaks something in this process, into which nothing is planted."""
    return bool(judged(seed)["breaches"])


def hunt_all(names: Sequence[str], *, start: int, limit: int, jobs: int) -> list[Catch]:
    """All of these bugs, or all there are."""
    found = []
    for planted in [bug(name) for name in names] or BUGS:
        catch = hunt(planted, start=start, limit=limit, jobs=jobs)
        print(_line(catch), flush=True)
        found.append(catch)
    return found


def _line(catch: Catch) -> str:
    if not catch.seeds:
        return f"{catch.name}: NOT FOUND in {catch.seconds:.0f} s"
    return f"{catch.name}: found after {catch.seeds} seeds (seed {catch.seed}) by {catch.invariants[0]!r}"


def table(catches: Sequence[Catch]) -> list[str]:
    """For people."""
    rows = [("planted bug", "found after", "by", "also by", "what it breaks")]
    for catch in catches:
        after = f"{catch.seeds} seeds" if catch.seeds else "NOT FOUND"
        first = catch.invariants[0] if catch.invariants else ""
        rows.append((catch.name, after, first, str(max(0, len(catch.invariants) - 1)), catch.breaks))
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    lines = ["  ".join([*(row[place].ljust(widths[place]) for place in range(4)), row[4]]) for row in rows]
    caught = sum(1 for catch in catches if catch.seeds)
    excused = sum(catch.excused for catch in catches)
    note = f"; {excused} seeds broke something without the bug too and were not counted" if excused else ""
    return [*lines, f"{caught} of {len(catches)} found{note}"]
