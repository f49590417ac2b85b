"""The logic of one session on one PNode: events in, commands out. Pure: no clock, no socket, no torch, no asyncio.

Rules (DESIGN 6):

- Order comes from the schedules, not from arrival. A message that is early waits in its slot; slots are bounded by the
  sender's window; what lies beyond, came before, or doesn't belong here is refused and counted, never applied.
- A job is queued as soon as its inputs are here and its stage's previous job is queued: the compute thread works in
  the order of the queue, so a job may count on everything queued before it. Values between stages of one PNode never
  leave the compute side; "queued" is enough for them too.
- U(s) needs the verdict of s, which needs the report of every member and all losses.
  F(s+1) is queued after U(s), after the new versions of borrowed parameters, and after the cut if there is one.
- The loss's PNode alone decides hold and save, and the verdict carries both: a consistent cut without a barrier.
- A cut that is due is made while few enough are uncommitted (`uncommitted`); else it, and training behind it, waits.
- A lost member ends this epoch, whatever its state: what was sent to it or by it may be lost too.

A new placement or a replay from a cut is a new Core (epoch + 1, `start_step` of the cut) fed by the same driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import assert_never

from networks.stages import Channel
from pnode.events import (
    Broke,
    Cause,
    Command,
    Compute,
    CutCommitted,
    Decision,
    Done,
    Event,
    Fail,
    HoldAsked,
    HopArrived,
    Job,
    JobDone,
    JobFailed,
    JobKind,
    PeerLost,
    Refuse,
    Released,
    ReportArrived,
    SaveCut,
    Saved,
    SendHop,
    SendReport,
    SendTieGradient,
    SendTieVersion,
    SendVerdict,
    Started,
    TellApplied,
    TellHeld,
    TellProgress,
    TieGradientArrived,
    TieVersionArrived,
    VerdictArrived,
    WaitedTooLong,
)
from pnode.inbox import Inbox, Refusal
from pnode.share import Share
from pnode.turns import Turns, Wait
from pnode.uncommitted import Uncommitted
from pnode.verdict import decide
from wire.errors import MisuseError

STORY = 60
MAX_UNCOMMITTED, MAX_IN_MEMORY = 10, 2


class State(Enum):
    """The life of a session on a PNode."""

    PREPARED = "prepared"
    RUNNING = "running"
    HELD = "held"
    FAILED = "failed"
    RELEASED = "released"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.PREPARED: frozenset({State.RUNNING, State.HELD, State.FAILED, State.RELEASED}),
    State.RUNNING: frozenset({State.HELD, State.FAILED, State.RELEASED}),
    State.HELD: frozenset({State.RUNNING, State.FAILED, State.RELEASED}),
    State.FAILED: frozenset({State.RELEASED}),
    State.RELEASED: frozenset(),
}


class CoreError(MisuseError):
    """The driver broke the core's rules; the message ends with the session's story."""


class Core:
    """See the module. Feed `handle`, carry out what it returns in order, show `waiting`.

    `max_uncommitted`, `max_in_memory`: cuts that are not durable, and of those the ones that the store does not have.
    """

    def __init__(
        self, share: Share, *, max_uncommitted: int = MAX_UNCOMMITTED, max_in_memory: int = MAX_IN_MEMORY
    ) -> None:
        self.share = share
        self.state = State.PREPARED
        self.step = share.start_step  # the step being made = steps whose U is queued
        self.applied = share.start_step  # steps whose U is done
        self.until = share.start_step
        self.refused: dict[str, int] = {}
        self.story: deque[str] = deque(maxlen=STORY)
        self.uncommitted = Uncommitted(max_uncommitted, max_in_memory)
        self._inbox = Inbox(share)
        self._turns = Turns(share, self._inbox)
        self._versions_due: set[str] = set()  # borrowed owners whose version after U(step - 1) isn't queued yet
        self._reports: dict[int, dict[str, ReportArrived]] = {}
        self._losses: dict[int, tuple[float, int, str]] = {}
        self._verdicts: dict[int, Decision] = {}
        self._queued: deque[Job] = deque()
        self._ties_queued = self._report_queued = False
        self._cut_due = False
        self._hold_asked = self._save_asked = False
        self._hold_told = True
        self._updated_at = 0.0
        self.moved_at = 0.0  # when the session last got on: whatever it waits for, it waits since then
        self.moves = 0  # grows whenever it gets on
        self._progress_due: dict[int, tuple[Decision, float, str]] = {}

    # ---------------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at time `now` (any monotonic clock, seconds); the commands are to be done in order.

        Raises `CoreError` if the driver reports something that can't be (a bug on this side).
        """
        self._note(event)
        if self.state is State.RELEASED:
            return []
        if self.state is State.FAILED and not isinstance(event, Released):
            return []
        out: list[Command] = []
        before = len(self.uncommitted)
        match event:
            case Started():
                self._start(event, now, out)
            case HopArrived():
                self._kept(self._inbox.put_hop(event), out)
            case TieGradientArrived():
                self._kept(self._inbox.put_tie_gradient(event, self.step, self._report_queued), out)
            case TieVersionArrived():
                self._kept(self._inbox.put_tie_version(event, self.step, self._versions_due), out)
            case ReportArrived():
                self._report(event, out)
            case VerdictArrived():
                self._verdict(event, out)
            case HoldAsked():
                self._hold(event, out)
            case JobDone():
                self._job_done(event, now, out)
            case JobFailed():
                self._fail(out, event.cause, f"{event.job}: {event.text}", event.hint, vnode=event.vnode)
            case Saved():
                self._saved(event, out)
            case CutCommitted(applied):
                self.uncommitted.committed(applied)
            case PeerLost():
                self._lost(event, out)
            case WaitedTooLong():
                text = f"step {self.step + 1} waited {event.limit_s:g} s for {'; '.join(self.waiting())}"
                hint = f"see `dcnr ps` for who is waited for; the limit is dcnr-pnode's {event.option}"
                self._fail(out, event.cause, text, hint)
            case Broke(vnode, text, hint, cause):
                self._fail(out, cause, text, hint, vnode=vnode)
            case Released():
                self._go(State.RELEASED)
            case _:
                assert_never(event)
        self._pump(out)
        self._tell_held(out)
        on = isinstance(event, Started | JobDone | Saved) or len(self.uncommitted) < before
        if on or any(not isinstance(command, Refuse) for command in out):
            self.moved_at = now
            self.moves += 1
        return out

    def waiting(self) -> list[str]:
        """Who and what this session waits for, as sentences; empty while it computes or has nothing to do."""
        if self._queued or self.state not in (State.RUNNING, State.HELD):
            return []
        if self.state is State.HELD:
            return [] if self._hold_told else self._between_steps()
        between = self._between_steps()
        if between:
            return between
        found: list[str] = []
        for stage in self.share.stages:
            found.extend(self._turns.describe(wait, self.step) for wait in self._missing(stage))
        if not found:
            found.extend(self._missing_at_end())
        return list(dict.fromkeys(found))

    # ---------------------------------------------------------------------------------------- starting and ending

    def _start(self, event: Started, now: float, out: list[Command]) -> None:
        if not self.share.loss_pnode:
            text = "this network has no loss, so it can't be trained"
            self._fail(out, Cause.INPUT, text, "give it a cross_entropy or mse node")
            return
        self.until = min(event.until, self.share.steps)
        if self.state is State.RUNNING:
            return
        self._hold_told = False
        self._hold_asked = self._save_asked = False
        self._updated_at = now
        if self.step < self.until:
            self._go(State.RUNNING)
        elif self.state is State.PREPARED:
            self._go(State.HELD)

    def _hold(self, event: HoldAsked, out: list[Command]) -> None:
        if self.share.pnode != self.share.loss_pnode:
            self._refuse(out, "not-loss", "hold asked, but the PNode of the loss decides")
            return
        if self.state is State.RUNNING:
            self._hold_asked = True
            self._save_asked = self._save_asked or event.save
        else:
            self._hold_told = False

    def _lost(self, event: PeerLost, out: list[Command]) -> None:
        if event.pnode not in self.share.members or event.pnode == self.share.pnode:
            return
        text = f"PNode {event.pnode} is lost: {event.reason}"
        hint = "its VNodes are placed anew when the orchestrator has seen it too"
        self._fail(out, Cause.PEER, text, hint, peer=event.pnode, told=self.state is not State.HELD)

    def _fail(
        self, out: list[Command], cause: Cause, text: str, hint: str, *, vnode: str = "", peer: str = "",
        told: bool = True,
    ) -> None:  # fmt: skip
        self._go(State.FAILED)
        out.append(Fail(self.applied, vnode, text, hint, cause, peer, told))
        self._inbox.clear()

    @property
    def holds(self) -> bool:
        """Whether the orchestrator was told that this share holds."""
        return self.state is State.HELD and self._hold_told

    def _tell_held(self, out: list[Command]) -> None:
        quiet = not self._queued and not self._cut_due and not self._versions_due
        if self.state is State.HELD and not self._hold_told and quiet:
            self._hold_told = True
            out.append(TellHeld(self.applied))

    # ---------------------------------------------------------------------------------------- messages

    def _kept(self, refusal: Refusal | None, out: list[Command]) -> None:
        if refusal is not None:
            self._refuse(out, *refusal)

    def _report(self, event: ReportArrived, out: list[Command]) -> None:
        mine = self._reports.get(event.step, {})
        bad = self.share.pnode != self.share.loss_pnode or event.sender not in self.share.members
        if bad or event.step != self.step or event.sender in mine or self._decided():
            return self._refuse(out, "stray-report", f"{event.sender}'s report of step {event.step} is not awaited")
        self._reports.setdefault(event.step, {})[event.sender] = event
        return None

    def _verdict(self, event: VerdictArrived, out: list[Command]) -> None:
        step = event.decision.step
        if event.sender != self.share.loss_pnode or step != self.step or step in self._verdicts:
            return self._refuse(out, "stray-verdict", f"{event.sender}'s verdict on step {step} is not awaited")
        self._verdicts[step] = event.decision
        return None

    # ---------------------------------------------------------------------------------------- results

    def _job_done(self, event: JobDone, now: float, out: list[Command]) -> None:
        job, done = event.job, event.done
        if not self._queued or self._queued[0] != job:
            expected = self._queued[0] if self._queued else "nothing"
            raise CoreError(f"the compute thread finished {job}, but {expected} was due\n{self.tell_story()}")
        self._queued.popleft()
        match job.kind:
            case JobKind.FORWARD:
                self._send_forward(job, done.sends, done.count, out)
            case JobKind.BACKWARD:
                for channel in self._turns.ins[job.stage]:
                    if channel.index in self.share.flow.channels:
                        self._answer(channel, job, done.sends.get(channel.index), done.count, out)
            case JobKind.TIES:
                for user, payload in done.shared.items():
                    out.append(SendTieGradient(self._home(user), job.step, user, payload))
            case JobKind.REPORT:
                report = ReportArrived(self.share.pnode, job.step, done.norms, done.finite, done.culprit)
                if self.share.pnode == self.share.loss_pnode:
                    self._losses[job.step] = (done.loss, done.count, done.note)
                    self._reports.setdefault(job.step, {})[self.share.pnode] = report
                else:
                    out.append(SendReport(self.share.loss_pnode, job.step, done.norms, done.finite, done.culprit))
            case JobKind.UPDATE:
                self._updated(job, done, now, out)
            case JobKind.CUT:
                out.append(SaveCut(self.applied, done.cut))
            case JobKind.DISCARD | JobKind.VERSION:
                pass
            case _:
                assert_never(job.kind)

    def _home(self, user: str) -> str:
        return next(home for name, home in self.share.borrowed.items() if name == user)

    def _send_forward(self, job: Job, sends: Mapping[int, object], count: int, out: list[Command]) -> None:
        for channel in self._turns.outs[job.stage]:
            if not channel.local:
                to = self.share.plan.stages[channel.dst].pnode
                request_id = self._inbox.sent(channel.index, job.step, job.microbatch)
                payload = sends[channel.index]
                out.append(SendHop(to, job.step, job.microbatch, channel.index, False, request_id, count, payload))
        for channel in self._turns.ins[job.stage]:
            if channel.index not in self.share.flow.channels:
                self._answer(channel, job, None, count, out)

    def _answer(self, channel: Channel, job: Job, payload: object, count: int, out: list[Command]) -> None:
        if channel.local:
            return
        to, request_id = self._inbox.answer(channel.index, job.step, job.microbatch)
        out.append(SendHop(to, job.step, job.microbatch, channel.index, True, request_id, count, payload))

    def _updated(self, job: Job, done: Done, now: float, out: list[Command]) -> None:
        self.applied = job.step + 1
        for owner, users in self.share.lent.items():
            for to in dict.fromkeys(pnode for _, pnode in users):
                out.append(SendTieVersion(to, job.step, owner, done.shared[owner]))
        out.append(TellApplied(self.applied, done.trace))
        if job.step in self._progress_due:
            decision, loss, note = self._progress_due.pop(job.step)
            seconds, self._updated_at = now - self._updated_at, now
            out.append(TellProgress(self.applied, loss, decision.count, decision.gradient_norm, seconds, note))

    def _saved(self, event: Saved, out: list[Command]) -> None:
        if event.error:
            text = f"the checkpoint of step {event.applied} could not be stored: {event.error}"
            self._fail(out, event.cause, text, "check the store (dcnr doctor)")
        elif not self.uncommitted.stored(event.applied):
            raise CoreError(f"the cut of step {event.applied} was not being saved\n{self.tell_story()}")

    # ---------------------------------------------------------------------------------------- going on

    def _pump(self, out: list[Command]) -> None:
        """Queue every job whose turn it is and whose inputs are here, until there is none."""
        moved = True
        while moved and self.state in (State.RUNNING, State.HELD):
            moved = self._queue_versions(out) or self._queue_cut(out)
            if self.state is not State.RUNNING or self._between_steps():
                continue
            for stage in reversed(self.share.stages):
                if not self._missing(stage) and not self._turns.at_update(stage):
                    job, inputs = self._turns.take(stage, self.step)
                    self._queue(job, out, inputs)
                    moved = True
            if all(self._turns.at_update(stage) for stage in self.share.stages):
                moved = self._queue_end(out) or moved

    def _between_steps(self) -> list[str]:
        """What has to happen after U(step - 1) before anything of this step."""
        due = sorted(self._versions_due)
        found = [f"{self._inbox.lender(owner)}: '{owner}' after step {self.step}" for owner in due]
        if self._cut_due and (awaited := self.uncommitted.awaited()):
            found.append(awaited)
        return found

    def _missing(self, stage: int) -> list[Wait]:
        return self._turns.missing(stage, self.step)

    def _queue(self, job: Job, out: list[Command], inputs: Mapping[int | str, object] | None = None) -> None:
        self._queued.append(job)
        out.append(Compute(job, inputs or {}))

    def _queue_versions(self, out: list[Command]) -> bool:
        found = [owner for owner in sorted(self._versions_due) if self._inbox.has_tie_version(owner, self.step - 1)]
        for owner in found:
            payload = self._inbox.take_tie_version(owner, self.step - 1)
            self._versions_due.discard(owner)
            self._queue(Job(JobKind.VERSION, self.step - 1, vnode=owner), out, {owner: payload})
        return bool(found)

    def _queue_cut(self, out: list[Command]) -> bool:
        if not self._cut_due or not self.uncommitted.room():
            return False
        self._cut_due = False
        self.uncommitted.made(self.step)
        self._queue(Job(JobKind.CUT, self.step - 1), out)
        return True

    def _decided(self) -> bool:
        return self.step in self._verdicts

    def _missing_at_end(self) -> list[str]:
        """What U(step) waits for once every stage has come to it."""
        if not self._report_queued:
            due = self._inbox.missing_tie_gradients(self.step)
            return [f"{pnode}: gradient of '{user}' of step {self.step + 1}" for user, pnode in due]
        if self._decided():
            return []
        if self.share.pnode != self.share.loss_pnode:
            return [f"{self.share.loss_pnode}: verdict on step {self.step + 1}"]
        here = self._reports.get(self.step, {})
        return [f"{pnode}: report of step {self.step + 1}" for pnode in sorted(set(self.share.members) - here.keys())]

    def _queue_end(self, out: list[Command]) -> bool:
        """All stages stand at U: gather ties, report, decide, update. One thing per call; False if it has to wait."""
        if self.share.borrowed and not self._ties_queued:
            self._ties_queued = True
            self._queue(Job(JobKind.TIES, self.step), out)
            return True
        if any(self._missing(stage) for stage in self.share.stages):
            return False
        if not self._report_queued:
            if self._inbox.missing_tie_gradients(self.step):
                return False
            self._report_queued = True
            self._queue(Job(JobKind.REPORT, self.step), out, self._inbox.take_tie_gradients(self.step))
            return True
        if self.share.pnode == self.share.loss_pnode and not self._decided():
            return self._decide(out)
        if not self._decided():
            return False
        self._queue_update(out)
        return True

    def _decide(self, out: list[Command]) -> bool:
        reports = self._reports.get(self.step, {})
        if self.step not in self._losses or not set(self.share.members) <= reports.keys():
            return False
        loss, count, note = self._losses.pop(self.step)
        del self._reports[self.step]
        applied = self.step + 1
        every = self.share.checkpoint_every
        last = applied >= self.share.steps
        hold = self._hold_asked or applied >= self.until
        regular = last or (every > 0 and applied % every == 0)
        save = regular or self._save_asked or applied >= self.until
        decision = decide(self.step, reports, loss=loss, count=count, share=self.share, hold=hold, save=save)
        self._verdicts[self.step] = decision
        if decision.apply:
            self._progress_due[self.step] = (decision, loss / count if count else 0.0, note)
        others = tuple(member for member in self.share.members if member != self.share.pnode)
        if others:
            out.append(SendVerdict(others, decision))
        return True

    def _queue_update(self, out: list[Command]) -> None:
        decision = self._verdicts.pop(self.step)
        if not decision.apply:
            self._queue(Job(JobKind.DISCARD, self.step), out)
            self._fail(
                out, Cause.NUMBERS,
                f"step {self.step + 1} was not applied: a value in VNode '{decision.culprit}' is not finite",
                "lower the learning rate or clip gradients, then resume from the last checkpoint",
                vnode=decision.culprit, told=self.share.pnode == self.share.loss_pnode,
            )  # fmt: skip
            return
        self._queue(Job(JobKind.UPDATE, self.step, scale=decision.scale, count=decision.count), out)
        self.step += 1
        self._versions_due = set(self.share.owner_of.values())
        self._cut_due = decision.save
        self._ties_queued = self._report_queued = False
        self._turns.begin()
        self._inbox.begin(self.step)
        if decision.hold or self.step >= self.share.steps:
            self._go(State.HELD)
            self._hold_asked = self._save_asked = False
            self._hold_told = False

    # ---------------------------------------------------------------------------------------- story

    def _go(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise CoreError(f"{self.state.value} can't become {state.value}\n{self.tell_story()}")
        self.story.append(f"{self.state.value} -> {state.value}")
        self.state = state

    def _refuse(self, out: list[Command], code: str, text: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
        self.story.append(f"refused: {text}")
        out.append(Refuse(code, text))

    def _note(self, event: Event) -> None:
        match event:
            case JobDone():
                self.story.append(f"done: {event.job}")
            case HopArrived():
                way = "gradient" if event.backward else "hop"
                self.story.append(f"{way} {event.channel} from {event.sender}: step {event.step}, {event.microbatch}")
            case TieGradientArrived() | TieVersionArrived():
                self.story.append(f"{type(event).__name__} from {event.sender}, step {event.step}")
            case _:
                self.story.append(repr(event)[:200])

    def tell_story(self) -> str:
        """The last events of this session on this PNode, for an error message."""
        head = f"session {self.share.session} epoch {self.share.epoch} on {self.share.pnode}, {self.state.value},"
        lines = [f"{head} step {self.step}; its last {len(self.story)} events:"]
        return "\n".join([*lines, *(f"  {line}" for line in self.story)])
