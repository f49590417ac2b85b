"""What the client sees only goes forward.

The states of a session and which may follow which are a table of its own; a client looks now and then, so it may see
any state that can be reached, but those that need somebody to act only after somebody did. Committed steps never fall.
A run that is only disturbed never fails; only a start or resume may, before it runs, if there is no room for what was
asked for, or the store is away at that moment.
"""

from __future__ import annotations

from tests.sim.checks.breach import Check
from tests.sim.checks.model import Model, Thing
from tests.sim.history import Delivered, History, Told, Wrote

FOLLOWS: dict[str, set[str]] = {
    "created": {"starting"},
    "starting": {"running", "recovering", "failed"},
    "running": {"recovering", "paused", "finished", "failed"},
    "recovering": {"running", "finished", "failed"},
    "pausing": {"paused", "finished", "failed"},
    "stopping": {"stopped", "finished", "failed"},
    "paused": set(),
    "stopped": set(),
    "failed": set(),
    "finished": set(),
}
"""What happens without anybody acting."""

ASKED: dict[str, set[str]] = {
    "created": {"starting", "stopped"},
    "starting": {"pausing", "stopping", "paused", "stopped"},
    "running": {"pausing", "stopping", "starting"},
    "recovering": {"paused", "stopped", "pausing", "stopping"},
    "pausing": {"stopping", "running"},
    "paused": {"starting", "stopped"},
    "stopped": {"starting"},
    "failed": {"starting", "stopped"},
}
"""What may happen once a client has asked for something."""

AT_REST = frozenset({"created", "paused", "stopped", "failed"})


def reachable(state: str, *, acted: bool) -> set[str]:
    """All states that may be seen after `state`, itself among them."""
    found, pending = {state}, [state]
    while pending:
        at = pending.pop()
        for after in FOLLOWS.get(at, set()) | (ASKED.get(at, set()) if acted else set()):
            if after not in found:
                found.add(after)
                pending.append(after)
    return found


class Clients(Check):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Told] = {}
        self._committed: dict[str, Told] = {}
        self._under_way: set[str] = set()  # sessions that have run since somebody last asked for it
        self._rests: set[str] = set()

    def wrote(self, event: Wrote, thing: Thing, model: Model) -> None:
        """What the session itself wrote down."""
        if thing.record is not None:
            self._is(thing.record.session, thing.record.state)

    def delivered(self, event: Delivered, model: Model) -> None:
        """Somebody asks a session at rest to go on."""
        session, action = str(event.fields.get("session")), event.fields.get("action")
        if event.kind == "ActOnSession" and action in ("start", "resume") and session in self._rests:
            self._under_way.discard(session)

    def _is(self, session: str, state: str) -> None:
        if state in ("running", "recovering"):
            self._under_way.add(session)
        elif state == "starting":
            self._under_way.discard(session)
        if state in AT_REST:
            self._rests.add(session)
        else:
            self._rests.discard(session)

    def told(self, event: Told, model: Model) -> None:
        """See the module."""
        if event.what == "state":
            before = self._state.get(event.session)
            if event.state not in FOLLOWS:
                self.breach("the client's view", event.t, f"there is no state {event.state!r}", events=[event])
            elif before is not None and event.state not in reachable(before.state, acted=model.acted):
                self.breach(
                    "the client's view", event.t, f"{event.state} was seen after {before.state}", who=["client"],
                    step=event.step, events=[before, event],
                )  # fmt: skip
            self._is(event.session, event.state)
            if event.state == "failed" and event.session in self._under_way:
                self.breach(
                    "a disturbed run goes on", event.t, f"the session failed: {event.text}", who=["client"],
                    step=event.step, events=[event],
                )  # fmt: skip
            self._state[event.session] = event
        elif event.what == "committed":
            known = self._committed.get(event.session)
            if known is not None and event.step < known.step:
                self.breach(
                    "the client's view", event.t, f"committed step {known.step} became {event.step}", who=["client"],
                    step=event.step, events=[known, event],
                )  # fmt: skip
            self._committed[event.session] = event

    def end(self, history: History, model: Model) -> None:
        """A run that ended well was seen to."""
        last = self._state.get(history.session)
        if history.ended == "finished" and (last is None or last.state != "finished"):
            self.breach(
                "the client's view", history.end_s, f"the last state that was seen is {last.state if last else 'none'}",
                who=["client"], events=[last] if last else [],
            )  # fmt: skip
