"""The life of one session. Pure: `handle(event, now)` gives commands; time is passed in. Its states: `lifecycle`.

A session is deployed in two phases, Prepare on all PNodes and then StartRun on all, so that no hop meets an unknown
epoch. The epoch grows with each deployment and is durable before anybody hears of it; what is said about another epoch
is ignored. A run has come to rest when all PNodes hold after the same step and that step is committed.

Every wait is in `waits` with its deadline; `waiting(now)` says who is awaited since when. A deadline that passes ends
the session's attempt with a cause that names them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import assert_never

from orchestrator import events
from orchestrator.events import Command, Event, Log, Record, Send, Tell, Wait
from orchestrator.lifecycle import (
    ACTIVE,
    COMMIT_S,
    HOLD_S,
    PREPARE_S,
    RESUMABLE,
    STAGES,
    STALL_S,
    START_S,
    TRANSITIONS,
    ActionRefusedError,
    Deployment,
    SessionBug,
    Stage,
    State,
)
from orchestrator.records import SessionRecord
from wire import messages


class Session:
    """One session; see the module's docstring. `record` is what is stored of it."""

    def __init__(self, record: SessionRecord, *, term: int, new_id: Callable[[], str], restored: bool = False) -> None:
        self.record = record
        self.stage = Stage.DOWN
        """Changed by `_stage` alone, as `record.state` by `_go`."""
        self.deployment: Deployment | None = None
        self.waits: dict[str, Wait] = {}
        self.removing = False
        """It is being deleted: it takes no action and hears nothing, so that nothing of it is written again."""
        self.step_s = 0.0
        self.tokens_s = 0.0
        self._term = term
        self._new_id = new_id
        self._run = False
        """The deployment under way is to be started when it's prepared."""
        self._hold_after_start: str = ""
        self._committing: set[int] = set()
        self._asked = 0
        self._story: deque[str] = deque(maxlen=60)
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)
        if restored and self.state in ACTIVE:
            record.error = f"interrupted at step {record.step}: the orchestrator ended while it was {record.state}"
            record.hint = f"dcnr resume {record.session}"
            record.state = State.FAILED.value

    # ------------------------------------------------------------ questions

    @property
    def id(self) -> str:
        """Session id."""
        return self.record.session

    @property
    def state(self) -> State:
        """Where its life stands."""
        return State(self.record.state)

    @property
    def deployed(self) -> bool:
        """Its VNodes are on PNodes and answer."""
        return self.stage is Stage.UP

    @property
    def in_use(self) -> bool:
        """It is deployed, being deployed, or running."""
        return self.stage is not Stage.DOWN or self.state in ACTIVE

    @property
    def pnodes(self) -> list[str]:
        """The PNodes of the present deployment."""
        return self.deployment.pnodes if self.deployment is not None else []

    def waiting(self, now: float) -> list[str]:
        """Who is awaited, for what and since when, as sentences."""
        return [
            f"{wait.who}: {wait.what}, for {now - wait.since:.0f} s (at most {wait.deadline - wait.since:.0f} s)"
            for wait in self.waits.values()
        ]

    def next_deadline(self) -> float:
        """When `Ticked` next has something to do."""
        return min((wait.deadline for wait in self.waits.values()), default=float("inf"))

    def eta_s(self) -> float:
        """Seconds until the run holds next, as far as is known."""
        goal = self.record.until or self.record.steps
        return max(0, goal - self.record.step) * self.step_s if self.state is State.RUNNING else 0.0

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
            case events.Placed():
                self._placed(event, now, out)
            case events.NotPlaced(text=text, hint=hint):
                if self.stage is Stage.PLACING:
                    self._give_up(text, hint, out)
            case events.Recorded(epoch=epoch):
                if self.stage is Stage.RAISING and epoch == self.record.epoch:
                    self._prepare(now, out)
            case events.NotRecorded(text=text, hint=hint):
                if self.stage is Stage.RAISING:
                    self._give_up(text, hint, out)
            case events.Answered(key=key):
                self._answered(key, now, out)
            case events.Denied(key=key, who=who, text=text, hint=hint):
                if key in self.waits:
                    self._give_up(f"{who}: {text}", hint, out)
            case events.Reported():
                self._reported(event, now, out)
            case events.Held():
                self._held(event, now, out)
            case events.RunBroke():
                self._broke(event, out)
            case events.PartsArrived(epoch=epoch, step=step):
                if epoch == self.record.epoch and step not in self._committing:
                    self._committing.add(step)
                    out.append(events.Commit(step))
                    self._wait(f"commit {step}", "store", f"commit of step {step}", COMMIT_S, now)
            case events.Committed():
                self._committed(event, now, out)
            case events.CommitFailed(step=step, text=text, hint=hint):
                self.waits.pop(f"commit {step}", None)
                self._committing.discard(step)
                self._warn(f"step {step} could not be committed: {text}", out)
                if self.state in ACTIVE:
                    self._fail(f"step {step} could not be committed: {text}", hint, out)
            case events.NotDeleted():
                pass
            case events.MemberLost():
                self._member_lost(event, out)
            case events.Ticked():
                self._ticked(now, out)
            case _:
                assert_never(event)
        return out

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
                self._place(event, now, out, run=False)
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
            case events.Acted():
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
        if self.state in (State.STARTING, State.RUNNING):
            self._hold_after_start = ""
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
        self._go(State.STARTING, out, f"runs until step {until} of {record.steps}")
        moved = event.pnodes or event.placement
        if self.stage is Stage.UP and not moved:
            self._run = True
            self._start(now, out)
            return
        self._take_down(out)
        self._place(event, now, out, run=True)

    def _pause(self, now: float, out: list[Command]) -> None:
        match self.state:
            case State.PAUSED | State.PAUSING:
                return
            case State.STARTING:
                self._hold_after_start = "pause"
            case State.RUNNING:
                self._go(State.PAUSING, out)
                self._ask_hold(now, out)
            case other:
                raise ActionRefusedError(f"{self.id} can't be paused: it is {other.value}", hint="dcnr ps")

    def _stop(self, now: float, out: list[Command]) -> None:
        match self.state:
            case State.STOPPED | State.STOPPING:
                return
            case State.RUNNING:
                self._go(State.STOPPING, out)
                self._ask_hold(now, out)
            case State.PAUSING:
                self._go(State.STOPPING, out)
            case State.STARTING | State.CREATED | State.PAUSED | State.FAILED:
                self._take_down(out)
                self._go(State.STOPPED, out)
            case other:
                raise ActionRefusedError(f"{self.id} can't be stopped: it is {other.value}", hint="dcnr ps")

    def _refuse_if_active(self, what: str) -> None:
        if self.state in ACTIVE:
            raise ActionRefusedError(
                f"{self.id} can't be {what}: it is {self.record.state}", hint=f"dcnr pause {self.id}, or dcnr stop"
            )

    # ------------------------------------------------------------ deployment

    def _place(self, event: events.Acted, now: float, out: list[Command], *, run: bool) -> None:
        if event.pnodes or event.placement:
            self.record.pnodes, self.record.wanted = event.pnodes, dict(event.placement)
        self._run = run
        self._stage(Stage.PLACING)
        self._wait("place", "orchestrator", "placement", PREPARE_S, now)
        out.append(events.Place(self.record.pnodes, dict(self.record.wanted)))

    def _placed(self, event: events.Placed, now: float, out: list[Command]) -> None:
        if self.stage is not Stage.PLACING:
            return
        self.waits.pop("place", None)
        self.record.epoch += 1
        self.deployment = Deployment(
            self.record.epoch,
            dict(event.placement),
            {pnode: event.incarnations[pnode] for pnode in dict.fromkeys(event.placement.values())},
            event.loss_pnode,
            event.start_step,
        )
        self._recent.clear()
        self.record.step = event.start_step
        if event.start_step < self.record.committed:
            self.record.committed, self.record.final_hash = event.start_step, ""
        for problem in event.problems:
            self._warn(problem, out)
        counts = {pnode: list(event.placement.values()).count(pnode) for pnode in self.pnodes}
        where = ", ".join(f"{pnode} ({count} VNode{'' if count == 1 else 's'})" for pnode, count in counts.items())
        text = f"epoch {self.record.epoch} on {where}, from step {event.start_step}"
        text += f"; predicted: {event.step_s * 1e3:.3g} ms a step" if event.step_s and self._run else ""
        out.append(Log("placement", "\n".join((text, *event.reasons)), event.start_step))
        self._stage(Stage.RAISING)
        self._wait("raise", "store", f"epoch {self.record.epoch}", START_S, now)
        out.append(Record(epoch=self.record.epoch))

    def _prepare(self, now: float, out: list[Command]) -> None:
        self.waits.pop("raise", None)
        self._stage(Stage.PREPARING)
        for pnode in self.pnodes:
            key = self._key("prepare", pnode)
            self._wait(key, pnode, "prepare its VNodes", PREPARE_S, now)
            out.append(Send(key, pnode, None, PREPARE_S))

    def _start(self, now: float, out: list[Command]) -> None:
        assert self.deployment is not None
        self.deployment.held.clear()
        for pnode in self.pnodes:
            key = self._key("start", pnode)
            message = messages.StartRun(self._new_id(), self.id, self.record.epoch, self._term, self.record.until)
            self._wait(key, pnode, f"start of the run until step {self.record.until}", START_S, now)
            out.append(Send(key, pnode, message, START_S))

    def _answered(self, key: str, now: float, out: list[Command]) -> None:
        if self.waits.pop(key, None) is None:
            return
        kind = key.partition(" ")[0]
        if any(other.startswith(f"{kind} ") for other in self.waits):
            return
        if kind == "prepare" and self.stage is Stage.PREPARING:
            self._stage(Stage.UP)
            if self._run:
                self._start(now, out)
            else:
                out.append(Log("note", f"deployed on {', '.join(self.pnodes)}", self.record.step))
                out.append(Record())
        elif kind == "start" and self.state is State.STARTING:
            self._go(State.RUNNING, out)
            self._wait("step", "the pipeline", "a step", STALL_S, now)
            hold, self._hold_after_start = self._hold_after_start, ""
            if hold:
                self._pause(now, out)
            self._settle(now, out)

    def _take_down(self, out: list[Command]) -> None:
        """Release what is deployed, and forget all waits for it."""
        self.waits = {key: wait for key, wait in self.waits.items() if key.startswith("commit ")}
        if self.deployment is not None and self.stage in (Stage.PREPARING, Stage.UP):
            message = messages.Release(self._new_id(), self.id, self.record.epoch, self._term)
            out.append(Tell(tuple(self.pnodes), message, sure=True))
        self._stage(Stage.DOWN)
        self.deployment = None
        self._hold_after_start = ""

    def _give_up(self, text: str, hint: str, out: list[Command]) -> None:
        """An attempt failed: to run (the session fails) or only to deploy (it keeps its state)."""
        if self.state in ACTIVE:
            self._fail(text, hint, out)
            return
        self._take_down(out)
        self.record.error, self.record.hint = text, hint
        out.append(Log("error", f"not deployed: {text}" + (f" ({hint})" if hint else ""), self.record.step))
        out.append(Record())

    # ------------------------------------------------------------ the run

    def _ask_hold(self, now: float, out: list[Command]) -> None:
        assert self.deployment is not None
        pnode = self.deployment.loss_pnode
        message = messages.HoldRun(self._new_id(), self.id, self.record.epoch, self._term, True)
        key = self._key("hold", pnode)
        self._wait(key, pnode, "hold after the step under way", START_S, now)
        out.append(Send(key, pnode, message, START_S))
        limit = max(HOLD_S, 5 * self.step_s)
        for name in self.pnodes:
            if name not in self.deployment.held:
                self._wait(f"held {name}", name, "end of the step under way", limit, now)

    def _reported(self, event: events.Reported, now: float, out: list[Command]) -> None:
        if event.epoch != self.record.epoch or not event.steps or self.deployment is None:
            return
        last = event.steps[-1]
        self.record.step = max(self.record.step, last.step)
        self.record.loss = last.loss
        self._recent.extend((report.count, report.seconds) for report in event.steps)
        seconds = sum(entry[1] for entry in self._recent)
        if seconds > 0:
            self.step_s = seconds / len(self._recent)
            self.tokens_s = sum(entry[0] for entry in self._recent) / seconds
        if "step" in self.waits:
            self._wait("step", "the pipeline", f"step {last.step + 1}", max(STALL_S, 20 * self.step_s), now)
        out.append(Log("progress", "", last.step, tuple(event.steps)))

    def _held(self, event: events.Held, now: float, out: list[Command]) -> None:
        deployment = self.deployment
        if event.epoch != self.record.epoch or deployment is None or event.pnode not in deployment.incarnations:
            return
        deployment.held[event.pnode] = event.step
        self.waits.pop(f"held {event.pnode}", None)
        self.record.step = max(self.record.step, event.step)
        self._settle(now, out)

    def _settle(self, now: float, out: list[Command]) -> None:
        """If all PNodes hold after the same step and that step is durable, the run has come to rest."""
        deployment = self.deployment
        if deployment is None or self.state not in (State.RUNNING, State.PAUSING, State.STOPPING):
            return
        if set(deployment.held) != set(deployment.incarnations) or len(set(deployment.held.values())) != 1:
            return
        step = next(iter(deployment.held.values()))
        self.waits = {key: wait for key, wait in self.waits.items() if key.startswith("commit ")}
        if step > self.record.committed:
            key = f"commit {step}"
            if key not in self.waits:
                self._wait(key, "PNodes and store", f"commit of step {step}", COMMIT_S, now)
            return
        if step >= self.record.steps:
            self._go(State.FINISHED, out, f"all {self.record.steps} steps are made and stored")
        elif self.state is State.STOPPING:
            self._take_down(out)
            self._go(State.STOPPED, out, f"step {step} is stored")
        else:
            self._go(State.PAUSED, out, f"holds after step {step}, which is stored")

    def _committed(self, event: events.Committed, now: float, out: list[Command]) -> None:
        self.waits.pop(f"commit {event.step}", None)
        self._committing.discard(event.step)
        if event.step >= self.record.committed:
            self.record.committed, self.record.final_hash = event.step, event.hash
        if event.note and event.note != self.record.bit_exact:
            self.record.bit_exact = event.note
            self._warn(event.note, out)
        out.append(Log("committed", f"step {event.step} is durable, hash {event.hash[:16]}", event.step))
        if self.deployment is not None and event.epoch == self.record.epoch:
            message = messages.Committed(self.id, event.epoch, 0, event.step)
            out.append(Tell(tuple(self.pnodes), message))
        out.append(Record())
        self._settle(now, out)

    def _broke(self, event: events.RunBroke, out: list[Command]) -> None:
        if event.epoch != self.record.epoch or self.deployment is None:
            return
        where = f"{event.pnode}" + (f", VNode {event.vnode}" if event.vnode else "")
        text = f"{where}: {event.text}"
        if self.state in ACTIVE:
            self._fail(text, event.hint or f"dcnr resume {self.id}", out)
        else:
            self._warn(text, out)
            self._take_down(out)

    def _member_lost(self, event: events.MemberLost, out: list[Command]) -> None:
        deployment = self.deployment
        if deployment is None or deployment.incarnations.get(event.pnode) != event.incarnation:
            return
        text = f"PNode {event.pnode} is lost: {event.reason}"
        if self.state in ACTIVE:
            asked = self.record.pnodes or self.record.wanted  # what was asked for can't be had without it
            resume = f"dcnr resume {self.id}" + (f" --pnodes {max(1, len(deployment.pnodes) - 1)}" if asked else "")
            self._fail(text, f"{resume} goes on from step {self.record.committed} on the others", out)
        else:
            self._warn(f"{text}; {self.id} is not deployed any more", out)
            self._take_down(out)
            out.append(Record())

    def _ticked(self, now: float, out: list[Command]) -> None:
        late = [wait for wait in self.waits.values() if now >= wait.deadline]
        if not late:
            return
        if self.state not in ACTIVE and self.stage in (Stage.DOWN, Stage.UP):
            self.waits = {key: wait for key, wait in self.waits.items() if wait not in late}
            self._warn("; ".join(f"{wait.what} is late" for wait in late), out)
            return
        text = "; ".join(
            f"no answer from {wait.who} within {wait.deadline - wait.since:.0f} s: {wait.what}" for wait in late
        )
        for key in [key for key, wait in self.waits.items() if wait in late]:
            del self.waits[key]
        self._give_up(text, f"dcnr status {self.id} and dcnr ps show the PNodes", out)

    # ------------------------------------------------------------ changes

    def _fail(self, text: str, hint: str, out: list[Command]) -> None:
        self._take_down(out)
        self.record.error = text
        self.record.hint = hint or f"dcnr resume {self.id}"
        self._go(State.FAILED, out)
        out.append(Log("error", f"{text} ({self.record.hint})", self.record.step))

    def _warn(self, text: str, out: list[Command]) -> None:
        out.append(Log("warning", text, self.record.step))

    def _key(self, kind: str, who: str) -> str:
        """A key that no earlier request has, so that a late answer to that one means nothing."""
        self._asked += 1
        return f"{kind} {who} {self._asked}"

    def _wait(self, key: str, who: str, what: str, limit_s: float, now: float) -> None:
        self.waits[key] = Wait(who, what, now, now + limit_s)

    def _stage(self, stage: Stage) -> None:
        if stage not in STAGES[self.stage]:
            story = "\n".join(self._story)
            raise SessionBug(f"the deployment of {self.id} can't go from {self.stage.value} to {stage.value}\n{story}")
        self.stage = stage

    def _go(self, state: State, out: list[Command], text: str = "") -> None:
        if state not in TRANSITIONS[self.state]:
            story = "\n".join(self._story)
            raise SessionBug(f"{self.id} can't go from {self.record.state} to {state.value}\n{story}")
        self.record.state = state.value
        if state not in ACTIVE:
            self.waits = {key: wait for key, wait in self.waits.items() if key.startswith("commit ")}
        out.append(Log("state", f"{state.value}" + (f": {text}" if text else ""), self.record.step))
        out.append(Record())
