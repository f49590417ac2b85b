"""A session's history: what happened, and the reports of its steps, for clients that attach later. Bounded. Pure.

Events are numbered from 1 and never renumbered. The reports of the newest `WHOLE_STEPS` steps are all kept; whenever
there are more than `MAX_STEPS`, the older ones are thinned to evenly spaced ones, so that the course of the whole run
stays visible. Other events are kept up to `MAX_EVENTS`, the oldest go first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from wire.messages import SessionEvent, StepReport

WHOLE_STEPS = 2000
MAX_STEPS = 6000
MAX_EVENTS = 1000
BATCH = 100
"""Reports in one event after thinning."""
MAX_TEXT = 8000


class EventLog:
    """The events of one session, oldest first."""

    def __init__(self, events: Iterable[SessionEvent] = ()) -> None:
        self._events = list(events)
        self._next = self._events[-1].seq + 1 if self._events else 1
        self._steps = sum(len(event.steps) for event in self._events)
        self._others = sum(event.kind != "progress" for event in self._events)
        self._fresh: list[SessionEvent] = []
        self._rewritten = False

    @property
    def last(self) -> int:
        """Number of the newest event."""
        return self._next - 1

    def __len__(self) -> int:
        return len(self._events)

    def append(self, kind: str, text: str, step: int, time: float, steps: Sequence[StepReport] = ()) -> SessionEvent:
        """Add an event. `time`: wall clock."""
        event = SessionEvent(self._next, time, kind, text[:MAX_TEXT], step, list(steps))
        self._next += 1
        self._events.append(event)
        self._fresh.append(event)
        self._steps += len(event.steps)
        self._others += kind != "progress"
        if self._steps > MAX_STEPS:
            self._thin()
        if self._others > MAX_EVENTS:
            self._drop_oldest()
        return event

    def after(self, seq: int, limit: int) -> list[SessionEvent]:
        """Up to `limit` events with a larger number."""
        start = bisect_right(self._events, seq, key=lambda event: event.seq)
        return self._events[start : start + max(1, limit)]

    def last_step(self) -> int:
        """The newest step reported since the last placement, 0 if there is none."""
        newest = 0
        for event in reversed(self._events):
            if event.kind == "placement":
                break
            newest = max([newest, *(report.step for report in event.steps)])
        return newest

    def unsaved(self) -> tuple[bool, list[SessionEvent]]:
        """What was not stored yet: (True, all events) after thinning, else (False, the new ones). Forgets them."""
        rewritten, self._rewritten = self._rewritten, False
        fresh, self._fresh = self._fresh, []
        return (True, list(self._events)) if rewritten else (False, fresh)

    def _thin(self) -> None:
        """Keep older reports at even distances, and gather them in fewer events."""
        kept, border = 0, len(self._events)
        while border > 0 and kept < WHOLE_STEPS:
            border -= 1
            kept += len(self._events[border].steps)
        older: list[SessionEvent] = []
        gathered: list[StepReport] = []
        last: SessionEvent | None = None
        distance = max(1, self._events[border - 1].step * 2 // (MAX_STEPS - WHOLE_STEPS))
        due = before = 0

        def flush() -> None:
            nonlocal gathered, last
            if last is not None and gathered:
                older.append(SessionEvent(last.seq, last.time, "progress", "", gathered[-1].step, gathered))
            gathered, last = [], None

        for event in self._events[:border]:
            if event.kind != "progress":
                flush()
                older.append(event)
                continue
            for report in event.steps:
                if report.step >= due or report.step <= before:  # a resumed run goes back
                    gathered.append(report)
                    due = report.step + distance
                before = report.step
            last = event
            if len(gathered) >= BATCH:
                flush()
        flush()
        self._events = older + self._events[border:]
        self._steps = sum(len(event.steps) for event in self._events)
        self._rewritten = True

    def _drop_oldest(self) -> None:
        surplus = self._others - MAX_EVENTS * 3 // 4
        kept = []
        for event in self._events:
            if surplus > 0 and event.kind != "progress":
                surplus -= 1
                continue
            kept.append(event)
        self._events = kept
        self._others = sum(event.kind != "progress" for event in kept)
        self._rewritten = True
