"""The life of one session. Pure: `handle(event, now)` gives commands; time is passed in. Its states: `lifecycle`.

A session is deployed in two phases, Prepare on all PNodes and then StartRun on all, so that no hop meets an unknown
epoch (`deploying`). The epoch grows with each deployment and is durable before anybody hears of it; what is said about
another epoch is ignored. A run has come to rest when all PNodes hold after the same step and that step is committed.
What happens when something is lost is `recovery`'s.

Every wait is in `waits` with its deadline; `waiting(now)` says who is awaited since when.
"""

from __future__ import annotations

from typing import assert_never

from orchestrator import events
from orchestrator.events import Command, Event, Log, Record, Send, Tell
from orchestrator.lifecycle import (
    ACTIVE,
    AWAY_S,
    COMMIT_S,
    HOLD_S,
    RESUMABLE,
    STALL_S,
    START_S,
    ActionRefusedError,
    Stage,
    State,
)
from orchestrator.recovery import Recovering
from wire import messages


class Session(Recovering):
    """One session; see the module's docstring."""

    removing = False
    """It is being deleted: it takes no action and hears nothing, so that nothing of it is written again."""

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about an event. Raises `ActionRefusedError` for an action that can't be done now."""
        self._story.append(f"{now:.3f} {self.record.state}/{self.stage.value}: {str(event)[:200]}")
        out: list[Command] = []
        if self.removing:
            self._ignore(event, out)
            return out
        match event:
            case events.Acted():
                self._act(event, now, out)
            case events.Move():
                self._move(event, now, out)
            case events.Placed():
                self._placed(event, now, out)
            case events.NotPlaced():
                self._not_placed(event, now, out)
            case events.Recorded(epoch=epoch):
                if self.stage is Stage.RAISING and epoch == self.record.epoch:
                    self._prepare(now, out)
            case events.RunRecorded():
                self._run_recorded = True
                if self.waits.end("run"):
                    self._start(now, out)
            case events.NotRecorded():
                self._not_recorded(event, now, out)
            case events.Answered(key=key):
                self._answered(key, now, out)
            case events.Denied():
                self._denied(event, now, out)
            case events.Reported():
                self._reported(event, now, out)
            case events.Held():
                self._held(event, now, out)
            case events.Beat():
                self._heard(event, now, out)
            case events.RunBroke():
                self._broke(event, now, out)
            case events.PartsArrived():
                self._parts_arrived(event, now, out)
            case events.Committed():
                self._committed(event, now, out)
            case events.CommitFailed():
                self._commit_failed(event, now, out)
            case events.Troubled(key=key, text=text):
                self.waits.trouble(key, text)
            case events.NotDeleted():
                pass
            case events.MemberLost():
                self._member_lost(event, now, out)
            case events.MemberJoined():
                self._member_joined(event, now, out)
            case events.TakenOver():
                self._taken_over(event, now, out)
            case events.Surveyed():
                self._surveyed(event, now, out)
            case events.Ticked():
                self._ticked(now, out)
            case _:
                assert_never(event)
        return out

    def listens_to(self, pnode: str) -> bool:
        """Whether that PNode's reports matter: it is, or was, a member."""
        return self.deployment is not None and pnode in self.deployment.incarnations

    # ------------------------------------------------------------ actions

    def _act(self, event: events.Acted, now: float, out: list[Command]) -> None:
        match event.action:
            case "start" | "resume":
                self._begin(event, now, out)
            case "pause":
                self._pause(now, out)
            case "stop":
                self._stop(now, out)
            case "deploy":
                if self.state in ACTIVE or self.stage is not Stage.DOWN:
                    return
                yielding = self._yields(event)
                self._run = False
                self._place(now, out, yielding=yielding)
            case "undeploy":
                self._refuse_if_active("undeployed")
                self._take_down(out)
                out.append(Record())
            case "remove":
                if not event.force:
                    self._refuse_if_active("removed")
                self._take_down(out)
                self.waits.clear()
                self.removing = True
                out.append(events.Delete())
            case other:
                raise ActionRefusedError(
                    f"there is no action {other!r}", hint="start, pause, resume, stop, deploy, undeploy, remove"
                )

    def _ignore(self, event: Event, out: list[Command]) -> None:
        """What is heard while the session is being deleted."""
        match event:
            case events.Acted(action="remove"):
                pass
            case events.Acted() | events.Move():
                raise ActionRefusedError(f"{self.id} is being removed", hint="dcnr ps")
            case events.NotDeleted(text=text, hint=hint):
                self.removing = False
                if self.state in ACTIVE:
                    self._fail(text, hint, out)
                else:
                    self._warn(text, out)
                    out.append(Record())
            case _:
                pass

    def _begin(self, event: events.Acted, now: float, out: list[Command]) -> None:
        record = self.record
        if self.state in (State.STARTING, State.RUNNING, State.RECOVERING):
            record.hold = False
            if self._want(event) and self.state is State.RECOVERING and self.stage is Stage.PLACING:
                self._place(now, out, yielding=True)
            out.append(Record())
            return
        if self.state not in RESUMABLE:
            what = "started" if event.action == "start" else "resumed"
            if self.state is State.FINISHED:
                raise ActionRefusedError(
                    f"{self.id} can't be {what}: it has made all {record.steps} steps",
                    hint=f"dcnr eval {self.id}, or a longer run: dcnr train {record.network} --steps N",
                )
            raise ActionRefusedError(
                f"{self.id} can't be {what}: it is {record.state}", hint=f"dcnr attach {self.id}, or dcnr ps"
            )
        if not record.data_digest:
            raise ActionRefusedError(f"{self.id} has no data, so it can't be trained", hint="dcnr train NETWORK")
        until = event.until or record.steps
        if not 0 < until <= record.steps:
            raise ActionRefusedError(f"until is {until}, but {self.id} has {record.steps} steps")
        if until <= record.committed and until < record.steps:
            raise ActionRefusedError(
                f"until is {until}, but {self.id} has made {record.committed} steps", hint="give a larger --until"
            )
        record.until = until
        record.error = record.hint = ""
        self._attempts.clear()
        self._run_recorded = False
        self._go(State.STARTING, out, f"runs until step {until} of {record.steps}", run=True)
        self._run = True
        yielding = self._yields(event)
        moved = bool(event.pnodes or event.placement)
        if self.stage is Stage.UP and not moved:
            self._start(now, out)
        elif self.stage is not Stage.ADOPTING or moved:
            self._take_down(out)
            self._place(now, out, yielding=yielding)

    def _want(self, event: events.Acted) -> bool:
        """Take in what PNodes or placement are asked for; whether any are."""
        if event.pnodes or event.placement:
            self.record.pnodes, self.record.wanted = event.pnodes, dict(event.placement)
        return bool(event.pnodes or event.placement)

    def _yields(self, event: events.Acted) -> bool:
        """Whether less than what was asked for will do: if it was had once, and is not asked for now."""
        return not self._want(event) and self.record.epoch > 0

    def _pause(self, now: float, out: list[Command]) -> None:
        match self.state:
            case State.PAUSED | State.PAUSING:
                return
            case State.STARTING if self.waits.end("run"):
                self.record.hold = False
                self._go(State.PAUSED, out, "nothing was started yet")
            case State.STARTING:
                self.record.hold = True
                out.append(Record())
            case State.RECOVERING:
                self._rest(out, "the pause came while it recovered")
            case State.RUNNING:
                self._moving = {}
                self._go(State.PAUSING, out)
                self._ask_hold(now, out)
            case other:
                raise ActionRefusedError(f"{self.id} can't be paused: it is {other.value}", hint="dcnr ps")

    def _stop(self, now: float, out: list[Command]) -> None:
        match self.state:
            case State.STOPPED | State.STOPPING:
                return
            case State.RUNNING:
                self._moving = {}
                self._go(State.STOPPING, out)
                self._ask_hold(now, out)
            case State.PAUSING:
                self._go(State.STOPPING, out)
            case State.STARTING | State.RECOVERING | State.CREATED | State.PAUSED | State.FAILED:
                self._take_down(out)
                self._go(State.STOPPED, out)
            case other:
                raise ActionRefusedError(f"{self.id} can't be stopped: it is {other.value}", hint="dcnr ps")

    def _refuse_if_active(self, what: str) -> None:
        if self.state in ACTIVE:
            raise ActionRefusedError(
                f"{self.id} can't be {what}: it is {self.record.state}", hint=f"dcnr pause {self.id}, or dcnr stop"
            )

    def _move(self, event: events.Move, now: float, out: list[Command]) -> None:
        """Move to a placement: at once where it rests, else after a cut of its own."""
        if self.stage is not Stage.UP or self.state not in (*RESUMABLE, State.FINISHED, State.RUNNING):
            raise ActionRefusedError(
                f"{self.id} can't be moved: it is {self.record.state}", hint=f"dcnr attach {self.id}, or dcnr ps"
            )
        self.record.pnodes, self.record.wanted = 0, {}
        if self.state is State.RUNNING:
            self._moving = dict(event.placement)
            out.append(Log("note", "holds for a moment, to be placed anew", self.record.step))
            self._ask_hold(now, out)
        else:
            self._run = False
            self._place(now, out, target=event.placement)

    # ------------------------------------------------------------ the run

    def _started(self, now: float, out: list[Command]) -> None:
        if self.state in (State.STARTING, State.RECOVERING):
            self._go(State.RUNNING, out)
            self._recovered(now, out)
        if self.state is State.RUNNING:
            self.waits.begin("step", "the pipeline", "a step", STALL_S, now)
            if self.record.hold:
                self.record.hold = False
                self._pause(now, out)
        self._settle(now, out)

    def _ask_hold(self, now: float, out: list[Command]) -> None:
        if self.stage is not Stage.UP:
            return  # it is asked as soon as the deployment is taken over
        assert self.deployment is not None
        pnode = self.deployment.loss_pnode
        message = messages.HoldRun(self._new_id(), self.id, self.record.epoch, self._term, True)
        key = self._key("hold", pnode)
        self.waits.begin(key, pnode, "hold after the step under way", START_S, now)
        out.append(Send(key, pnode, message, START_S))
        limit = max(HOLD_S, 5 * self.pace.step_s)
        for name in self.pnodes:
            if name not in self.deployment.held:
                self.waits.begin(f"held {name}", name, "end of the step under way", limit, now)

    def _reported(self, event: events.Reported, now: float, out: list[Command]) -> None:
        if event.epoch != self.record.epoch or self.deployment is None:
            return
        fresh = self.pace.fresh(event.steps)
        if not fresh:
            return
        last = max(fresh, key=lambda report: report.step)
        if last.step >= self.record.step:
            self.record.step, self.record.loss = last.step, last.loss
        if "step" in self.waits:
            limit = max(STALL_S, 20 * self.pace.step_s)
            self.waits.begin("step", "the pipeline", f"step {last.step + 1}", limit, now)
        out.append(Log("progress", "", last.step, fresh))

    def _held(self, event: events.Held, now: float, out: list[Command]) -> None:
        deployment = self.deployment
        if event.epoch != self.record.epoch or deployment is None or event.pnode not in deployment.incarnations:
            return
        deployment.held[event.pnode] = event.step
        self.waits.end(f"held {event.pnode}")
        self.record.step = max(self.record.step, event.step)
        self._settle(now, out)

    def _settle(self, now: float, out: list[Command]) -> None:
        """If all PNodes hold after the same step and that step is durable, the run has come to rest."""
        deployment = self.deployment
        if self.stage is not Stage.UP or self.state not in (State.RUNNING, State.PAUSING, State.STOPPING):
            return
        assert deployment is not None
        if set(deployment.held) != set(deployment.incarnations) or len(set(deployment.held.values())) != 1:
            return
        step = next(iter(deployment.held.values()))
        self.waits.only("commit", "parts")
        if step > self.record.committed:
            if f"commit {step}" not in self.waits and f"parts {step}" not in self.waits:
                self.waits.begin(f"parts {step}", "PNodes and store", f"commit of step {step}", COMMIT_S, now)
            return
        self.waits.only("commit")
        moving, self._moving = self._moving, {}
        if step >= self.record.steps:
            self._go(State.FINISHED, out, f"all {self.record.steps} steps are made and stored")
        elif self.state is State.STOPPING:
            self._take_down(out)
            self._go(State.STOPPED, out, f"step {step} is stored")
        elif self.state is State.PAUSING or step >= self._goal:
            self._go(State.PAUSED, out, f"holds after step {step}, which is stored")
        elif moving:
            self._go(State.STARTING, out, f"is placed anew, from step {step}")
            self._place(now, out, target=moving)
        else:  # a hold that nobody waits for any more
            self._start(now, out)

    # ------------------------------------------------------------ commits

    def _parts_arrived(self, event: events.PartsArrived, now: float, out: list[Command]) -> None:
        if event.epoch != self.record.epoch or event.step in self._committing:
            return
        self._committing.add(event.step)
        self.waits.end(f"parts {event.step}")
        self.waits.begin(f"commit {event.step}", "store", f"commit of step {event.step}", AWAY_S, now)
        out.append(events.Commit(event.step))

    def _committed(self, event: events.Committed, now: float, out: list[Command]) -> None:
        """Up to that step everything is durable: older cuts need no commit any more."""
        over = [key for kind in ("commit", "parts") for key in self.waits.of(kind) if _step(key) <= event.step]
        self.waits.end(*over)
        self._committing = {step for step in self._committing if step > event.step}
        fresh = event.step > self.record.committed
        if fresh:
            self._attempts.clear()
            self.record.committed, self.record.final_hash = event.step, event.hash
        if event.note and event.note != self.record.bit_exact:
            self.record.bit_exact = event.note
            self._warn(event.note, out)
        if fresh:
            out.append(Log("committed", f"step {event.step} is durable, hash {event.hash[:16]}", event.step))
        if self.deployment is not None and event.epoch == self.record.epoch:
            message = messages.Committed(self.id, event.epoch, 0, event.step)
            out.append(Tell(tuple(self.pnodes), message))
        out.append(Record())
        self._settle(now, out)

    def _commit_failed(self, event: events.CommitFailed, now: float, out: list[Command]) -> None:
        self.waits.end(f"commit {event.step}")
        self._committing.discard(event.step)
        text = f"step {event.step} could not be committed: {event.text}"
        if self.state in ACTIVE and self.stage is Stage.UP and event.epoch == self.record.epoch:
            self._fault(text, now, out, hint=event.hint)
        else:
            self._warn(text, out)


def _step(key: str) -> int:
    """Of a wait for a cut: `commit 17`."""
    return int(key.partition(" ")[2])
