"""What a session does when something is lost: a PNode, a run, a commit, its orchestrator. A part of its core.

A fault of an active session makes it recover: VNodes of what is lost are placed anew, the epoch grows, and the run goes
on from the last committed step, for as long as it takes to find room, within `Limits.recover_s`. A session that was
about to pause or stop does so at its last committed step instead.

Faults that are no loss (a run that broke, a stall, a refusal) would come again where nothing changes: `FRUITLESS`
recoveries in a row without a step committed between, or `REFUSALS` refusals to prepare, are the end of the attempt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator import events
from orchestrator.adoption import Adoption
from orchestrator.deploying import Deploying
from orchestrator.events import Command, Log, Record, Tell, Wait
from orchestrator.lifecycle import (
    ACTIVE,
    AWAY_S,
    COMMIT_S,
    PREPARE_S,
    REFUSED_RETRY_S,
    RETRY_S,
    STALL_S,
    Deployment,
    Limits,
    Stage,
    State,
)
from orchestrator.records import SessionRecord
from wire import messages
from wire.refusals import STORE_AWAY, UNHEALTHY

FRUITLESS = 3
REFUSALS = 3
ODD_BEATS = 3
"""Reports in a row that contradict what is known, before they are believed."""
RECOVERABLE = frozenset({"peer", "compute", "wait", "store"})
"""Causes of `RunFailed` after which another placement, or another try, may do."""


@dataclass(slots=True)
class Attempts:
    """Faults in a row that are no losses, since a step was committed or anything was lost."""

    broken: int = 0
    refused: int = 0
    refused_at: int = -1

    def broke(self) -> bool:
        """One more fault; whether to try again."""
        self.broken += 1
        return self.broken <= FRUITLESS

    def refuse(self, step: int) -> bool:
        """One more refusal to prepare from that step; whether to try again."""
        self.refused = self.refused + 1 if step == self.refused_at else 1
        self.refused_at = step
        return self.refused < REFUSALS

    def clear(self) -> None:
        """Something changed."""
        self.broken = self.refused = 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery: since when, the last step made before it, and what was lost first."""

    since: float
    step: int
    cause: str


