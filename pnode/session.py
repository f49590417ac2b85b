"""The driver of one session: carries messages to its core and the core's commands to the wire, compute and store.

It decides nothing about training. It checks what a message claims before the core sees it: epoch, sender, and each
tensor's type and shape against the graph. All methods run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from networks.recipe import lr_at
from pnode.compute_thread import ComputeThread
from pnode.core import Core, CoreError, State
from pnode.cuts import CutSaver
from pnode.events import (
    Broke,
    Command,
    Compute,
    Decision,
    Done,
    Event,
    Fail,
    HoldAsked,
    HopArrived,
    Job,
    JobDone,
    JobFailed,
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
from pnode.flow import GradientFlow
from pnode.hub import Hub
from pnode.inference import Inference
from pnode.kvcache import KVCaches
from pnode.norms import pack_norms, read_norms
from pnode.share import Share, hop_problem, microbatch_rows
from pnode.tensors import Packed, Received
from wire.errors import DCNRError
from wire.messages import (
    DIRECTION_BACKWARD,
    DIRECTION_FORWARD,
    Committed,
    Deployment,
    GradientReport,
    Hop,
    InferEnd,
    InferHop,
    InferInput,
    Message,
    PeerRef,
    Progress,
    RunFailed,
    RunHeld,
    SessionBeat,
    StepReport,
    TieGradient,
    TieVersion,
    Verdict,
    VNodeReport,
)

if TYPE_CHECKING:
    from networks.network import Network
    from pnode.work import Work

PROGRESS_S = 0.2
EMPTY = Packed((), ())
BF16_FLOATS = frozenset({"float32", "bfloat16"})
FLOAT32_ONLY = frozenset({"float32"})


class Session:
    """See the module."""

    def __init__(
        self, hub: Hub, deployment: Deployment, share: Share, network: Network, work: Work, compute: ComputeThread
    ) -> None:
        self.hub = hub
        self.deployment = deployment
        self.share = share
        self.network = network
        self.core = Core(share)
        self.id = share.session
        self.lane = f"{share.session}@{share.epoch}"
        self.bytes_out: Counter[str] = Counter()
        self.error = ""
        self._work: Work | None = work
        self.compute = compute
        self._loop = asyncio.get_running_loop()
        self._rows = microbatch_rows(network.recipe.batch, network.recipe.microbatches)
        self.floats = BF16_FLOATS if network.recipe.precision == "bf16" else FLOAT32_ONLY
        self.channels = {channel.index: channel for channel in share.plan.channels}
        self._reports: list[StepReport] = []
        self._reported_at = 0.0
        self._report_timer: asyncio.TimerHandle | None = None
        self._traces: set[asyncio.Task[None]] = set()
        self._cuts = CutSaver(hub, deployment, share)
        self.inference = Inference(hub, self, self.lane + "/infer")
        work.caches = KVCaches(hub.bounds.cache_bytes, hub.bounds.cache_s)
        work.trace_gate = threading.BoundedSemaphore(hub.bounds.trace_writes)

    @property
    def flow(self) -> GradientFlow:
        """Which channels bring gradients back."""
        return self.share.flow

    # ------------------------------------------------------------------------------------ control

    def start(self, until: int) -> None:
        """Run until `until` steps are applied."""
        self.post(Started(until))

    def hold(self, save: bool) -> None:
        """Stop after the step that is being made."""
        self.post(HoldAsked(save))

    def release(self) -> None:
        """Forget everything; the VNodes' memory is freed by the compute thread."""
        self.post(Released())
        self.compute.drop(self.lane)
        self.compute.drop(self.inference.lane)
        self._cuts.close()
        if self._report_timer is not None:
            self._report_timer.cancel()
        self._work = None
        self.compute.submit(self.lane, "release", _nothing, self._forget_lanes)

    def _forget_lanes(self, _value: object, _error: BaseException | None) -> None:
        for lane in (self.lane, self.inference.lane, self.lane + "/inspect"):
            self.compute.drop(lane)

    def committed(self, message: Committed) -> None:
        """A cut is durable: older ones need not be kept."""
        self._cuts.committed(message.step)

    def member(self, sender: PeerRef) -> str | None:
        """The PNode that this process is in this placement; None for a stranger or another boot of a member."""
        ref = self.deployment.peers.get(sender.id)
        if ref is None or (ref.boot and sender.boot and ref.boot != sender.boot):
            return None
        return sender.id

    def lost(self, peer: PeerRef, reason: str) -> None:
        """A peer's process is gone."""
        for pnode, ref in self.deployment.peers.items():
            if ref.id == peer.id and (not ref.boot or not peer.boot or ref.boot == peer.boot):
                self.post(PeerLost(pnode, reason))

    def compute_failed(self, text: str, hint: str) -> None:
        """The compute thread is dead or hangs."""
        self.post(Broke("", text, hint))

    def beat(self, now: float) -> SessionBeat:
        """What the heartbeat says about this session."""
        waiting = self.core.waiting()
        since = now - self.core.moved_at if waiting else 0.0
        text = "; ".join(waiting[:3]) + (f"; and {len(waiting) - 3} more" if len(waiting) > 3 else "")
        state = self.core.state.value
        return SessionBeat(self.id, self.share.epoch, self.core.applied, state, text, max(0.0, since))

    def check(self, now: float) -> None:
        """Enforce the limit on waiting, and drop forward requests that got no further."""
        limit = self.hub.bounds.wait_s
        if self.core.state is State.RUNNING and self.core.waiting() and now - self.core.moved_at > limit:
            self.post(WaitedTooLong(limit))
        self.inference.sweep(now)

    # ------------------------------------------------------------------------------------ messages

    def on(self, sender: str, message: Message, frames: Sequence[memoryview]) -> None:
        """One message of this session and epoch from a member."""
        match message:
            case Hop():
                self._on_hop(sender, message, frames)
            case TieGradient():
                payload = Received(message.tensors, frames)
                self.post(TieGradientArrived(sender, message.step, message.user, payload))
            case TieVersion():
                payload = Received(message.tensors, frames)
                self.post(TieVersionArrived(sender, message.step, message.owner, payload))
            case GradientReport():
                norms = read_norms(frames)
                if norms is None:
                    self.refuse("bad-report", f"{sender}'s report of step {message.step + 1} has no readable norms")
                    return
                self.post(ReportArrived(sender, message.step, norms, message.finite, message.culprit))
            case Verdict():
                decision = Decision(
                    message.step, message.apply, message.scale, message.count, message.gradient_norm, message.hold,
                    message.save, message.culprit,
                )  # fmt: skip
                self.post(VerdictArrived(sender, decision))
            case InferInput() | InferHop() | InferEnd():
                self.inference.on(message, frames)
            case _:
                self.refuse("unexpected", f"{type(message).__name__} from {sender} does not belong to a session")

    def _on_hop(self, sender: str, hop: Hop, frames: Sequence[memoryview]) -> None:
        channel = self.channels.get(hop.channel)
        if channel is None or not 0 <= hop.microbatch < len(self._rows):
            self.refuse("bad-hop", f"{sender} sent channel {hop.channel}, microbatch {hop.microbatch}")
            return
        backward = hop.direction == DIRECTION_BACKWARD
        expected = self.flow.tensors.get(hop.channel, 0) if backward else 1
        problem = hop_problem(
            self.network.graph, channel, backward=backward, expected=expected, rows=self._rows[hop.microbatch],
            metas=[(meta.dtype, meta.shape) for meta in hop.tensors], floats=self.floats,
        )  # fmt: skip
        if problem:
            way = "gradient" if backward else "activation"
            text = f"{sender}'s {way} of '{channel.port}', step {hop.step + 1}, microbatch {hop.microbatch}: {problem}"
            self.refuse("bad-tensors", text)
            self.post(Broke(str(channel.port.node), text, "do all PNodes run the same version?"))
            return
        self.post(
            HopArrived(
                sender, hop.step, hop.microbatch, hop.channel, backward, hop.request_id, hop.count,
                Received(hop.tensors, frames),
            )
        )  # fmt: skip

    # ------------------------------------------------------------------------------------ core

    def post(self, event: Event) -> None:
        """Let the core take in an event and carry out its commands."""
        try:
            commands = self.core.handle(event, self.hub.clock())
        except CoreError as error:
            self.hub.log.error("core", session=self.id, error=str(error))
            if not isinstance(event, Broke):
                self.post(Broke("", str(error), "this is a defect of DCNR: please report it"))
            return
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Compute(job, inputs):
                work = self._work
                if work is not None:
                    self.compute.submit(
                        self.lane, f"{self.id}: {job}", partial(work.run, job, inputs), partial(self._computed, job)
                    )
            case SendHop():
                self._send_hop(command)
            case SendTieGradient(to, step, user, payload):
                packed = payload if isinstance(payload, Packed) else EMPTY
                self._send(
                    to, TieGradient(self.id, self.share.epoch, self.share.replica, step, user, 0, list(packed.metas)),
                    packed, user,
                )  # fmt: skip
            case SendTieVersion(to, step, owner, payload):
                packed = payload if isinstance(payload, Packed) else EMPTY
                self._send(
                    to, TieVersion(self.id, self.share.epoch, self.share.replica, step, owner, list(packed.metas)),
                    packed, owner,
                )  # fmt: skip
            case SendReport(to, step, norms, finite, culprit):
                message = GradientReport(
                    self.id, self.share.epoch, self.share.replica, step, self.share.pnode, finite, culprit
                )
                self._send(to, message, Packed((), (pack_norms(norms),)))
            case SendVerdict(to, d):
                verdict = Verdict(
                    self.id, self.share.epoch, self.share.replica, d.step, d.apply, d.scale, d.count, d.gradient_norm,
                    d.hold, d.save, d.culprit,
                )  # fmt: skip
                for member in to:
                    self._send(member, verdict)
            case SaveCut(applied, cut):
                self.hub.spawn(self._save(applied, cut))
            case TellProgress():
                self._tell_progress(command)
            case TellApplied(applied, trace):
                if trace is not None:
                    self._write_trace(applied, trace)
            case TellHeld(applied):
                self.hub.spawn(self._tell_held(applied))
            case Fail():
                self._fail(command)
            case Refuse(code, text):
                self.refuse(code, text)

    def _computed(self, job: Job, result: Any, error: BaseException | None) -> None:
        if self.core.state is State.RELEASED:
            return
        if error is None:
            assert isinstance(result, Done)
            self.post(JobDone(job, result))
            return
        text = str(error) if isinstance(error, DCNRError) else f"{type(error).__name__}: {error}"
        self.hub.log.error("compute", session=self.id, job=str(job), error="".join(traceback.format_exception(error)))
        self.post(JobFailed(job, self.vnode_of(job, error), text, getattr(error, "hint", "")))

    def vnode_of(self, job: Job, error: BaseException) -> str:
        """The VNode that an error names, or the stage's only or first one."""
        named = getattr(error, "vnode", "") or job.vnode
        if named or job.stage < 0:
            return str(named)
        return str(self.share.plan.stages[job.stage].nodes[0])

    def refuse(self, code: str, text: str) -> None:
        """Count and log a message that is not taken."""
        self.hub.counters[f"refused_{code}"] += 1
        self.hub.log.warning("refused", session=self.id, code=code, text=text)

    # ------------------------------------------------------------------------------------ sending

    def _send(self, to: str, message: Message, packed: Packed = EMPTY, vnode: str = "") -> None:
        try:
            self.hub.bus.send(self.deployment.peers[to], message, packed.frames)
        except DCNRError as error:
            self.post(PeerLost(to, str(error)))
            return
        if vnode:
            self.bytes_out[vnode] += packed.size_bytes

    def _send_hop(self, command: SendHop) -> None:
        packed = command.payload if isinstance(command.payload, Packed) else EMPTY
        channel = self.channels[command.channel]
        hop = Hop(
            self.id, self.share.epoch, self.share.replica, command.step, command.microbatch, command.channel,
            DIRECTION_BACKWARD if command.backward else DIRECTION_FORWARD, command.request_id, self.share.pnode,
            command.count, list(packed.metas),
        )  # fmt: skip
        vnode = channel.edges[0].dst.node if command.backward else channel.port.node
        lane = None if not command.backward else TieGradient.lane
        try:
            self.hub.bus.send(self.deployment.peers[command.to], hop, packed.frames, lane=lane)
        except DCNRError as error:
            self.post(PeerLost(command.to, str(error)))
            return
        self.bytes_out[vnode] += packed.size_bytes

    def tell(self, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send to the orchestrator; if it is away, the next heartbeat finds out."""
        try:
            self.hub.bus.send(self.hub.orchestrator, message, frames)
        except DCNRError as error:
            self.hub.log.warning("untold", session=self.id, message=type(message).__name__, error=str(error))

    def _fail(self, command: Fail) -> None:
        self.error = command.text
        self.compute.drop(self.lane)
        self._flush_progress()
        self.hub.log.error("run failed", session=self.id, vnode=command.vnode, text=command.text, told=command.told)
        if command.told:
            self.tell(
                RunFailed(
                    self.id, self.share.epoch, self.share.replica, command.applied, self.share.pnode, command.vnode,
                    command.text[:4000], command.hint,
                )
            )  # fmt: skip

    def _tell_progress(self, command: TellProgress) -> None:
        recipe = self.network.recipe
        self._reports.append(
            StepReport(
                command.applied, command.loss, command.count, command.gradient_norm,
                lr_at(recipe, command.applied - 1), command.seconds, recipe.batch, command.note,
            )
        )  # fmt: skip
        self.hub.step_seconds(self.id, command.seconds)
        due = self._reported_at + PROGRESS_S - self.hub.clock()
        if due <= 0:
            self._flush_progress()
        elif self._report_timer is None:
            self._report_timer = self._loop.call_later(due, self._flush_progress)

    def _flush_progress(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        if self._reports:
            reports, self._reports = self._reports, []
            self._reported_at = self.hub.clock()
            self.tell(Progress(self.id, self.share.epoch, self.share.replica, self.share.pnode, reports))

    async def _tell_held(self, applied: int) -> None:
        if self._traces:
            await asyncio.wait(self._traces)
        self._flush_progress()
        self.tell(RunHeld(self.id, self.share.epoch, self.share.replica, applied, self.share.pnode))

    # ------------------------------------------------------------------------------------ saving

    async def _save(self, applied: int, cut: Any) -> None:
        error = await self._cuts.save(applied, cut)
        if self.core.state not in (State.RELEASED, State.FAILED):
            self.post(Saved(applied, error))

    def _write_trace(self, applied: int, trace: Any) -> None:
        work = self._work
        task = self.hub.spawn(self._cuts.write_trace(applied, trace, work.trace_gate if work is not None else None))
        self._traces.add(task)
        task.add_done_callback(self._traces.discard)

    # ------------------------------------------------------------------------------------ for people and inference

    def submit(self, lane: str, name: str, work: Callable[[Work], Any], then: Callable[[Any, Any], None]) -> None:
        """Let the compute thread do `work` with this session's VNodes."""
        here = self._work
        if here is not None:
            self.compute.submit(lane, f"{self.id}: {name}", lambda: work(here), then)

    async def inspect(self) -> list[VNodeReport]:
        """A report of each VNode here, made between two actions of the compute thread."""
        future: asyncio.Future[list[VNodeReport]] = self._loop.create_future()

        def then(value: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        bytes_out, applied = dict(self.bytes_out), self.core.applied
        self.submit(self.lane + "/inspect", "inspect", lambda work: work.inspect(applied, bytes_out), then)
        return await future

    def now(self) -> float:
        """The PNode's clock, seconds."""
        return self.hub.clock()


def _nothing() -> None:
    return None
