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

from pnode.causes import cause_of, said, thread_ended
from pnode.compute_thread import ComputeThread
from pnode.core import Core, CoreError, State
from pnode.cuts import CutSaver
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
from pnode.memory import CutMemory
from pnode.norms import pack_norms, read_norms
from pnode.reports import Reports
from pnode.share import Share, hop_problem, microbatch_rows
from pnode.tensors import Packed, Received
from wire.errors import DCNRError, RemoteError
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
    SessionBeat,
    TieGradient,
    TieVersion,
    Verdict,
    VNodeReport,
)

if TYPE_CHECKING:
    from networks.network import Network
    from pnode.work import Work

EMPTY = Packed((), ())
MIN_IN_MEMORY = 2
INSPECT_S = 60.0
WAITING_CHARS, BEAT_CUTS = 1000, 100
BF16_FLOATS = frozenset({"float32", "bfloat16"})
FLOAT32_ONLY = frozenset({"float32"})


class Session:
    """See the module."""

    def __init__(
        self, hub: Hub, deployment: Deployment, share: Share, network: Network, work: Work, compute: ComputeThread,
        memory: CutMemory | None = None,
    ) -> None:  # fmt: skip
        self.hub = hub
        self.deployment = deployment
        self.share = share
        self.network = network
        fit = hub.bounds.cut_bytes // max(1, work.state_bytes())
        cuts = max(MIN_IN_MEMORY, min(fit, deployment.max_uncommitted))
        memory = memory if memory is not None else CutMemory()
        memory.limit = cuts
        self.core = Core(share, max_uncommitted=deployment.max_uncommitted, max_in_memory=cuts)
        self.id = share.session
        self.lane = f"{share.session}@{share.epoch}"
        self.bytes_out: Counter[str] = Counter()
        self.moved = 0
        """Bytes that were fetched to prepare it."""
        self._work: Work | None = work
        self.compute = compute
        self._loop = asyncio.get_running_loop()
        self._rows = microbatch_rows(network.recipe.batch, network.recipe.microbatches)
        self.floats = BF16_FLOATS if network.recipe.precision == "bf16" else FLOAT32_ONLY
        self.channels = {channel.index: channel for channel in share.plan.channels}
        self.reports = Reports(hub, share, network.recipe)
        self._traces: set[asyncio.Task[None]] = set()
        self._saves: set[asyncio.Task[None]] = set()
        self._inspections: set[asyncio.Future[list[VNodeReport]]] = set()
        self._cuts = CutSaver(hub, deployment, share, memory)
        self.inference = Inference(hub, self, self.lane + "/infer")
        work.caches = KVCaches(hub.bounds.cache_bytes, hub.bounds.cache_s)
        work.trace_gate = threading.BoundedSemaphore(hub.bounds.trace_writes)

    @property
    def error(self) -> str:
        """Why the run can't go on here; "" while it can."""
        return self.reports.error

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

    def release(self, *, finish: bool = False) -> None:
        """End: nothing of this epoch is computed, applied or sent any more. Its kept cuts stay in their memory.

        With `finish`, cuts on their way to the store still get there if it takes them at once: the last good cut of a
        run that failed is among them. Otherwise nothing more is saved. The VNodes are freed as soon as the compute
        thread lets go of them.
        """
        self.post(Released())
        for lane in (self.lane, self.inference.lane, self.lane + "/inspect"):
            self.compute.drop(lane)
        self.inference.close("moved", f"session {self.id} has ended here, or was placed anew")
        self.reports.close()
        self._cuts.last_try = True
        if not finish:
            for task in self._saves:
                task.cancel()
        for future in self._inspections:
            future.cancel()
        self._work = None

    def committed(self, message: Committed) -> None:
        """A cut is durable: older ones need not be kept, and what waits for it can go on."""
        self._cuts.committed(message.step)
        self.reports.committed(message.step)
        self.post(CutCommitted(message.step))

    def announce(self) -> None:
        """Tell an orchestrator, which may be a new one, all that it can't know."""
        self._cuts.announce()
        self.reports.announce(self.core.applied if self.core.holds else None)

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
        self.post(Broke("", text, hint, Cause.COMPUTE))

    def beat(self, now: float) -> SessionBeat:
        """What the heartbeat says about this session."""
        waiting = self.core.waiting()
        since = max(0.0, now - self.core.moved_at) if waiting else 0.0
        trouble, trouble_since = self._cuts.trouble
        if trouble:
            saving = self.core.uncommitted.saving
            told = f"store: cut of step {saving[0]}" if saving else "store"
            waiting = [f"{told}: {said(trouble, self.share.pnode)}", *(text for text in waiting if text != told)]
            since = max(since, now - trouble_since)
        text = "; ".join(waiting[:3]) + (f"; and {len(waiting) - 3} more" if len(waiting) > 3 else "")
        return SessionBeat(
            self.id, self.share.epoch, self.core.applied, self.core.state.value, text[:WAITING_CHARS], since,
            self.moved + self.core.moves, self.core.uncommitted.saved[:BEAT_CUTS], self._limit()[0],
        )  # fmt: skip

    def _limit(self) -> tuple[float, str]:
        """How long it waits at most, and the option that says so.

        While cuts are not durable, store or orchestrator may be what everybody waits for in the end, here or behind
        another PNode: then the longer limit counts.
        """
        bounds = self.hub.bounds
        behind = len(self.core.uncommitted) > 0
        return (bounds.away_s, "--away-limit") if behind else (bounds.wait_s, "--wait-limit")

    def check(self, now: float) -> None:
        """Enforce the limits on waiting, and drop forward requests that got no further."""
        core = self.core
        if waiting := core.waiting():
            limit, option = self._limit()
            if now - core.moved_at > limit:
                cause = Cause.STORE if waiting[0].startswith("store: ") else Cause.WAIT
                self.post(WaitedTooLong(limit, cause, option))
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
            metas=[(meta.dtype, meta.shape, meta.codec) for meta in hop.tensors], floats=self.floats,
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
                self._keep(self._saves, self.hub.spawn(self._save(applied, cut)))
            case TellProgress():
                self.reports.step(command)
            case TellApplied(applied, trace):
                if trace is not None:
                    self._write_trace(applied, trace)
            case TellHeld(applied):
                self.hub.spawn(self._tell_held(applied))
            case Fail():
                self.compute.drop(self.lane)
                self.reports.failed(command)
                if command.cause in (Cause.PEER, Cause.COMPUTE):
                    self.inference.close("moved", command.text)
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
        if not isinstance(error, Exception):
            text = self.thread_ended("this", error)  # the core names the job
        self.hub.log.error("compute", session=self.id, job=str(job), error="".join(traceback.format_exception(error)))
        self.post(JobFailed(job, self.vnode_of(job, error), text, getattr(error, "hint", ""), cause_of(error)))

    def thread_ended(self, action: str, error: BaseException) -> str:
        """What is told of an action that ended the compute thread."""
        return thread_ended(self.share.pnode, self.compute.name, action, error)

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

    async def _tell_held(self, applied: int) -> None:
        if self._traces:
            await asyncio.wait(self._traces)
        if self.core.holds:
            self.reports.held(applied)

    # ------------------------------------------------------------------------------------ saving

    @staticmethod
    def _keep(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _save(self, applied: int, cut: Any) -> None:
        error, cause = await self._cuts.save(applied, cut)
        if self.core.state is not State.RELEASED:
            self.post(Saved(applied, error, cause))

    def _write_trace(self, applied: int, trace: Any) -> None:
        work = self._work
        gate = work.trace_gate if work is not None else None
        self._keep(self._traces, self.hub.spawn(self._cuts.write_trace(applied, trace, gate)))

    # ------------------------------------------------------------------------------------ for people and inference

    def submit(self, lane: str, name: str, work: Callable[[Work], Any], then: Callable[[Any, Any], None]) -> None:
        """Let the compute thread do `work` with this session's VNodes."""
        here = self._work
        if here is not None:
            self.compute.submit(lane, f"{self.id}: {name}", lambda: work(here), then)

    async def inspect(self) -> list[VNodeReport]:
        """A report of each VNode here, made between two actions of the compute thread.

        Raises RemoteError if the session ends meanwhile.
        """
        if self._work is None:
            raise RemoteError(f"session {self.id} has ended here")
        future: asyncio.Future[list[VNodeReport]] = self._loop.create_future()
        self._inspections.add(future)

        def then(value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None and not isinstance(error, Exception):  # it would end the event loop as well
                future.set_exception(RemoteError(self.thread_ended("inspect", error), hint="see this PNode's log"))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        bytes_out, applied = dict(self.bytes_out), self.core.applied
        self.submit(self.lane + "/inspect", "inspect", lambda work: work.inspect(applied, bytes_out), then)
        try:
            async with asyncio.timeout(INSPECT_S):
                await asyncio.wait([future])
        finally:
            self._inspections.discard(future)
        if future.cancelled():
            raise RemoteError(f"session {self.id} has ended here, or was placed anew")
        return future.result()

    def now(self) -> float:
        """The PNode's clock, seconds."""
        return self.hub.clock()