class Recovering(Deploying):
    """Faults, and what comes of them."""

    def __init__(
        self, record: SessionRecord, *, term: int, new_id: Callable[[], str], limits: Limits | None = None
    ) -> None:
        super().__init__(record, term=term, new_id=new_id, limits=limits)
        self.adoption: Adoption | None = None
        self.recovery: Recovery | None = None
        self._attempts = Attempts()
        self._told = ""

    @abstractmethod
    def _ask_hold(self, now: float, out: list[Command]) -> None:
        """Let the step under way be the last."""

    @abstractmethod
    def _settle(self, now: float, out: list[Command]) -> None:
        """See whether the run has come to rest."""

    @property
    def cause(self) -> str:
        """Why it recovers, while it does."""
        return self.recovery.cause if self.recovery is not None and self.state is State.RECOVERING else ""

    def saw_epoch(self, epoch: int) -> None:
        """Somebody spoke of that epoch, so it is not used again."""
        self._seen_epoch = max(self._seen_epoch, epoch)

    # ------------------------------------------------------------ faults

    def _fault(self, text: str, now: float, out: list[Command], *, hint: str = "", counted: bool = True) -> None:
        """The present deployment can't go on. `counted`: not for a loss."""
        if self.state not in ACTIVE:
            self._warn(f"{text}; {self.id} is not deployed any more", out)
            self._take_down(out)
            out.append(Record())
        elif self._ending or self.record.committed >= self._goal > 0:
            self._rest(out, text)
        elif counted and not self._attempts.broke():
            self._fail(f"{text}; this was try {FRUITLESS + 1} without a step committed between", hint, out)
        else:
            self._recover(text, now, out)

    @property
    def _ending(self) -> bool:
        """It is to hold anyway."""
        return self.state in (State.PAUSING, State.STOPPING) or self.record.hold

    def _recover(self, text: str, now: float, out: list[Command], *, later: bool = False) -> None:
        """Place anew, at once or `later`."""
        if self.recovery is None:
            self.recovery = Recovery(now, self.record.step, text)
        self._moving = {}
        self._run = True
        if self.state is State.RECOVERING:
            self._warn(text, out)
        else:
            self._go(State.RECOVERING, out, text)
        if later:
            self._try_later("PNodes", f"another try: {text}", REFUSED_RETRY_S, now, out)
        else:
            self._place(now, out, yielding=True)

    def _try_later(self, who: str, what: str, delay_s: float, now: float, out: list[Command]) -> None:
        """There is no placement now; each PNode that joins, and each `delay_s`, is an occasion to try again."""
        assert self.recovery is not None
        self._stage(Stage.PLACING)
        self.waits.only("commit")
        since = self.recovery.since
        self.waits["room"] = Wait(who, what, since, since + self.limits.recover_s)
        self._retry_at = now + delay_s
        if what != self._told:
            self._told = what
            self._warn(f"waits for {who}: {what}", out)

    def _begun(self, now: float, out: list[Command]) -> None:
        self.record.recoveries += 1
        self._told = ""

    def _recovered(self, now: float, out: list[Command]) -> None:
        """The run goes on."""
        assert self.deployment is not None
        recovery, self.recovery = self.recovery, None
        if recovery is None:
            return
        again = max(0, recovery.step - self.deployment.start_step)
        redone = "nothing is redone" if not again else "1 step is redone" if again == 1 else f"{again} steps are redone"
        where = f"epoch {self.record.epoch} on {', '.join(self.pnodes)}, from step {self.deployment.start_step}"
        out.append(Log("note", f"recovered in {now - recovery.since:.1f} s: {where}; {redone}", self.record.step))

    def _not_placed(self, event: events.NotPlaced, now: float, out: list[Command]) -> None:
        if self.stage is not Stage.PLACING:
            return
        started = self.state is State.STARTING and not self._holders
        if event.final or started or self.state not in ACTIVE:
            self._give_up(event.text, event.hint, out)
        elif self.state is State.STARTING:
            self._recover(f"it can't be moved: {event.text}", now, out)
        else:
            what = f"room for {self.id}: {event.text}" if event.who == "PNodes" else event.text
            self._try_later(event.who, what, RETRY_S, now, out)

    def _not_recorded(self, event: events.NotRecorded, now: float, out: list[Command]) -> None:
        if self.waits.end("run"):
            self._give_up(event.text, event.hint, out)
            return
        if self.stage is not Stage.RAISING:
            return
        self.saw_epoch(event.epoch)
        if self.state is State.RECOVERING:
            self._try_later("store", event.text, 0.0 if event.epoch else RETRY_S, now, out)
        elif self.state is State.STARTING and (self._holders or event.epoch):
            self._recover(event.text, now, out)
        else:
            self._give_up(event.text, event.hint, out)

    def _denied(self, event: events.Denied, now: float, out: list[Command]) -> None:
        if not self.waits.end(event.key):
            return
        text = f"{event.who}: {event.text}"
        if self.state not in ACTIVE:
            self._give_up(text, event.hint, out)
        elif not event.key.startswith("prepare ") or not event.code:
            self._fault(text, now, out, hint=event.hint)
        elif self._ending:
            self._rest(out, text)
        elif event.code in (STORE_AWAY, UNHEALTHY) or self._attempts.refuse(self.record.start_step):
            self._recover(text, now, out, later=True)
        else:
            self._fail(text, event.hint, out)

    def _broke(self, event: events.RunBroke, now: float, out: list[Command]) -> None:
        if event.epoch != self.record.epoch or self.deployment is None:
            return
        text = event.pnode + (f", VNode {event.vnode}" if event.vnode else "") + f": {event.text}"
        if self.adoption is not None and event.cause in RECOVERABLE:
            self.adoption.ill(event.pnode, text)
            self._decide(now, out)
        elif self.stage in (Stage.PLACING, Stage.RAISING):
            pass  # this epoch was given up already
        elif event.cause in RECOVERABLE or self.state not in ACTIVE:
            self._fault(text, now, out, hint=event.hint)
        else:
            self._fail(text, event.hint or f"dcnr resume {self.id}", out)

    def _member_lost(self, event: events.MemberLost, now: float, out: list[Command]) -> None:
        if self._holders.get(event.pnode) == event.incarnation:
            del self._holders[event.pnode]
        text = f"PNode {event.pnode} is lost: {event.reason}"
        if self.deployment is None or self.deployment.incarnations.get(event.pnode) != event.incarnation:
            return
        self._attempts.clear()
        if self.adoption is not None:
            self.adoption.ill(event.pnode, text)
            self._decide(now, out)
        else:
            self._fault(text, now, out, counted=False)

    def _member_joined(self, event: events.MemberJoined, now: float, out: list[Command]) -> None:
        if self.adoption is not None:
            self.adoption.joined(event.pnode, event.incarnation)
            self._decide(now, out)
        elif self.state is State.RECOVERING and self._retry_at < float("inf"):
            self._place(now, out, yielding=True)

    # ------------------------------------------------------------ time

    def _ticked(self, now: float, out: list[Command]) -> None:
        if now >= self._retry_at:
            self._place(now, out, yielding=True)
        late = self.waits.late(now)
        if not late:
            return
        if "adopt" in late:
            self._decide(now, out, late=True)
            return
        text = "; ".join(
            f"no answer from {wait.who} within {wait.deadline - wait.since:.0f} s: {wait.what}"
            for wait in late.values()
        )
        hint = f"dcnr status {self.id} and dcnr ps show the PNodes"
        if self.state not in ACTIVE and self.stage in (Stage.DOWN, Stage.UP):
            self._warn("; ".join(f"{wait.what} is late" for wait in late.values()), out)
        elif self.state not in ACTIVE:
            self._give_up(text, hint, out)
        elif "room" in late:
            self._fail(f"{text} (--recover-limit)", f"{hint}; dcnr resume {self.id} tries again", out)
        elif self.stage in (Stage.PLACING, Stage.RAISING) and self.state is State.RECOVERING:
            self._try_later("orchestrator", text, RETRY_S, now, out)
        elif self.stage in (Stage.PLACING, Stage.RAISING) and not self._holders:
            self._give_up(text, hint, out)
        else:
            self._fault(text, now, out, hint=hint)

    def _heard(self, event: events.Beat, now: float, out: list[Command]) -> None:
        """What a member reports: progress puts off deadlines, and what contradicts the record is a fault."""
        beat = event.beat
        if beat is not None:
            self.saw_epoch(beat.epoch)
        if self.adoption is not None:
            self.adoption.beat(event.pnode, event.incarnation, beat)
            self._decide(now, out)
            return
        if self.deployment is None or self.deployment.incarnations.get(event.pnode) != event.incarnation:
            return
        if beat is not None and beat.epoch == self.record.epoch:
            if any(step <= self.record.committed for step in beat.uncommitted):
                out.append(Tell((event.pnode,), messages.Committed(self.id, beat.epoch, 0, self.record.committed)))
            if beat.moved > self._moved.get(event.pnode, -1):
                self._moved[event.pnode] = beat.moved
                for key in self.waits.of("prepare"):
                    if self.waits[key].who == event.pnode:
                        self.waits.extend(key, PREPARE_S, now)
                self._put_off_stall(now)
            if "store: " in beat.waiting_for:
                self._put_off_stall(now)
                for key in self.waits.of("commit"):
                    self.waits.extend(key, COMMIT_S, now)
        if self.stage is Stage.UP:
            sound = beat is not None and beat.epoch == self.record.epoch and beat.state != "failed"
            self._odd[event.pnode] = 0 if sound else self._odd.get(event.pnode, 0) + 1
            if self._odd[event.pnode] >= ODD_BEATS:
                self._odd[event.pnode] = 0
                what = "does not have it any more" if beat is None else f"has epoch {beat.epoch}, {beat.state}"
                self._fault(f"{event.pnode} {what}", now, out)

    def _put_off_stall(self, now: float) -> None:
        if "step" in self.waits:
            self.waits.extend("step", max(STALL_S, 20 * self.pace.step_s), now)

    # ------------------------------------------------------------ taking over

    def _taken_over(self, event: events.TakenOver, now: float, out: list[Command]) -> None:
        """A former orchestrator left this session; find out whether what it deployed still stands."""
        record = self.record
        if self.state not in ACTIVE and not record.placement:
            return
        self._stage(Stage.ADOPTING)
        self.adoption = Adoption(record.epoch, record.incarnations)
        self._holders = dict(record.incarnations)
        self._run = self.state in ACTIVE
        if record.placement:
            self.deployment = Deployment(
                record.epoch, dict(record.placement), dict(record.incarnations), record.loss_pnode, record.start_step
            )
        self.pace.begin(max(record.start_step, event.logged))
        record.step = max(record.step, event.logged)
        self.waits.begin("adopt", "", "", self.limits.adopt_s, now)
        self._name_missing()
        out.append(events.Survey())

    def _name_missing(self) -> None:
        assert self.adoption is not None
        if (wait := self.waits.get("adopt")) is not None:
            store = not self.adoption.surveyed and (self.adoption.late or not self.adoption.missing)
            who = "store" if store else ", ".join(self.adoption.missing) or "PNodes"
            what = f"take-over of {self.id}, after the orchestrator began anew"
            self.waits["adopt"] = Wait(who, what, wait.since, wait.deadline, wait.trouble if store else "")

    def _surveyed(self, event: events.Surveyed, now: float, out: list[Command]) -> None:
        if self.adoption is None:
            return
        if event.step > self.record.committed:
            self.record.committed, self.record.final_hash = event.step, event.hash
        self.adoption.surveyed, self.adoption.problem = True, event.problem
        self._decide(now, out)

    def _decide(self, now: float, out: list[Command], *, late: bool = False) -> None:
        """Adopt, or recover, as soon as it is known which."""
        adoption = self.adoption
        assert adoption is not None
        adoption.late = adoption.late or late
        verdict = adoption.verdict()
        if verdict is None:
            if late:
                self.waits.begin("adopt", "store", "what is committed", AWAY_S, now)
            self._name_missing()
            return
        self.waits.end("adopt")
        self.adoption = None
        if not verdict:
            self._adopt(now, out)
        elif self.state in ACTIVE:
            self._fault(f"the orchestrator began anew, and {verdict}", now, out, counted=False)
        else:
            out.append(Log("note", f"not deployed any more: {verdict}", self.record.step))
            self._take_down(out)
            out.append(Record())

    def _adopt(self, now: float, out: list[Command]) -> None:
        """It stands as it is."""
        self._stage(Stage.UP)
        where = f"epoch {self.record.epoch} on {', '.join(self.pnodes)}"
        out.append(Log("note", f"taken over by the orchestrator of term {self._term}: {where}", self.record.step))
        if self.record.committed:
            message = messages.Committed(self.id, self.record.epoch, 0, self.record.committed)
            out.append(Tell(tuple(self.pnodes), message))
        if self.state in (State.PAUSING, State.STOPPING):
            self._ask_hold(now, out)
            self._settle(now, out)
        elif self.state in ACTIVE:
            self._start(now, out)
        else:
            out.append(Record())

    # ------------------------------------------------------------ giving up

    def _give_up(self, text: str, hint: str, out: list[Command]) -> None:
        """An attempt failed: to run (the session fails) or only to deploy (it keeps its state)."""
        if self.state in ACTIVE:
            self._fail(text, hint, out)
            return
        self._take_down(out)
        self.record.error, self.record.hint = text, hint
        out.append(Log("error", f"not deployed: {text}" + (f" ({hint})" if hint else ""), self.record.step))
        out.append(Record())

    def _take_down(self, out: list[Command]) -> None:
        self.adoption = self.recovery = None
        super()._take_down(out)

    def _fail(self, text: str, hint: str, out: list[Command]) -> None:
        self._take_down(out)
        self.record.error = text
        self.record.hint = hint or f"dcnr resume {self.id}"
        self._go(State.FAILED, out)
        out.append(Log("error", f"{text} ({self.record.hint})", self.record.step))
