"""Exact search: the best contiguous cuts over all orders of unequal machines, idle ones allowed. Pure.

First phase: `best[state][j]` is the smallest slowest piece with which the first j cuts can be covered by exactly the
machines in `state` (how many of each kind), in any order. The best state over all is the answer's time. Second phase:
among the pieces that are no slower than this time allows, the fewest bytes on the wire. Both are exact because a
piece's cost depends on its ends and machine alone (`segments`).

Two prunings keep it fast and change no result. No piece may exceed the limit that a known placement sets. And a
prefix must neither hold more operations than its machines do within the limit, nor leave more than the others can do.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.segments import Floats, Segments, stretch
from orchestrator.work import Machine

TOLERANCE = 1e-9
"""Times that differ by less, relatively, count as equal."""

State = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The cuts number `start` to `end` on a machine."""

    machine: Machine
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Cuts:
    """A placement by contiguous pieces, in order; `time_s` as the search sees it; bytes per step."""

    pieces: tuple[Piece, ...]
    time_s: float
    wire_bytes: int


class ExactSearch:
    """One search over the pieces of `segments` on `machines`; `exactly` forces the number of machines."""

    def __init__(self, segments: Segments, machines: Sequence[Machine], exactly: int = 0) -> None:
        self._segments = segments
        self._work = segments.work
        pinned = {pin for pin in self._work.pins if pin is not None}
        groups: dict[object, list[Machine]] = {}
        for machine in machines:
            groups.setdefault(machine.id if machine.id in pinned else machine.kind, []).append(machine)
        self._kinds = list(groups.values())
        self._seconds = [segments.seconds(kind[0]) for kind in self._kinds]
        self._sizes = tuple(len(kind) for kind in self._kinds)
        self._most = min(exactly or len(machines), segments.count)
        self._fewest = exactly or 1

    def cost_cells(self, known_s: float) -> float:
        """Roughly how many numbers `run` would look at, given a placement that takes `known_s`."""
        total = 0.0
        for state in self._states():
            low, high = self._window(state, known_s)
            if high < low:
                continue
            for _, before in self._before(state):
                low_before, high_before = self._window(before, known_s)
                total += max(0, high_before - low_before + 1) * float(high - low + 1)
        return total

    def run(self, known_s: float = math.inf, at_most_bytes: float = math.inf) -> Cuts | None:
        """The best cuts no slower than `known_s`, or None.

        With `at_most_bytes`, the fastest that send no more than that.
        """
        times = self._fastest(known_s)
        if not times:
            return None
        best = min(times.values())
        found = self._leanest(best, [used for used in sorted(times) if times[used] <= best * (1 + TOLERANCE)])
        if found is None or found.wire_bytes <= at_most_bytes:
            return found
        return self._within(best, at_most_bytes)

    def _states(self) -> Iterator[State]:
        """All states that may be used, small ones first."""
        ranges = (range(size + 1) for size in self._sizes)
        yield from sorted((state for state in itertools.product(*ranges) if sum(state) <= self._most), key=sum)

    def _before(self, state: State) -> Iterator[tuple[int, State]]:
        """Each kind whose machine may hold the last piece of `state`, and the state before it."""
        for kind, count in enumerate(state):
            if count:
                yield kind, (*state[:kind], count - 1, *state[kind + 1 :])

    def _limit(self, used: int, time_s: float) -> float:
        """The slowest piece that a placement of at least `used` machines may have within `time_s`."""
        return time_s / stretch(self._work, max(used, self._fewest)) * (1 + TOLERANCE)

    def _speed(self, state: State) -> float:
        return sum(count * kind[0].speed for count, kind in zip(state, self._kinds, strict=True))

    def _window(self, state: State, time_s: float) -> tuple[int, int]:
        """First and last cut at which the machines of `state` may end."""
        used = sum(state)
        if not used:
            return 0, 0
        last = self._segments.count
        limit = self._limit(used, time_s)
        if math.isinf(limit):
            return used, last
        operations = self._segments.operations
        rest = tuple(size - count for size, count in zip(self._sizes, state, strict=True))
        most = limit * self._speed(state) * (1 + TOLERANCE)
        least = operations[-1] - limit * self._speed(rest) * (1 + TOLERANCE)
        low = int(np.searchsorted(operations, least, side="left"))
        high = int(np.searchsorted(operations, most, side="right")) - 1
        return max(low, used), min(high, last)

    def _fastest(self, known_s: float) -> dict[int, float]:
        """Phase one: the smallest time by number of machines, of those that may be the best."""
        best: dict[State, Floats] = {tuple(0 for _ in self._sizes): self._start()}
        found = known_s
        times: dict[int, float] = {}
        for state in self._states():
            used = sum(state)
            if not used:
                continue
            table = self._extend(best, state, found, np.maximum)
            if table is None:
                continue
            best[state] = table[0]
            if used >= self._fewest and not math.isinf(last := float(table[0][-1])):
                time_s = last * stretch(self._work, used)
                if time_s <= found * (1 + TOLERANCE):
                    found = min(found, time_s)
                    times[used] = min(time_s, times.get(used, math.inf))
        return times

    def _start(self) -> Floats:
        start = np.full(self._segments.count + 1, np.inf)
        start[0] = 0.0
        return start

    def _extend(
        self,
        tables: dict[State, Floats],
        state: State,
        time_s: float,
        join: Callable[[Floats, Floats], Floats],
        costs: Sequence[Floats] | None = None,
    ) -> tuple[Floats, Floats, Floats] | None:
        """One more machine: for each cut the best over all kinds and places of the last piece, and which that was."""
        low, high = self._window(state, time_s)
        if high < low:
            return None
        table = np.full(self._segments.count + 1, np.inf)
        kinds, starts = np.full(table.shape, -1), np.full(table.shape, -1)
        limit = self._limit(sum(state), time_s)
        for kind, before in self._before(state):
            previous = tables.get(before)
            if previous is None:
                continue
            rows = np.flatnonzero(np.isfinite(previous))
            rows = rows[rows < high]
            if not len(rows):
                continue
            first, after = int(rows[0]), int(rows[-1]) + 1
            block = (costs or self._seconds)[kind][first:after, low : high + 1]
            joined = join(previous[first:after, None], block)
            place = joined.argmin(axis=0)
            value = joined[place, np.arange(joined.shape[1])]
            better = value < table[low : high + 1]
            table[low : high + 1][better] = value[better]
            kinds[low : high + 1][better] = kind
            starts[low : high + 1][better] = place[better] + first
        if costs is None:
            table[table > limit] = np.inf
        return (table, kinds, starts) if np.isfinite(table).any() else None

    def _leanest(self, time_s: float, machines: Sequence[int]) -> Cuts | None:
        """Phase two: the fewest bytes among the placements within `time_s` on so many machines."""
        found: Cuts | None = None
        for used in machines:
            limit = min(time_s / stretch(self._work, used) * (1 + TOLERANCE), sys.float_info.max)
            costs = [np.where(time <= limit, self._segments.in_bytes, np.inf) for time in self._seconds]
            tables: dict[State, Floats] = {tuple(0 for _ in self._sizes): self._start()}
            back: dict[State, tuple[Floats, Floats]] = {}
            for state in self._states():
                if not 0 < sum(state) <= used:
                    continue
                table = self._extend(tables, state, time_s, np.add, costs)
                if table is not None:
                    tables[state] = table[0]
                    back[state] = table[1:]
            for state, bytes_at in tables.items():
                if sum(state) == used and bytes_at[-1] < (math.inf if found is None else found.wire_bytes):
                    found = self._trace(state, back, int(bytes_at[-1]))
        return found

    def _trace(self, state: State, back: dict[State, tuple[Floats, Floats]], wire_bytes: int) -> Cuts:
        pieces: list[tuple[int, int, int]] = []
        end = self._segments.count
        slowest, used = 0.0, sum(state)
        while sum(state):
            kinds, starts = back[state]
            kind, start = int(kinds[end]), int(starts[end])
            pieces.append((kind, start, end))
            slowest = max(slowest, float(self._seconds[kind][start, end]))
            state = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
            end = start
        free = [iter(kind) for kind in self._kinds]
        placed = tuple(Piece(next(free[kind]), start, end) for kind, start, end in reversed(pieces))
        return Cuts(placed, slowest * stretch(self._work, used), wire_bytes)

    def _within(self, fastest: float, at_most_bytes: float) -> Cuts | None:
        """The fastest placement whose bytes stay within a bound: bytes fall as the time allowed grows."""
        any_number = range(self._fewest, self._most + 1)
        slow = self._leanest(math.inf, any_number)
        if slow is None or slow.wire_bytes > at_most_bytes:
            return None
        low, high, found = fastest, slow.time_s, slow
        for _ in range(60):
            if high <= low * (1 + TOLERANCE):
                break
            middle = (low + high) / 2
            tried = self._leanest(middle, any_number)
            if tried is not None and tried.wire_bytes <= at_most_bytes:
                found, high = tried, min(middle, tried.time_s)
            else:
                low = middle
        return found
