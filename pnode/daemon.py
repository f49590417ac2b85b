"""The daemon: one member of a cluster, with any number of sessions that know nothing of each other.

It registers, reports every two seconds, hands each message to the session that it belongs to, and answers requests.
Heartbeats come from the event loop while all computing is in the compute threads; a thread that died or hangs shows in
the heartbeat, and its sessions fail with the cause. Messages of an old term or another epoch are refused and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import structlog
import torch

from pnode.compute_thread import ComputeStatus, ComputeThread
from pnode.core import State
from pnode.deploy import deploy, explain, in_compute
from pnode.hub import Bounds, Hub
from pnode.lag import LoopLag
from pnode.measure import environment, make_profile, measure_flops, tune_thread
from pnode.optimize import warm_up
from pnode.session import Session
from storage.open import open_store
from storage.store import Store
from wire.bus import Bus
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.ids import new_request_id
from wire.messages import (
    Committed,
    Deployment,
    Goodbye,
    GradientReport,
    Heartbeat,
    HeartbeatAck,
    HoldRun,
    Hop,
    InferEnd,
    InferFailed,
    InferHop,
    InferInput,
    InspectRun,
    Message,
    Ok,
    PeerRef,
    Prepare,
    Profile,
    Refused,
    Register,
    Registered,
    Release,
    ShutDown,
    StartRun,
    TieGradient,
    TieVersion,
    Verdict,
)
from wire.requests import RefusedError

REGISTER_S = 5.0
BACK_OFF_S, MAX_BACK_OFF_S = 0.25, 10.0
CHECK_S = 1.0
STOP_S = 5.0
SILENT_BEATS, SILENT_S = 5, 10.0
ORDER = {"dead": 3, "stalled": 2, "busy": 1, "idle": 0}


@dataclass(frozen=True, slots=True)
class Options:
    """What `dcnr-pnode` was told."""

    name: str
    orchestrator: str
    home: Path
    devices: tuple[str, ...] = ("cpu",)
    threads: int = 1
    store: str = ""
    version: str = ""
    bounds: Bounds = field(default_factory=Bounds)


class Daemon:
    """See the module. `run` ends after `stop` was called, in good order.

    `make_compute`: gives a compute thread, or what stands for one, by the device's name. With a `profile` nothing is
    measured and nothing warmed up.
    """

    def __init__(
        self, options: Options, bus: Bus, log: structlog.typing.FilteringBoundLogger, *,
        clock: Callable[[], float] = time.monotonic, open_store: Callable[[str], Store] = open_store,
        make_compute: Callable[[str], ComputeThread] | None = None, profile: Profile | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.bus = bus
        self.log = log
        self._clock = clock
        self._open_store = open_store
        self._make_compute = make_compute or self._compute_thread
        self._profile = profile
        self.sessions: dict[str, Session] = {}
        self.incarnation = 0
        self.term = 0
        self.report_every_s = 2.0
        self.lag = LoopLag(clock)
        self.registered = asyncio.Event()
        self._away = asyncio.Event()  # set: register (again)
        self._stopping = asyncio.Event()
        self._devices = [torch.device(name) for name in options.devices]
        self._computes: list[ComputeThread] = []
        self._epochs: dict[str, int] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._process = psutil.Process()
        self._group: asyncio.TaskGroup | None = None
        self._hub: Hub | None = None
        self._store_url = ""
        self._acked_at = 0.0
        self._spawned: set[asyncio.Task[Any]] = set()

    @property
    def hub(self) -> Hub:
        """What the sessions share."""
        assert self._hub is not None
        return self._hub

    def stop(self) -> None:
        """End in good order."""
        self._stopping.set()

    # ------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        """Live until `stop`. Raises `RefusedError` if the orchestrator won't have this PNode."""
        self._hub = Hub(
            self.options.name, self.bus, PeerRef("", 0, [self.options.orchestrator]), self.options.home,
            self.options.bounds, self._spawn, self.log, clock=self._clock,
        )  # fmt: skip
        self.bus.on_message(self._on_message)
        self.bus.on_loss(self._on_loss)
        await self.bus.start()
        try:
            profile = await self._start_computing()
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._away.set()
                parts = [self._membership(profile), self._beats(), self._checks()]
                if self._profile is None:
                    parts.append(self.lag.run())
                tasks = [group.create_task(part) for part in parts]
                await self._stopping.wait()
                self._say_goodbye()
                for task in [*tasks, *self._preparing.values()]:
                    task.cancel()
                for session in list(self.sessions.values()):
                    session.release()
                group.create_task(self._give_up_rest())
        except* RefusedError as refused:
            raise refused.exceptions[0] from None
        finally:
            self._group = None
            await self._end()

    async def _give_up_rest(self) -> None:
        """Work in the background (saving cuts) has a moment to end, then it is dropped."""
        await asyncio.sleep(0)
        mine = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task in self._spawned and task is not mine]
        if rest:
            await asyncio.wait(rest, timeout=STOP_S)
        for task in rest:
            task.cancel()

    async def _end(self) -> None:
        for compute in self._computes:
            if not await asyncio.to_thread(compute.stop, STOP_S):
                self.log.warning("compute thread did not end", device=compute.name)
        await self.bus.close()
        if self.hub.store is not None:
            await self.hub.store.close()

    def _say_goodbye(self) -> None:
        if self.incarnation:
            try:
                self.bus.send(self.hub.orchestrator, Goodbye(self.options.name, self.incarnation))
            except DCNRError as error:
                self.log.debug("no goodbye", error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._group is None:
            work.close()
            raise RemoteError("this PNode is ending")
        task = self._group.create_task(self._guard(work))
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """One session's background work must not end the daemon."""
        try:
            await work
        except Exception as error:
            self.log.exception("background work failed", error=str(error))

    def _compute_thread(self, device: str) -> ComputeThread:
        return ComputeThread(
            device, wake=asyncio.get_running_loop().call_soon_threadsafe, stalled_s=self.options.bounds.stalled_s,
            prepare=lambda: tune_thread(self.options.threads), clock=self._clock,
        )  # fmt: skip

    async def _start_computing(self) -> Profile:
        flops = 0.0
        for device in self._devices:
            compute = self._make_compute(str(device))
            compute.start()
            self._computes.append(compute)
            if self._profile is None:
                await in_compute(compute, "warm up", partial(warm_up, device))
                flops += await in_compute(compute, "measure", partial(measure_flops, device))
        self.hub.environment = environment(self._devices[0], self.options.threads)
        if self._profile is not None:
            return self._profile
        profile = make_profile(self._devices, self.options.threads, flops, self.options.version)
        self.log.info("measured", flops=round(flops), threads=self.options.threads, torch=profile.torch)
        return profile

    # ------------------------------------------------------------------------------------ membership

    async def _membership(self, profile: Profile) -> None:
        """Register whenever there is no orchestrator that knows us; ever more rarely while it does not answer."""
        back_off, told = BACK_OFF_S, False
        while True:
            await self._away.wait()
            request = Register(str(new_request_id()), self.options.name, self.bus.me, profile, self.incarnation)
            try:
                answer, _ = await self.bus.ask(self.hub.orchestrator, request, timeout_s=REGISTER_S)
            except UnreachableError as error:
                if not told:
                    self.log.warning("orchestrator not reachable, trying again", error=str(error))
                    told = True
                await asyncio.sleep(back_off)
                back_off = min(2 * back_off, MAX_BACK_OFF_S)
                continue
            if not isinstance(answer, Registered):
                raise RefusedError("odd-answer", f"the orchestrator answered {type(answer).__name__} to Register")
            await self._admitted(answer)
            self._away.clear()
            back_off, told = BACK_OFF_S, False

    async def _admitted(self, answer: Registered) -> None:
        self.incarnation, self.term = answer.incarnation, max(self.term, answer.term)
        self.report_every_s = answer.report_every_s
        url = self.options.store or answer.store
        if url and url != self._store_url:
            if self.hub.store is not None:
                await self.hub.store.close()
            self.hub.store, self._store_url = self._open_store(url), url
        self._acked_at = self.hub.clock()
        self.registered.set()
        self.log.info("registered", incarnation=self.incarnation, term=self.term, cluster=answer.cluster, store=url)

    async def _beats(self) -> None:
        while True:
            await self.registered.wait()
            if not self._away.is_set():
                try:
                    self.bus.send(self.hub.orchestrator, self._beat())
                except DCNRError as error:
                    self.log.debug("no heartbeat", error=str(error))
                silent = self.hub.clock() - self._acked_at
                if silent > max(SILENT_S, SILENT_BEATS * self.report_every_s):
                    self.log.warning("orchestrator is silent, registering again", seconds=round(silent, 1))
                    self._away.set()
            await asyncio.sleep(self.report_every_s)

    def compute_status(self) -> ComputeStatus:
        """The worst of all compute threads."""
        return max((compute.status() for compute in self._computes), key=lambda status: ORDER[status.state])

    def _beat(self) -> Heartbeat:
        now = self.hub.clock()
        status = self.compute_status()
        return Heartbeat(
            self.options.name, self.incarnation, self.term, [session.beat(now) for session in self.sessions.values()],
            self._process.memory_info().rss, self.lag.take(), status.state, status.seconds,
        )  # fmt: skip

    async def _checks(self) -> None:
        """Once a second: waits that are too long, compute threads that are dead or hang."""
        limit = self.options.bounds.compute_s
        told = False
        while True:
            await asyncio.sleep(CHECK_S)
            now = self.hub.clock()
            for session in list(self.sessions.values()):
                session.check(now)
                status = session.compute.status()
                if status.state == "dead":
                    session.compute_failed(f"the compute thread is dead: {status.doing}", "restart this PNode")
                elif status.seconds > limit:
                    session.compute_failed(
                        f"{status.doing} computes for {status.seconds:.0f} s",
                        f"the limit is dcnr-pnode's --compute-limit {limit:g}",
                    )
            if not told and self.compute_status().state == "dead":
                told = True
                self.log.error("compute thread is dead", doing=self.compute_status().doing)

    # ------------------------------------------------------------------------------------ messages

    def _on_loss(self, peer: PeerRef, reason: str) -> None:
        if set(peer.addresses) & set(self.hub.orchestrator.addresses) and not self._stopping.is_set():
            self.log.warning("orchestrator lost", reason=reason)
            self._away.set()
            return
        for session in list(self.sessions.values()):
            session.lost(peer, reason)

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        match message:
            case HeartbeatAck():
                self._acked_at = self.hub.clock()
                if not message.known and message.incarnation == self.incarnation:
                    self._away.set()
            case Prepare():
                self._prepare(sender, message, frames)
            case StartRun() | HoldRun() | Release() | InspectRun():
                self._control(sender, message)
            case Committed():
                session = self.sessions.get(message.session)
                if session is not None and session.share.epoch == message.epoch:
                    session.committed(message)
            case Hop() | TieGradient() | TieVersion() | GradientReport() | Verdict() | InferHop():
                self._data(sender, message, frames)
            case InferInput():
                session = self.sessions.get(message.session)
                if session is None:
                    self._no_session(message)
                else:
                    session.on(sender.id, message, frames)
            case InferEnd():
                session = self.sessions.get(message.session)
                if session is not None:
                    session.on(sender.id, message, frames)
            case ShutDown():
                self.bus.send(sender, Ok(message.request_id))
                self.stop()
            case _:
                self._count("unexpected", f"{type(message).__name__} from {sender.id}")
                request_id = getattr(message, "request_id", "")
                if isinstance(request_id, str) and request_id:
                    self._refuse(sender, request_id, "not-here", f"a PNode does not answer {type(message).__name__}")

    def _count(self, code: str, text: str) -> None:
        self.hub.counters[f"refused_{code}"] += 1
        self.log.debug("refused", code=code, text=text)

    def _no_session(self, message: InferInput) -> None:
        failed = InferFailed(
            message.request_id, message.sequence, self.options.name, "", "unknown-session",
            f"session {message.session} is not deployed on {self.options.name}",
            "dcnr ps lists sessions and where they are",
        )  # fmt: skip
        try:
            self.bus.send(message.reply_to, failed)
        except DCNRError as error:
            self.log.debug("unsent", error=str(error))

    def _data(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        name, epoch = message.session, message.epoch  # type: ignore[attr-defined]
        session = self.sessions.get(name)
        if session is None or session.share.epoch != epoch:
            known = f"epoch {session.share.epoch}" if session is not None else "no such session"
            self._count("epoch", f"{type(message).__name__} of {name} epoch {epoch} from {sender.id}; {known} here")
            return
        member = session.member(sender)
        if member is None or getattr(message, "replica", 0) != session.share.replica:
            self._count("sender", f"{type(message).__name__} of {name} from {sender.id} boot {sender.boot}")
            return
        session.on(member, message, frames)

    def _refuse(self, to: PeerRef, request_id: str, code: str, text: str, hint: str = "") -> None:
        self.bus.send(to, Refused(request_id, code, text, hint))

    def _fenced(self, sender: PeerRef, request_id: str, term: int) -> bool:
        """Whether an orchestrator that was replaced is speaking; then it is told so."""
        if term < self.term:
            self._count("term", f"term {term} from {sender.id}, known is {self.term}")
            self._refuse(sender, request_id, "stale-term", f"term {term} is over, term {self.term} is known here")
            return True
        self.term = term
        return False

    def _control(self, sender: PeerRef, message: StartRun | HoldRun | Release | InspectRun) -> None:
        if not isinstance(message, InspectRun) and self._fenced(sender, message.request_id, message.term):
            return
        session = self.sessions.get(message.session)
        if isinstance(message, Release):
            task = self._preparing.get(message.session)
            if task is not None and self._epochs.get(message.session, 0) <= message.epoch:
                task.cancel()
            if session is not None and session.share.epoch <= message.epoch:
                session.release()
                del self.sessions[message.session]
            self.bus.send(sender, Ok(message.request_id))
            return
        if session is None or session.share.epoch != message.epoch:
            here = f"epoch {session.share.epoch}" if session is not None else "nothing"
            text = f"session {message.session} epoch {message.epoch} is not deployed here ({here} is)"
            self._refuse(sender, message.request_id, "unknown-session", text, "dcnr ps")
            return
        if isinstance(message, InspectRun):
            self._spawn(self._inspect(sender, message, session))
            return
        if session.core.state is State.FAILED:
            self._refuse(sender, message.request_id, "failed", session.error, "resume deploys it anew")
            return
        if isinstance(message, StartRun):
            session.start(message.until)
        elif session.share.pnode != session.share.loss_pnode:
            text = f"{session.share.loss_pnode} decides about holds, not {self.options.name}"
            self._refuse(sender, message.request_id, "not-loss", text)
            return
        else:
            session.hold(message.save)
        self.bus.send(sender, Ok(message.request_id))

    async def _inspect(self, sender: PeerRef, message: InspectRun, session: Session) -> None:
        try:
            reports = await session.inspect()
        except Exception as error:
            self._refuse(sender, message.request_id, "inspect", f"{type(error).__name__}: {error}")
            return
        self.bus.send(sender, Ok(message.request_id), [msgspec.msgpack.encode(reports)])

    # ------------------------------------------------------------------------------------ deployment

    def _prepare(self, sender: PeerRef, message: Prepare, frames: Sequence[memoryview]) -> None:
        if self._fenced(sender, message.request_id, message.term):
            return
        session = self.sessions.get(message.session)
        newest = self._epochs.get(message.session, 0)
        if message.epoch < newest:
            text = f"epoch {message.epoch} of {message.session} is over, epoch {newest} is known here"
            self._refuse(sender, message.request_id, "stale-epoch", text)
            return
        if session is not None and session.share.epoch == message.epoch:
            self.bus.send(sender, Ok(message.request_id))
            return
        running = self._preparing.get(message.session)
        if running is not None:
            running.cancel()
        self._epochs[message.session] = message.epoch
        task = self._spawn(self._build(sender, message, frames))
        self._preparing[message.session] = task
        task.add_done_callback(lambda done: self._prepared(message.session, done))

    def _prepared(self, name: str, task: asyncio.Task[None]) -> None:
        if self._preparing.get(name) is task:
            del self._preparing[name]

    async def _build(self, sender: PeerRef, message: Prepare, frames: Sequence[memoryview]) -> None:
        old = self.sessions.pop(message.session, None)
        if old is not None:
            old.release()
        try:
            deployment = _read_deployment(message, frames)
            compute, device = self._least_used()
            session = await deploy(
                self.hub, deployment, epoch=message.epoch, replica=message.replica, compute=compute, device=device
            )
        except asyncio.CancelledError:
            self._refuse(sender, message.request_id, "superseded", f"another deployment of {message.session} came")
            raise
        except Exception as error:
            code, text, hint = explain(error)
            self.log.warning(
                "can't prepare", session=message.session, text=text, exc_info=not isinstance(error, DCNRError)
            )
            self._refuse(sender, message.request_id, code, text, hint)
            return
        self.sessions[message.session] = session
        self.log.info(
            "prepared", session=message.session, epoch=message.epoch, stages=session.share.stages,
            vnodes=len(session.share.nodes), step=deployment.start_step, device=str(device),
        )  # fmt: skip
        self.bus.send(sender, Ok(message.request_id))

    def _least_used(self) -> tuple[ComputeThread, torch.device]:
        """The device with the fewest sessions."""
        used = [sum(s.compute is compute for s in self.sessions.values()) for compute in self._computes]
        place = used.index(min(used))
        return self._computes[place], self._devices[place]


def _read_deployment(message: Prepare, frames: Sequence[memoryview]) -> Deployment:
    if len(frames) != 1:
        raise RemoteError(f"Prepare has one frame, got {len(frames)}")
    try:
        deployment = msgspec.msgpack.decode(frames[0], type=Deployment)
    except msgspec.MsgspecError as error:
        raise RemoteError(f"the deployment can't be read: {error}") from error
    if deployment.session != message.session:
        raise RemoteError(f"Prepare names {message.session}, its deployment {deployment.session}")
    return deployment
