"""The daemon: one member of a cluster, with any number of sessions that know nothing of each other.

It puts the parts together and hands each message to the part that it belongs to: `membership` registers and reports,
`deployments` has the sessions, `computing` the compute threads. Heartbeats come from the event loop while all computing
is in the compute threads; a thread that died or hangs shows in the heartbeat, and its sessions fail with the cause.
Messages of an old term or another epoch are refused and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch

from pnode.compute_thread import ComputeStatus, ComputeThread
from pnode.computing import Computing
from pnode.deployments import Deployments
from pnode.home import Home, HomeGoneError
from pnode.hub import Bounds, Hub
from pnode.lag import LoopLag
from pnode.measure import environment, make_profile, tune_thread
from pnode.membership import Membership
from pnode.relays import Relays
from pnode.session import Session
from storage.open import open_store
from storage.store import Store
from wire.admission import Admission
from wire.bus import Bus
from wire.codec import read_body
from wire.ending import CLOSING_S, END_S
from wire.errors import DCNRError, RemoteError
from wire.messages import (
    Admitted,
    Committed,
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
    Members,
    Message,
    Ok,
    PeerRef,
    Prepare,
    Profile,
    Refused,
    RelayOpen,
    RelayTicket,
    Release,
    ReportNow,
    ShutDown,
    StartRun,
    TieGradient,
    TieVersion,
    Verdict,
)

CHECK_S = 1.0
BACKGROUND_S = 2.0
"""Of the end, what background work gets to end by itself."""
MAX_HEARD = 500


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
    told: PeerRef | None = None  # the orchestrator with its key, where there are keys
    admission: Admission | None = None


class Daemon:
    """See the module. `run` ends after `stop` was called, in good order.

    `make_compute`: gives a compute thread, or what stands for one, by the device's name. With a `profile` nothing is
    measured and nothing warmed up.
    """

    def __init__(
        self, options: Options, bus: Bus, log: structlog.typing.FilteringBoundLogger, *,
        clock: Callable[[], float] = time.monotonic, open_store: Callable[[str], Store] = open_store,
        make_compute: Callable[[str], ComputeThread] | None = None, profile: Profile | None = None,
        relays: Relays | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.bus = bus
        self.log = log
        self.lag = LoopLag(clock)
        self._clock = clock
        self._profile = profile
        self._stopping = asyncio.Event()
        self._process = psutil.Process()
        self._group: asyncio.TaskGroup | None = None
        self._home: Home | None = None
        self._trouble: DCNRError | None = None
        self._spawned: set[asyncio.Task[Any]] = set()
        self._parts: list[asyncio.Task[None]] = []
        self._end_at: float | None = None
        self.hub = Hub(
            options.name, bus, options.told or PeerRef("", 0, [options.orchestrator]), options.home, options.bounds,
            self._spawn, log, admission=options.admission, relays=relays, clock=clock,
        )  # fmt: skip
        self.computing = Computing(
            [torch.device(name) for name in options.devices], make_compute or self._compute_thread, clock, log,
            options.bounds.compute_s,
        )  # fmt: skip
        self.deployments = Deployments(self.hub, self.computing)
        self.membership = Membership(self.hub, self, options.store, open_store, log)

    @property
    def sessions(self) -> dict[str, Session]:
        """The sessions here, by name."""
        return self.deployments.sessions

    @property
    def registered(self) -> asyncio.Event:
        """Set once an orchestrator has taken this PNode."""
        return self.membership.registered

    def stop(self) -> None:
        """End in good order."""
        self._stopping.set()

    # ------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        """Live until `stop`.

        Raises `RefusedError` if the orchestrator won't have this PNode, `HomeGoneError` if its home folder was deleted.
        """
        self.bus.on_message(self._on_message)
        self.bus.on_loss(self._on_loss)
        await self.bus.start()
        try:
            self._home = Home(self.options.home)
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._parts.append(group.create_task(self._begin(group)))
                await self._stopping.wait()
                self._end_at = asyncio.get_running_loop().time() + END_S
                self.membership.say_goodbye()
                for task in self._parts:
                    task.cancel()
                self.deployments.release_all()
                group.create_task(self._give_up_rest())
            if self._trouble is not None:
                raise self._trouble
        except* DCNRError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None
            await self._end()

    async def _begin(self, group: asyncio.TaskGroup) -> None:
        """Have what computes, then everything that goes on until `stop`, which may come before."""
        profile = await self._start_computing()
        parts = [self.membership.register(profile), self.membership.report(), self._checks()]
        if self._profile is None:
            parts.append(self.lag.run())
        self._parts += [group.create_task(part) for part in parts]

    async def _give_up_rest(self) -> None:
        """Work in the background has a moment to end, then it is dropped."""
        await asyncio.sleep(0)
        mine = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task in self._spawned and task is not mine]
        if rest:
            await asyncio.wait(rest, timeout=BACKGROUND_S)
        for task in rest:
            task.cancel()

    async def _end(self) -> None:
        """Close everything, by `END_S` after `stop`: a running action gets what closing does not need."""
        now = asyncio.get_running_loop().time()
        end_at = self._end_at if self._end_at is not None else now + END_S
        left_s = max(0.0, end_at - CLOSING_S - now)
        stops = [asyncio.to_thread(compute.stop, left_s) for compute in self.computing.threads]
        for compute, ended in zip(self.computing.threads, await asyncio.gather(*stops), strict=True):
            if not ended:
                self.log.warning("compute thread did not end", device=compute.name)
        if self.hub.relays is not None:
            await self.hub.relays.close()
        await self.bus.close()
        if self.hub.store is not None:
            await self.hub.store.close()
        if self._home is not None:
            self._home.close()

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
        devices, threads = self.computing.devices, self.options.threads
        flops = await self.computing.start(measure=self._profile is None)
        self.hub.environment = environment(devices[0], threads)
        if self._profile is not None:
            return self._profile
        profile = make_profile(devices, threads, flops, self.options.version)
        self.log.info("measured", flops=round(flops), threads=threads, torch=profile.torch)
        return profile

    # ------------------------------------------------------------------------------------ membership

    def compute_status(self) -> ComputeStatus:
        """The worst of all compute threads."""
        return self.computing.status()

    def beat(self, incarnation: int, term: int) -> Heartbeat:
        """The report of now."""
        status = self.compute_status()
        heard = [PeerRef(peer.id, peer.boot) for peer in self.bus.heard()[:MAX_HEARD]]
        return Heartbeat(
            self.options.name, incarnation, term, self.deployments.beats(self._clock()),
            self._process.memory_info().rss, self.lag.take(), status.state, status.seconds, heard,
        )  # fmt: skip

    def admitted(self, *, moved: bool) -> None:
        """Registered (again): what an orchestrator can't know it is told now."""
        if moved:
            self.log.warning("this is another cluster than before: all sessions are given up")
            self.deployments.release_all(forget=True)
        for session in self.sessions.values():
            session.announce()

    async def _checks(self) -> None:
        """Once a second: waits that are too long, compute threads that are dead or hang, the home folder."""
        limit = self.options.bounds.compute_s
        while True:
            await asyncio.sleep(CHECK_S)
            now = self._clock()
            for session in self.sessions.values():
                session.check(now)
                status = session.compute.status()
                if status.state == "dead":
                    session.compute_failed(f"the compute thread is dead: {status.doing}", "see this PNode's log")
                elif status.seconds > limit:
                    session.compute_failed(
                        f"{status.doing} computes for {status.seconds:.0f} s, above --compute-limit {limit:g}",
                        "an option of dcnr-pnode; what takes so long by itself needs a higher one",
                    )
            self.computing.check()
            self._check_home()

    def _check_home(self) -> None:
        """Without its home folder a PNode can't go on: it ends, and says goodbye, so that others take its place."""
        try:
            if self._home is not None:
                self._home.check()
        except HomeGoneError as error:
            self.log.error("home is gone, ending", error=str(error))
            self._trouble = error
            self.stop()

    # ------------------------------------------------------------------------------------ messages

    def _on_loss(self, peer: PeerRef, reason: str) -> None:
        if self._stopping.is_set() or self.membership.lost(peer, reason):
            return
        for session in self.sessions.values():
            session.lost(peer, reason)

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        match message:
            case HeartbeatAck():
                self.membership.acknowledged(sender, message)
            case ReportNow():
                if not self.membership.outdated(sender):
                    self.membership.report_now()
            case Prepare() | StartRun() | HoldRun() | Release():
                if not self.membership.fenced(sender, message.request_id, message.term):
                    self._command(sender, message, frames)
            case RelayOpen() | RelayTicket() if self.hub.relays is not None:
                self.hub.relays.on(sender, message, self.hub.spawn)
            case Members():
                self._members(message, frames)
            case InspectRun():
                self.deployments.control(sender, message)
            case Committed():
                session = self.deployments.find(message.session)
                ours = session is not None and session.share.epoch == message.epoch
                if session is not None and ours and not self.membership.outdated(sender):
                    session.committed(message)
            case Hop() | TieGradient() | TieVersion() | GradientReport() | Verdict() | InferHop():
                self._data(sender, message, frames)
            case InferInput():
                session = self.deployments.find(message.session)
                if session is None:
                    self._no_session(message)
                else:
                    session.on(sender.id, message, frames)
            case InferEnd():
                session = self.deployments.find(message.session)
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

    def _members(self, message: Members, frames: Sequence[memoryview]) -> None:
        """The orchestrator sends the allow-list."""
        if self.options.admission is None or not frames:
            return
        try:
            entries: list[Admitted] = read_body(frames[0], list[Admitted])
            if self.options.admission.replace(message.version, entries):
                self.log.info("allow-list", version=message.version, entries=len(entries))
        except DCNRError as error:
            self.log.warning("allow-list not taken", version=message.version, error=str(error))

    def _command(
        self, sender: PeerRef, message: Prepare | StartRun | HoldRun | Release, frames: Sequence[memoryview]
    ) -> None:
        match message:
            case Prepare():
                self.deployments.prepare(sender, message, frames)
            case Release():
                self.deployments.release(sender, message)
            case _:
                self.deployments.control(sender, message)

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
        session = self.deployments.find(name)
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
