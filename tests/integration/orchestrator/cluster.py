"""A real orchestrator service on a real bus, a stand-in for PNodes that computes nothing, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from orchestrator.service import Service
from storage.blobs import Blobs
from storage.checkpoints import read_head, read_manifest, save_part_bytes
from storage.keys import session_prefix
from storage.local import LocalStore
from wire import messages
from wire.errors import DCNRError
from wire.ids import Boot, new_request_id
from wire.messages import Message, PeerRef, Profile, Registered
from wire.requests import RefusedError
from wire.zmq_bus import ZmqBus

T = TypeVar("T")

ENVIRONMENT = ["torch 2", "device cpu", "cpu x", "threads 1"]

NETWORK = """
version: 1
name: {name}
inputs:
  x: {{dtype: float32, shape: [batch, 8]}}
  labels: {{dtype: int64, shape: [batch]}}
nodes:
  - {{id: fc1, type: linear, in: 8, out: {width}}}
  - {{id: act, type: relu}}
  - {{id: fc2, type: linear, in: {width}, out: 4}}
  - {{id: loss, type: cross_entropy}}
edges:
  - x -> fc1 -> act -> fc2 -> loss.logits
  - labels -> loss.targets
outputs: {{logits: fc2, loss: loss}}
train:
  batch: 8
  microbatches: 4
  steps: 40
  optimizer: {{type: sgd, lr: 0.1}}
