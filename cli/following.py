"""Watching a session until it rests or the watcher goes away; what `train`, `attach`, `demo` and `resume` share.

The run does not depend on its watcher: Ctrl-C, SIGTERM or a closed terminal only detach. If the orchestrator does not
answer, the watcher says so, tries again, and gives up at a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cli.client import Client
from cli.progress import RunState, View
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.messages import SessionEvent, SessionInfo

WAIT_S = 1.0
GIVE_UP_S = 60.0

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
    _adopt(state, session)
    while not replay and (past := await client.watch(session.session, after, 0.0)).events:
        after = past.events[-1].seq
        for event in past.events:
            state.take(event.steps)
        _adopt(state, past.session)
    view.begin(state)
    verdict = "detached"
    quiet_since = state.heard = time.monotonic()
    try:
        while True:
            try:
                watched = await client.watch(session.session, after, WAIT_S)
            except UnreachableError:
                away = time.monotonic() - quiet_since
                if away > GIVE_UP_S:
                    verdict = "lost sight of it"
                    raise UnreachableError(
                        f"the orchestrator at {client.address} has not answered for {away:.0f} s; the run may go on",
                        hint=f"dcnr attach {session.session}",
                    ) from None
                state.waiting = [f"the orchestrator at {client.address}"]
                view.idle(state)
                continue
            quiet_since = state.heard = time.monotonic()
            session = watched.session
            _take(state, session, watched.events, view)
            if watched.events:
                after = watched.events[-1].seq
            if session.state in _RESTING and len(watched.events) < 500:
                verdict = session.state
                return Followed(session, state)
    finally:
        view.end(state, verdict)


async def newest_event(client: Client, session: str) -> int:
    """The number of the last event that the session has logged."""
    after = 0
    while True:
        watched = await client.watch(session, after, 0.0)
        if not watched.events:
            return after
        after = watched.events[-1].seq


def failure(session: SessionInfo) -> DCNRError | None:
    """What a session in state "failed" ends a command with."""
    if session.state != "failed":
        return None
    saved = f"; step {session.committed} is saved" if session.committed else ""
    return RemoteError(
        f"{session.session} failed at step {session.step}: {session.error or 'no reason was given'}{saved}",
        hint=session.hint or f"dcnr logs {session.session}",
    )


def _adopt(state: RunState, session: SessionInfo) -> None:
    state.target = session.until or session.steps
    state.unit = "tokens" if session.tokenizer_digest else "samples"
    state.state = session.state
    state.committed = session.committed
    state.waiting = session.waiting
    state.step = max(state.step, session.step) if state.recent else session.step


def _take(state: RunState, session: SessionInfo, events: Sequence[SessionEvent], view: View) -> None:
    _adopt(state, session)
    moved = False
    for event in events:
        if event.kind == "progress":
            state.take(event.steps)
            view.steps(state, event.steps)
            moved = True
        else:
            view.note(state, event.kind, event.text)
    if not moved:
        view.idle(state)
