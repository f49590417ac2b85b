"""The heuristic for many machines: fixed orders of machines, each filled as far as it goes. Pure.

For one order and one time limit, each machine takes as many nodes as it can within the limit; bisection finds the
smallest limit at which all nodes find a place. A piece's wire time is bounded from above by all that crosses its two
ends, so that one step costs O(log nodes): 10,000 nodes on 100 machines take a second. The result is not always the
best: `lower_bound_s` says how far from it at most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from orchestrator.segments import stretch
from orchestrator.work import Machine, Work

_LOOK_BACK = 48
"""How many cuts before the last possible one are looked at for one where less crosses."""

Bounds = tuple[tuple[Machine, int, int], ...]
"""Machine, first node, node after the last."""


class Greedy:
    """Fills machines in order. Pins are not looked at: `placement` moves pinned nodes afterwards."""

    def __init__(self, work: Work, machines: Sequence[Machine], in_flight: int) -> None:
        self._work = work
        self._machines = tuple(machines)
        size = work.size
        self._operations = [0.0, *accumulate(work.operations(node) for node in range(size))]
        self._fixed = [0.0, *accumulate(work.fixed_s(node) for node in range(size))]
        need = (work.static_bytes[node] + in_flight * work.stash_bytes[node] for node in range(size))
        self._memory = [0.0, *accumulate(need)]
        crossing, hops = [0.0] * (size + 2), [0.0] * (size + 2)
        for value in work.values:
            for tally, amount in ((crossing, value.step_bytes), (hops, value.step_hops)):
                tally[value.maker + 1] += amount
                tally[value.readers[-1] + 1] -= amount
        self._crossing = list(accumulate(crossing))[: size + 1]
        self._hop_s = [count * work.calibration.hop_busy_s for count in accumulate(hops)][: size + 1]

        made: dict[int, float] = {}
        link = max(machine.link_bytes_s for machine in machines)
        for value in work.values:
            time = value.step_bytes / link + value.step_hops * work.calibration.hop_busy_s
            made[value.maker] = made.get(value.maker, 0.0) + time
        readers = {reader for value in work.values for reader in value.readers}
        self._sources = sum(node not in readers for node in range(1, size))
        silent = any(node not in made for node in range(size - 1))
        self._least_hop_s = 0.0 if silent else min(made.values(), default=0.0)
        self._largest = max(work.operations(node) for node in range(size))

    def run(self, exactly: int = 0) -> tuple[float, Bounds] | None:
        """The best (time, bounds) over some orders and numbers of machines, or None where nothing fits."""
        most = min(len(self._machines), self._work.size)
        counts = [exactly] if exactly else _counts(most)
        best: tuple[float, Bounds] | None = None
        for count in counts:
            if count > most:
                continue
            floor = self.floor_s(count)
            for order in self._orders(count):
                factor = stretch(self._work, count)
                bounds = self._bisect(order, floor, (best[0] if best else math.inf) / factor, exactly > 0)
                if bounds is not None and (best is None or bounds[0] * factor < best[0]):
                    best = (bounds[0] * factor, bounds[1])
        return best

    def lower_bound_s(self, exactly: int = 0) -> float:
        """No contiguous placement takes less: all operations at the speed of the fastest machines, without a wire."""
        most = min(len(self._machines), self._work.size)
        counts = [exactly] if exactly else range(1, most + 1)
        return min(stretch(self._work, count) * self.floor_s(count) for count in counts)

    def floor_s(self, count: int) -> float:
        """No slowest piece on `count` machines takes less."""
        speeds = sorted((machine.speed for machine in self._machines), reverse=True)[:count]
        # Every piece but the last sends what its last node makes; each that begins with a reader receives something.
        total = self._operations[-1] + speeds[-1] * self._fixed[-1] + self._least_hop_s * sum(speeds[1:])
        receiving = max(0, count - 1 - self._sources)
        latency = 2 * self._work.microbatches * min(machine.latency_s for machine in self._machines)
        total += sum(speeds[count - receiving :]) * (latency + self._least_hop_s)
        shared = total / sum(speeds)
        return max(shared, self._largest / speeds[0], self._fixed[-1] / count)

    def _orders(self, count: int) -> list[tuple[Machine, ...]]:
        """The orders that are tried: the fastest `count` machines, and those with most memory, both ways round."""
        found: list[tuple[Machine, ...]] = []
        fast = sorted(self._machines, key=lambda machine: (-machine.speed, -machine.memory_bytes))[:count]
        roomy = sorted(self._machines, key=lambda machine: (-machine.memory_bytes, -machine.speed))[:count]
        near = sorted(self._machines, key=lambda machine: (machine.latency_s, -machine.link_bytes_s, -machine.speed))
        for machines in (fast, roomy, near[:count]):
            for order in (tuple(machines), tuple(reversed(machines))):
                if all([one.kind for one in order] != [one.kind for one in other] for other in found):
                    found.append(order)
        return found

    def _bisect(
        self, order: Sequence[Machine], floor: float, ceiling: float, use_all: bool
    ) -> tuple[float, Bounds] | None:
        """The smallest limit between floor and ceiling at which the order holds all nodes, and its bounds."""
        high = min(ceiling, max(floor * 1.02, 1e-12))
        bounds = self._fill(order, high, use_all)
        while bounds is None:
            if high >= ceiling or high > floor * 1e6:
                return None
            floor, high = high, min(ceiling, high * 1.3)
            bounds = self._fill(order, high, use_all)
        low = floor
        for _ in range(14):
            if high - low <= 0.002 * high:
                break
            middle = (low + high) / 2
            tried = self._fill(order, middle, use_all)
            if tried is None:
                low = middle
            else:
                high, bounds = middle, tried
        return high, bounds

    def _fill(self, order: Sequence[Machine], limit: float, use_all: bool) -> Bounds | None:
        """Each machine takes what it can within `limit` seconds; None if nodes remain."""
        size, microbatches = self._work.size, self._work.microbatches
        bounds: list[tuple[Machine, int, int]] = []
        start = 0
        for place, machine in enumerate(order):
            if start == size:
                break
            left = limit - self._border_s(machine, start) - (2 * microbatches * machine.latency_s if start else 0.0)
            last = size - (len(order) - place - 1 if use_all else 0)
            end = self._reach(machine, start, last, left)
            if end <= start:
                if use_all:
                    return None
                continue
            bounds.append((machine, start, end))
            start = end
        return tuple(bounds) if start == size else None

    def _border_s(self, machine: Machine, cut: int) -> float:
        return self._crossing[cut] / machine.link_bytes_s + self._hop_s[cut]

    def _reach(self, machine: Machine, start: int, last: int, left: float) -> int:
        """The furthest good cut that `machine` reaches from `start` within `left` seconds; `start` if none."""
        operations, fixed = self._operations, self._fixed
        budget = left + operations[start] / machine.speed + fixed[start]
        nodes = range(start, last + 1)
        end = start - 1 + bisect_right(nodes, budget, key=lambda cut: operations[cut] / machine.speed + fixed[cut])
        end = min(end, bisect_right(self._memory, self._memory[start] + machine.memory_bytes, start, last + 1) - 1)
        for cut in range(end, max(start, end - _LOOK_BACK), -1):
            if self.piece_s(machine, start, cut) <= left:
                return cut
        return start

    def piece_s(self, machine: Machine, start: int, end: int) -> float:
        """Time of the nodes [start, end) with what crosses the far end (not the near one)."""
        time = (self._operations[end] - self._operations[start]) / machine.speed
        return time + self._fixed[end] - self._fixed[start] + self._border_s(machine, end)


def _counts(most: int) -> list[int]:
    """Numbers of machines to try: all small ones, then in steps of about a sixth."""
    found, count = [], 1
    while count < most:
        found.append(count)
        count = max(count + 1, count * 7 // 6)
    return [*found, most]