"""


def network_bytes(folder: Path, name: str = "toy", width: int = 16) -> bytes:
    """Canonical bytes of a small network."""
    from networks.load import load

    path = folder / f"{name}.yaml"
    path.write_text(NETWORK.format(name=name, width=width))
    return load(path).to_bytes()


class StandIn:
    """Speaks a PNode's part of the protocol. Its "state" after a step is a text made of VNode and step."""

    def __init__(self, name: str, orchestrator: str, store: LocalStore, *, step_s: float = 0.002) -> None:
        self.name = name
        self.store = store
        self.step_s = step_s
        self.bus = ZmqBus(name, bind="tcp://127.0.0.1:0")
        self.orchestrator = PeerRef("orchestrator", 0, [orchestrator])
        self.incarnation = 0
        self.term = 0
        self.seen: list[Message] = []
        self.deployments: dict[str, messages.Deployment] = {}
        self.epochs: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.states: dict[str, str] = {}
        self.silent: set[type[Message]] = set()
        self.refusing: set[type[Message]] = set()
        self.refusal = "no"
        self.environment = ENVIRONMENT
        self.verdicts: dict[tuple[str, int, int], bool] = {}
        self.save_parts = True
        self.compute = "idle"
        self.flops = 1e9
        self.stands_still = False
        """No heartbeats, no answers: its loop hangs."""
        self.cuts: dict[str, dict[int, list[messages.Part]]] = {}
        """By session, the cuts that are saved and not known as committed."""
        self.reports: dict[str, list[messages.StepReport]] = {}
        self._hold: set[str] = set()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._registering = False

    async def start(self, *, boot: int = 0, beats: bool = True) -> StandIn:
        """Register and report."""
        if boot:
            self.bus._boot = Boot(boot)
        self.bus.on_message(self._on_message)
        await self.bus.start()
        await self.register()
        if beats:
            self._spawn(self._beat())
        return self

    async def register(self, timeout_s: float = 5) -> None:
        """Become a member, and say what the orchestrator may have missed. Raises `RefusedError`."""
        profile = Profile("box", "cpu", 1, self.flops, 1 << 32, 1e9, 1e-4, "torch", "cpu", "0")
        message = messages.Register(str(new_request_id()), self.name, self.bus.me, profile, self.incarnation)
        answer, _ = await self.bus.ask(self.orchestrator, message, timeout_s=timeout_s)
        assert isinstance(answer, Registered)
        if answer.term < self.term:
            return
        self.incarnation, self.term = answer.incarnation, answer.term
        for name in self.deployments:
            self._announce(name)

    def _announce(self, session: str) -> None:
        epoch = self.epochs[session]
        for step, parts in sorted(self.cuts.get(session, {}).items()):
            self._tell_parts(session, epoch, step, parts)
        if reports := self.reports.get(session):
            self._say(messages.Progress(session, epoch, 0, self.name, reports))
        if self.states.get(session) == "held":
            self._say(messages.RunHeld(session, epoch, 0, self.steps[session], self.name))

    async def close(self, *, goodbye: bool = False) -> None:
        """End; without a goodbye as if killed (its bus is closed all the same)."""
        if goodbye:
            self.bus.send(self.orchestrator, messages.Goodbye(self.name, self.incarnation))
        for task in list(self._tasks):
            task.cancel()
        await self.bus.close()

    def freeze(self) -> None:
        """Say nothing any more, and make no steps."""
        self.stands_still = True
        for task in self._runs.values():
            task.cancel()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _beat(self) -> None:
        while True:
            if not self.stands_still:
                beats = [
                    messages.SessionBeat(
                        name, self.epochs[name], self.steps.get(name, 0), self.states[name], "", 0.0,
                        self.steps.get(name, 0), sorted(self.cuts.get(name, {})),
                    )
                    for name in self.deployments
                ]  # fmt: skip
                message = messages.Heartbeat(
                    self.name, self.incarnation, self.term, beats, 1, 0.0, self.compute, 0.0
                )  # fmt: skip
                self.bus.send(self.orchestrator, message)
            await asyncio.sleep(0.2)

    async def _register_again(self) -> None:
        """Until it is answered: an orchestrator that knows this PNode already won't ask for it again."""
        try:
            while True:
                try:
                    await self.register(2)
                except RefusedError:
                    return
                except DCNRError:
                    await asyncio.sleep(0.2)
                else:
                    return
        finally:
            self._registering = False

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        self.seen.append(message)
        if type(message) in self.silent or self.stands_still:
            return
        if isinstance(message, messages.HeartbeatAck):
            if not message.known and message.incarnation == self.incarnation and not self._registering:
                self._registering = True
                self._spawn(self._register_again())
            return
        request_id = getattr(message, "request_id", "")
        if getattr(message, "term", self.term) < self.term:
            self.bus.send(sender, messages.Refused(request_id, "stale-term", f"term {self.term} is known here"))
            return
        if type(message) in self.refusing:
            self.bus.send(sender, messages.Refused(request_id, self.refusal, "told to refuse", "ask the test"))
            return
        body: list[bytes] = []
        match message:
            case messages.Prepare():
                self._prepare(message, msgspec.msgpack.decode(frames[0], type=messages.Deployment))
            case messages.StartRun():
                self._start_run(message)
            case messages.HoldRun():
                self._hold.add(message.session)
                self._tell_held(message.session)
            case messages.Release():
                if message.epoch >= self.epochs.get(message.session, 0):
                    self._forget(message.session)
            case messages.Committed():
                self._committed(message)
                return
            case messages.InspectRun():
                if message.session not in self.deployments:
                    self.bus.send(sender, messages.Refused(request_id, "unknown-session", "not here"))
                    return
                body = [msgspec.msgpack.encode(self._reports(message.session))]
            case _:
                return
        self.bus.send(sender, messages.Ok(request_id), body)

    def _forget(self, session: str) -> None:
        if task := self._runs.pop(session, None):
            task.cancel()
        self.deployments.pop(session, None)

    def _prepare(self, message: messages.Prepare, deployment: messages.Deployment) -> None:
        name = message.session
        if name in self.deployments and self.epochs[name] == message.epoch:
            return
        self._forget(name)
        self._hold.discard(name)
        self.deployments[name], self.epochs[name] = deployment, message.epoch
        self.steps[name], self.states[name] = deployment.start_step, "prepared"
        self.cuts[name], self.reports[name] = {}, []

    def _start_run(self, message: messages.StartRun) -> None:
        name = message.session
        if name not in self.deployments or self.epochs[name] != message.epoch:
            return
        if self.states[name] == "running":
            return
        self._hold.discard(name)
        if self.steps[name] >= message.until:
            self._tell_held(name)
            return
        self.states[name] = "running"
        self._runs[name] = self._spawn(self._run(name, message.until))

    def _tell_held(self, session: str) -> None:
        if self.states[session] == "held":
            self._say(messages.RunHeld(session, self.epochs[session], 0, self.steps[session], self.name))

    def _committed(self, message: messages.Committed) -> None:
        if self.epochs.get(message.session) == message.epoch:
            cuts = self.cuts[message.session]
            self.cuts[message.session] = {step: parts for step, parts in cuts.items() if step > message.step}
            kept = self.reports[message.session]
            self.reports[message.session] = [report for report in kept if report.step > message.step]

    def _mine(self, session: str) -> list[str]:
        return [vnode for vnode, pnode in self.deployments[session].placement.items() if pnode == self.name]

    def _reports(self, session: str) -> list[messages.VNodeReport]:
        step = self.steps[session]
        return [
            messages.VNodeReport(vnode, "linear", self.name, 0, step, {}, 0, 0.0, 0.0, 0.0, 0.0, 0)
            for vnode in self._mine(session)
        ]

    async def _run(self, session: str, until: int) -> None:
        """Make steps; the PNode of the loss leads and decides on holds, the others follow it (all are one process)."""
        deployment, epoch = self.deployments[session], self.epochs[session]
        while True:
            await asyncio.sleep(self.step_s)
            leader = PEERS[deployment.placement["loss"]]
            step = self.steps[session] + 1
            if leader is self:
                others = {PEERS[pnode] for pnode in deployment.placement.values()} - {self}
                if any(other.stands_still or other.steps.get(session, 0) < step - 1 for other in others):
                    continue
                held = session in self._hold or step >= until
                self.verdicts[session, epoch, step] = held
                report = messages.StepReport(step, 1.0 / step, 8, 1.0, 0.1, self.step_s, 8, "")
                self.reports[session].append(report)
                self._say(messages.Progress(session, epoch, 0, self.name, [report]))
            elif (session, epoch, step) in leader.verdicts:
                held = leader.verdicts[session, epoch, step]
            else:
                continue
            self.steps[session] = step
            every = deployment.checkpoint_every
            if held or (every and step % every == 0):
                await self._save(session, epoch, step)
            if held:
                self.states[session] = "held"
                self._tell_held(session)
                return

    async def _save(self, session: str, epoch: int, step: int) -> None:
        if not self.save_parts:
            return
        prefix = self.deployments[session].store_prefix
        parts = [
            await save_part_bytes(self.store, prefix, vnode, f"{vnode} after {step}".encode())
            for vnode in self._mine(session)
            if vnode in ("fc1", "fc2")
        ]
        self.cuts[session][step] = parts
        self._tell_parts(session, epoch, step, parts)

    def _tell_parts(self, session: str, epoch: int, step: int, parts: list[messages.Part]) -> None:
        message = messages.PartsSaved(session, epoch, 0, step, self.name, self.environment)
        self._say(message, [msgspec.msgpack.encode(parts)])

    def fail(self, session: str, vnode: str, text: str, cause: str = "numbers", peer: str = "") -> None:
        """Say that the run can't go on."""
        if task := self._runs.pop(session, None):
            task.cancel()
        self.states[session] = "failed"
        step, epoch = self.steps[session], self.epochs[session]
        self._say(messages.RunFailed(session, epoch, 0, step, self.name, vnode, text, "", cause, peer))

    def _say(self, message: Message, frames: Sequence[bytes] = ()) -> None:
        with contextlib.suppress(DCNRError):
            self.bus.send(self.orchestrator, message, frames)


