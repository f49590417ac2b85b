"""Watching a session until it rests or the watcher goes away; what `train`, `attach`, `demo` and `resume` share.

The run does not depend on its watcher: Ctrl-C, SIGTERM or a closed terminal only detach. Nor does it depend on the
orchestrator for a while: the watcher says for how long that one is away, goes on asking, and gives up at a deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from cli.client import Client
from cli.eventstream import EventStream
from cli.progress import View
from cli.runstate import RunState
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.messages import SessionEvent, SessionInfo

WAIT_S = 1.0

_OVER = frozenset({"finished", "failed", "stopped"})
_RESTING = _OVER | {"paused", "created"}


@dataclass(frozen=True, slots=True)
class Followed:
    """How a session was when the watcher stopped watching."""

    session: SessionInfo
    state: RunState


async def follow(client: Client, session: SessionInfo, view: View, *, after: int = 0, replay: bool = True) -> Followed:
    """Show a session until it rests; on cancellation write the last state and re-raise.

    `replay` false: what happened before now is taken in, but not shown again.
    Raises: `UnreachableError` when the orchestrator is gone for good.
    """
    state = RunState(session.session, session.until or session.steps)
    events = EventStream(client, session.session, after)
    if not replay:
        session, past = await events.past()
        for event in past:
            _take(state, event, None)
    state.adopt(session)
    view.begin(state)
    verdict = "detached"
    state.heard = time.monotonic()
    try:
        while True:
            try:
                session, fresh = await _next(events, state, view)
            except UnreachableError:
                if state.away_s > state.give_up_s:
                    verdict = "lost sight of it"
                    raise UnreachableError(
                        f"the orchestrator at {client.address} has been away for {state.away_s:.0f} s; "
                        "the run may go on without it",
                        hint=f"dcnr attach {session.session}, once it is back",
                    ) from None
                continue
            over = session.state in _RESTING and len(fresh) < 500
            state.adopt(session)
            for event in fresh:
                told = over and _is_the_end(event, session) and not view.tells_failure
                _take(state, event, None if told else view)
            if not any(event.kind == "progress" for event in fresh):
                view.idle(state)
            if over:
                verdict = session.state
                return Followed(session, state)
    finally:
        view.end(state, verdict)


async def _next(events: EventStream, state: RunState, view: View) -> tuple[SessionInfo, list[SessionEvent]]:
    """The next events; meanwhile the view shows how long they have not come."""
    asked = asyncio.ensure_future(events.next(WAIT_S))
    try:
        while not asked.done():
            await asyncio.wait([asked], timeout=WAIT_S)
            if not asked.done():
                view.idle(state)
        found = await asked
    finally:
        asked.cancel()
    state.heard = time.monotonic()
    return found


async def newest_event(client: Client, session: str) -> int:
    """The number of the last event that the session has logged."""
    stream = EventStream(client, session)
    await stream.past()
    return stream.after


def failure(session: SessionInfo) -> DCNRError | None:
    """What a session in state "failed" ends a command with."""
    if session.state != "failed":
        return None
    saved = f"; step {session.committed} is saved" if session.committed else ""
    return RemoteError(
        f"{session.session} failed at step {session.step}: {session.error or 'no reason was given'}{saved}",
        hint=session.hint or f"dcnr logs {session.session}",
    )


def _is_the_end(event: SessionEvent, session: SessionInfo) -> bool:
    """The error that the run ended with: whoever follows says it once, at the end."""
    return event.kind == "error" and bool(session.error) and event.text.startswith(session.error)


def _take(state: RunState, event: SessionEvent, view: View | None) -> None:
    if event.kind == "placement":
        state.back_to(event.step)
    if event.kind == "progress":
        reports = state.take(event.steps)
        if reports and view is not None:
            view.steps(state, reports)
    elif view is not None:
        view.note(state, event.kind, event.text)
