"""Which steps were reported, and how fast they are made. Pure.

A PNode tells steps again after it registered anew, so each step counts once in an epoch. Steps may come out of order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from wire.messages import StepReport

MAX_AHEAD = 1000
"""Steps beyond a gap that are remembered; more than that, and the gap is given up."""


class Pace:
    """The reports of one epoch."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.tokens_s = 0.0
        self._all_to = 0
        self._ahead: set[int] = set()
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)

    def begin(self, step: int) -> None:
        """A new epoch goes on from `step`."""
        self._all_to = step
        self._ahead.clear()
        self._recent.clear()

    def fresh(self, reports: Sequence[StepReport]) -> tuple[StepReport, ...]:
        """Those that were not reported before."""
        found = []
        for report in reports:
            if report.step <= self._all_to or report.step in self._ahead:
                continue
            self._ahead.add(report.step)
            found.append(report)
            while self._all_to + 1 in self._ahead:
                self._all_to += 1
                self._ahead.remove(self._all_to)
            if len(self._ahead) > MAX_AHEAD:
                self._all_to = max(self._ahead)
                self._ahead.clear()
        self._recent.extend((report.count, report.seconds) for report in found)
        seconds = sum(entry[1] for entry in self._recent)
        if seconds > 0:
            self.step_s = seconds / len(self._recent)
            self.tokens_s = sum(entry[0] for entry in self._recent) / seconds
        return tuple(found)