PEERS: dict[str, StandIn] = {}


class Client:
    """Asks an orchestrator."""

    def __init__(self, address: str) -> None:
        self.bus = ZmqBus(f"client-{new_request_id()}")
        self.orchestrator = PeerRef("orchestrator", 0, [address])

    async def ask(self, message: Message, body: type[T], frames: Sequence[bytes] = (), timeout_s: float = 20) -> T:
        """The decoded body of the answer."""
        answer, received = await self.bus.ask(self.orchestrator, message, frames, timeout_s=timeout_s)
        assert isinstance(answer, messages.Ok), answer
        if body is type(None):
            return None  # type: ignore[return-value]
        return msgspec.msgpack.decode(received[0], type=body)

    async def session(self, name: str) -> messages.SessionInfo:
        """One session."""
        infos = await self.ask(messages.ListSessions(str(new_request_id())), list[messages.SessionInfo])
        return next(info for info in infos if info.session == name)

    async def act(self, session: str, action: str, **more: Any) -> messages.SessionInfo:
        """Act on a session."""
        return await self.ask(
            messages.ActOnSession(str(new_request_id()), session, action, **more), messages.SessionInfo
        )

    async def until(
        self, session: str, reached: Callable[[messages.SessionInfo], bool], timeout_s: float = 15
    ) -> messages.SessionInfo:
        """Watch a session until something holds."""
        async with asyncio.timeout(timeout_s):
            seq = 0
            while True:
                watch = messages.WatchSession(str(new_request_id()), session, seq, 0.5)
                info = await self.ask(watch, messages.WatchInfo)
                if reached(info.session):
                    return info.session
                seq = info.events[-1].seq if info.events else seq

    async def state(self, session: str, state: str, timeout_s: float = 15) -> messages.SessionInfo:
        """Watch a session until it is in that state."""
        return await self.until(session, lambda info: info.state == state, timeout_s)


