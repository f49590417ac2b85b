"""A session's events, each once and in order, whoever counts them.

Events have numbers, and a reader asks for those after the last one it knows. An orchestrator that takes over has
another term, and its count may differ: what the last one had not yet written to its disk is gone, and if the disk is
gone it counts from 1. So at a change of term the whole log, which is bounded, is read anew, and what comes after the
newest event that was seen before is new.

Steps have a line of their own: `Steps` tells a step that is reported twice from one that is made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from wire.messages import SessionEvent, SessionInfo, StepReport, WatchInfo

REMEMBERED = 10_000
"""More than an orchestrator keeps of one session."""
PAGE = 500


class Watcher(Protocol):
    """What is needed of a client."""

    async def watch(self, session: str, after: int, wait_s: float, limit: int = PAGE) -> WatchInfo:
        """A session and its events after `after`."""


class EventStream:
    """The events of one session after number `after`; `term` is the one in which they are counted now."""

    def __init__(self, client: Watcher, session: str, after: int = 0) -> None:
        self.after = after
        self.term = 0
        self._client = client
        self._session = session
        self._seen: deque[tuple[int, float, str]] = deque(maxlen=REMEMBERED)

    async def next(self, wait_s: float) -> tuple[SessionInfo, list[SessionEvent]]:
        """The session now, and the events that came since; waits up to `wait_s` for one."""
        watched = await self._client.watch(self._session, self.after, wait_s, PAGE)
        while self.term and watched.term and watched.term != self.term:
            term = watched.term
            watched, events = await self._anew()
            if watched.term == term:
                self.term = term
                return watched.session, self._taken(events)
        self.term = self.term or watched.term
        return watched.session, self._taken(watched.events)

    async def past(self) -> tuple[SessionInfo, list[SessionEvent]]:
        """The session now, and all events that it has logged already."""
        events: list[SessionEvent] = []
        while True:
            info, fresh = await self.next(0.0)
            events += fresh
            if not fresh:
                return info, events

    def _taken(self, events: Sequence[SessionEvent]) -> list[SessionEvent]:
        if events:
            self.after = events[-1].seq
            self._seen.extend(map(_mark, events))
        return list(events)

    async def _anew(self) -> tuple[WatchInfo, list[SessionEvent]]:
        """The last answer about a log that another counts, and those of its events that were not seen."""
        seen = set(self._seen)
        events: list[SessionEvent] = []
        while (watched := await self._client.watch(self._session, _last(events), 0.0, PAGE)).events:
            events += watched.events
        newest = -1
        for index, event in enumerate(events):
            if _mark(event) in seen or (not seen and event.seq <= self.after):
                newest = index
        self.after = _last(events)
        return watched, events[newest + 1 :]


def _last(events: Sequence[SessionEvent]) -> int:
    return events[-1].seq if events else 0


def _mark(event: SessionEvent) -> tuple[int, float, str]:
    return event.seq, event.time, event.kind


class Steps:
    """Where a run stands, by its events. `at`: the last step; up to `again_to` they were made before a loss already."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.again_to = 0
        self._made = 0

    def back_to(self, step: int) -> None:
        """The run was placed anew and goes on from this step."""
        self.at, self.again_to = step, self._made

    def fresh(self, reports: Sequence[StepReport]) -> list[StepReport]:
        """The reports that do not repeat what is known: what an orchestrator that took over is told once more."""
        found = []
        for report in reports:
            if self.at is None or report.step > self.at:
                self.at = report.step
                self._made = max(self._made, report.step)
                found.append(report)
        return found
