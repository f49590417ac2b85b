"""The smallest schedule that still breaks the same promise: faults are dropped one after another while it is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Broken = Callable[[Sequence[int]], set[str]]
"""Runs with the faults at these places only, and tells which promises were broken."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """Places of the faults that are needed, the promises that are broken with all of them, and the runs it took."""

    places: list[int]
    invariants: set[str]
    runs: int


def shrink(count: int, broken: Broken, told: Callable[[str], None] = lambda text: None) -> Smallest:
    """First half by half, then one by one, until no single fault can be left out."""
    places = list(range(count))
    wanted = broken(places)
    runs = 1
    if not wanted:
        return Smallest(places, wanted, runs)
    size = max(1, len(places) // 2)
    while True:
        dropped = False
        at = 0
        while at < len(places):
            rest = places[:at] + places[at + size :]
            runs += 1
            if broken(rest) & wanted:
                told(f"{len(rest)} of {count} faults are enough")
                places, dropped = rest, True
            else:
                at += size
        if size == 1 and not dropped:
            return Smallest(places, wanted, runs)
        size = size if dropped and size == 1 else max(1, size // 2)