class Cluster:
    """Everything that a test needs."""

    def __init__(
        self, folder: Path, *, lease_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self.folder = folder
        self.lease_s = lease_s
        self.clock = clock
        self.store = LocalStore(folder / "store")
        self.service: Service
        self.client: Client
        self.address = ""
        self.bugs: list[str] = []
        self._run: asyncio.Task[None] | None = None

    async def up(self, *, bind: str = "tcp://127.0.0.1:0") -> None:
        """Start the orchestrator."""
        bus = ZmqBus("orchestrator", bind=bind)
        logger = structlog.wrap_logger(
            structlog.ReturnLogger(),
            wrapper_class=structlog.make_filtering_bound_logger(10),
            processors=[structlog.processors.format_exc_info, self._logged],
        )
        store = LocalStore(self.folder / "store")
        self.service = Service(
            bus, store, self.folder / "home", logger, lease_s=self.lease_s, version="test", clock=self.clock
        )
        try:
            await self.service.open()
        except BaseException:
            await bus.close()
            raise
        self.address = self.service.bus.me.addresses[0]
        self._run = asyncio.ensure_future(self.service.run())
        self.client = Client(self.address)
        await self.client.bus.start()

    def _logged(self, logger: Any, method: str, event: Any) -> Any:
        if "exception" in event:
            self.bugs.append(event["exception"])
        return event

    async def down(self) -> None:
        """End it."""
        await self.client.bus.close()
        self.service.stop()
        if self._run is not None:
            await self._run

    async def kill(self) -> None:
        """End it as kill -9 does, as far as that goes in one process: nothing more is written or said."""
        await self.client.bus.close()
        service, run = self.service, self._run
        assert run is not None
        self._run = None
        service._error = DCNRError("killed")
        service._save_events = lambda: None  # type: ignore[method-assign]
        for task in [run, *service._tasks]:
            task.cancel()
        await asyncio.wait([run], timeout=5)

    async def pnode(self, name: str, **more: Any) -> StandIn:
        """One more PNode."""
        PEERS[name] = StandIn(name, self.address, self.store, **more)
        return await PEERS[name].start()

    async def network(self, name: str = "toy", width: int = 16) -> messages.NetworkInfo:
        """Register a network."""
        data = network_bytes(self.folder, name, width)
        message = messages.PutNetwork(str(new_request_id()), name)
        return await self.client.ask(message, messages.NetworkInfo, [data])

    async def events(self, session: str) -> list[messages.SessionEvent]:
        """All that was logged of a session."""
        watch = messages.WatchSession(str(new_request_id()), session, 0, 0.0, 2000)
        return (await self.client.ask(watch, messages.WatchInfo)).events

    async def told(self, session: str, text: str, timeout_s: float = 15) -> messages.SessionEvent:
        """Wait for a line of a session's log that has this text."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in await self.events(session):
                    if text in event.text:
                        return event
                await asyncio.sleep(0.05)

    async def pnodes(self) -> dict[str, messages.PNodeInfo]:
        """All PNodes by id."""
        infos = await self.client.ask(messages.ListPNodes(str(new_request_id())), list[messages.PNodeInfo])
        return {info.pnode: info for info in infos}

    async def data(self) -> str:
        """A blob that stands for data; its digest."""
        return await Blobs(self.store).put(b"some data")

    async def create(self, network: str = "toy", **more: Any) -> messages.SessionInfo:
        """Create a session."""
        fields: dict[str, Any] = {
            "data_digest": await self.data(),
            "tokenizer_digest": "",
            "data": "some data",
            "steps": 40,
            "seed": 1,
            "pnodes": 2,
        }
        message = messages.CreateSession(str(new_request_id()), network, **{**fields, **more})
        return await self.client.ask(message, messages.SessionInfo)


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, *, pnodes: int = 2, lease_s: float = 2.0, step_s: float = 0.002,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Cluster]:  # fmt: skip
    """An orchestrator and stand-ins p1, p2, …"""
    PEERS.clear()
    found = Cluster(folder, lease_s=lease_s, clock=clock)
    await found.up()
    try:
        for number in range(pnodes):
            await found.pnode(f"p{number + 1}", step_s=step_s)
        yield found
    finally:
        for peer in PEERS.values():
            await peer.close()
        await found.down()
    assert not found.bugs, found.bugs[0]


async def undisturbed(store: LocalStore, session: str, step: int, network: str = "toy") -> str:
    """The hash after a step of a run to which nothing happens: from what the stand-ins make of VNode and step alone."""
    prefix = session_prefix(network, session)
    head = await read_head(store, prefix)
    assert head is not None
    manifest = await read_manifest(store, prefix, head.manifest_key, head.manifest_digest)
    parts = [messages.Part(vnode, digest(f"{vnode} after {step}"), 0) for vnode in ("fc1", "fc2")]
    data = msgspec.structs.replace(manifest.data, step=step, samples=8 * step)
    return msgspec.structs.replace(manifest, step=step, parts=parts, data=data, counters={"step": step}).hash


def digest(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
