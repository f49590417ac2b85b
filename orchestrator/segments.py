"""What each contiguous piece of the topological order costs on a machine. Pure.

A piece `[i, j)` holds the nodes from position i up to, not including, j. Its wire costs depend on i and j alone, which
is what makes exact search possible:

- in: values made before i that a node in the piece reads, each once;
- out: values made in the piece that a node at or after j reads, each once. (Where two later machines read one value it
  leaves twice; `predict` counts that, the search doesn't. Chains with residuals have no such value.)

Time of a piece on machine p, per step:
    operations / speed + fixed + (in + out) / link + hops * hop_busy_s + [in > 0] * 2 * microbatches * latency
Time of a placement with k machines: (M + k - 1) / M * the slowest piece, which is its own time and its share of the
pipeline's filling and draining.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.work import Machine, Work

Floats = NDArray[np.float64]


class Segments:
    """Costs of all pieces whose ends are in `cuts` (ascending; all positions unless given)."""

    def __init__(self, work: Work, in_flight: int, cuts: Sequence[int] | None = None) -> None:
        self.work = work
        self.cuts = list(range(work.size + 1)) if cuts is None else sorted({0, work.size, *cuts})
        self.count = len(self.cuts) - 1
        operations = [work.operations(node) for node in range(work.size)]
        fixed = [work.fixed_s(node) for node in range(work.size)]
        memory = [work.static_bytes[node] + in_flight * work.stash_bytes[node] for node in range(work.size)]
        self.operations = _prefix(operations)[self.cuts]
        self._fixed = _prefix(fixed)[self.cuts]
        self._memory = _prefix(memory)[self.cuts]
        self.in_bytes, self._bytes, self._hops, self._held = self._wire()

    def _wire(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Matrices over (i, j): bytes in; bytes in and out; hops in and out; memory of tied copies."""
        work, cuts = self.work, np.array(self.cuts)
        size = work.size
        crossing = np.zeros((2, size + 2))
        for value in work.values:
            crossing[:, value.maker + 1] += (value.step_bytes, value.step_hops)
            crossing[:, value.readers[-1] + 1] -= (value.step_bytes, value.step_hops)
        crossing = crossing.cumsum(axis=1)[:, cuts]
        shape = (len(cuts), len(cuts))
        in_bytes, both, hops, held = (np.zeros(shape) for _ in range(4))
        made: list[list[int]] = [[] for _ in range(size)]
        read: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        for number, value in enumerate(work.values):
            made[value.maker].append(number)
            for place, reader in enumerate(value.readers):
                read[reader].append((number, place))
        following, last = np.zeros((3, size + 1)), np.zeros((2, size + 1))
        done = 0
        for row, cut in enumerate(self.cuts):
            for node in range(done, cut):
                for number, place in read[node]:
                    value = work.values[number]
                    amounts = (value.step_bytes, value.step_hops, value.held_bytes)
                    following[:, node] -= amounts
                    if place + 1 < len(value.readers):
                        following[:, value.readers[place + 1]] += amounts
                for number in made[node]:
                    value = work.values[number]
                    following[:, value.readers[0]] += (value.step_bytes, value.step_hops, value.held_bytes)
                    last[:, value.readers[-1]] += (value.step_bytes, value.step_hops)
            done = cut
            ahead = cuts[row:]
            into = np.concatenate((np.zeros((3, 1)), following.cumsum(axis=1)), axis=1)[:, ahead]
            beyond = np.concatenate((last[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((2, 1))), axis=1)[:, ahead]
            out = crossing[:, row:] - beyond
            out[:, 0] = 0.0
            in_bytes[row, row:] = into[0]
            both[row, row:] = into[0] + out[0]
            hops[row, row:] = into[1] + out[1]
            held[row, row:] = into[2]
        return in_bytes, both, hops, held

    def seconds(self, machine: Machine) -> Floats:
        """Time per step of each piece on that machine; infinite where it has no node, no memory or a foreign pin."""
        work = self.work
        calibration = work.calibration
        time = (self.operations[None, :] - self.operations[:, None]) / machine.speed
        time += self._fixed[None, :] - self._fixed[:, None]
        time += self._bytes / machine.link_bytes_s + self._hops * calibration.hop_busy_s
        time += (self.in_bytes > 0) * (2 * work.microbatches * machine.latency_s)
        need = self._memory[None, :] - self._memory[:, None] + self._held
        time[need > machine.memory_bytes] = np.inf
        time[np.tril_indices(len(self.cuts))] = np.inf
        if any(pin is not None for pin in work.pins):
            foreign = _prefix([pin is not None and pin != machine.id for pin in work.pins])[self.cuts]
            time[(foreign[None, :] - foreign[:, None]) > 0] = np.inf
        return time

    def need_bytes(self, start: int, end: int) -> int:
        """Memory that the piece between the cuts number `start` and `end` needs."""
        return int(self._memory[end] - self._memory[start] + self._held[start, end])


def stretch(work: Work, machines: int) -> float:
    """How much longer a step takes than its slowest piece: the pipeline fills and drains."""
    return (work.microbatches + machines - 1) / work.microbatches


def _prefix(amounts: Sequence[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.array(amounts, dtype=np.float64))))
