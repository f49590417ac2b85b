"""The operator: puts a network and its data, creates and starts a session, watches it, sometimes pauses and resumes it.

What it wants is kept outside its process, as a person keeps it: a new process goes on where the last one was killed.
It asks again until it is answered, at every address where an orchestrator may be.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from storage.blobs import Blobs
from storage.store import StoreError
from tests.sim.network import WorldBus
from tests.sim.processes import ORCHESTRATOR, Machine
from tests.sim.store import Handle
from wire import messages
from wire.errors import DCNRError
from wire.messages import Message, PeerRef
from wire.requests import RefusedError

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")

ASK_S = 8.0
AGAIN_S = 1.0
WATCH_S = 4.0
RESUME_S = 5.0
AFTER_S = 0.5
"""The world goes on for so long after the run has finished."""


WAIT = re.compile(r", for (\d+) s")
LONG_S = 20
"""A wait that is shown for longer is written down."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """What the operator does once a step is made: pause, stop or rebalance; what comes to rest is resumed later.

    `state`: only in that state ("": while it runs or recovers; "rest": when it is paused or failed).
    """

    step: int
    action: str
    seconds: float
    state: str = ""

    def __str__(self) -> str:
        return f"{self.action} after step {self.step}, when {self.state or 'running'}, for {self.seconds:.1f} s"

    def due(self, state: str, step: int) -> bool:
        """Whether now is the time."""
        states = {"": ("running", "recovering"), "rest": ("paused", "failed")}.get(self.state, (self.state,))
        return state in states and step >= self.step


class Client:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.session = ""
        self.finished = asyncio.Event()
        self.created = False
        self.started = False
        self.resumes = 0
        self.last: messages.SessionInfo | None = None
        self._due = list(world.plan.interruptions)
        self._bus: WorldBus | None = None
        self._place = 0
        self._state = ""
        self._committed = 0
        self._unreachable = False
        self._pause_s = AGAIN_S
        self._asked = 0

    # ------------------------------------------------------------ one process of it

    async def run(self, machine: Machine) -> None:
        """Live until the run has finished."""
        assert machine.bus is not None
        self._bus = machine.bus
        self._bus.on_message(lambda sender, message, frames: None)
        await self._bus.start()
        await self._prepare()
        await self._watch()
        await asyncio.sleep(AFTER_S)
        self.finished.set()
        await self._bus.close()

    async def _prepare(self) -> None:
        """Everything up to the running session."""
        world = self._world
        made = world.built
        blobs = Blobs(Handle(world.store))
        data = await self._stored(blobs, made.data)
        await self.ask(
            messages.PutNetwork(self._id("put"), made.shape.name), messages.NetworkInfo, [made.network_bytes]
        )
        plan = world.plan
        create = messages.CreateSession(
            self._id("create"), made.shape.name, data, "", "simulated", made.shape.steps, made.network.recipe.seed,
            pnodes=plan.members, placement=dict(plan.placement), checkpoint_every=plan.every, keep=plan.keep,
            start=False, name=world.session,
        )  # fmt: skip
        if not self.created:
            try:
                info = await self.ask(create, messages.SessionInfo)
            except RefusedError as error:
                if error.code != "exists":
                    raise
            else:
                self._saw(info)
            self.created = True
        self.session = world.session
        while not self.started:
            if self._due and self._due[0].state == "created":
                await self._try(self._due.pop(0).action)
            await self._wait_for_pnodes()
            try:
                info = await self._act("start", until=plan.until)
            except RefusedError as error:
                self.started = error.code == "state"  # an earlier request, whose answer was lost, started it
                await asyncio.sleep(AGAIN_S)
            else:
                self._saw(info)
                self.started = True

    async def _stored(self, blobs: Blobs, data: bytes) -> str:
        while True:
            try:
                return await blobs.put(data)
            except StoreError:
                await asyncio.sleep(AGAIN_S)

    async def _wait_for_pnodes(self) -> None:
        plan = self._world.plan
        wanted = len(set(plan.placement.values())) or plan.members or 1
        while True:
            found = await self.ask(messages.ListPNodes(self._id("list")), list[messages.PNodeInfo])
            alive = {info.pnode for info in found if info.state == "alive"}
            if len(alive) >= wanted and set(plan.placement.values()) <= alive:
                return
            await asyncio.sleep(AGAIN_S)

    async def _watch(self) -> None:
        seq, term = 0, 0
        while True:
            watch = messages.WatchSession(self._id("watch"), self.session, seq, WATCH_S)
            try:
                found = await self.ask(watch, messages.WatchInfo)
            except RefusedError:
                await asyncio.sleep(AGAIN_S)
                continue
            if found.term != term:  # another orchestrator may count events anew
                term = found.term
            elif found.events:
                seq = found.events[-1].seq
            self._saw(found.session)
            if found.session.state == "finished":
                return
            await self._go_on(found.session)

    async def _go_on(self, info: messages.SessionInfo) -> None:
        """Do what is due."""
        if self._due and self._due[0].due(info.state, info.step):
            if await self._try(self._due[0].action):
                self._pause_s = self._due.pop(0).seconds
        elif info.state in ("failed", "paused", "stopped", "created"):
            await asyncio.sleep(RESUME_S if info.state == "failed" else self._pause_s)
            self.resumes += 1
            await self._wait_for_pnodes()
            await self._try("resume")

    async def _try(self, action: str) -> bool:
        try:
            if action == "rebalance":
                message = messages.Rebalance(self._id(action), self.session, apply=True)
                await self.ask(message, messages.RebalanceInfo)
            else:
                self._saw(await self._act(action))
        except RefusedError as error:
            self._world.recorder.told(self.session, "refused", text=f"{action}: {error}")
            return False
        return True

    async def _act(self, action: str, until: int = 0) -> messages.SessionInfo:
        message = messages.ActOnSession(self._id(action), self.session, action, until)
        return await self.ask(message, messages.SessionInfo)

    # ------------------------------------------------------------ asking and seeing

    def _id(self, what: str) -> str:
        """Of a request: the same one for what is to happen once, a new one otherwise."""
        if what in ("put", "create"):
            return f"client-{what}"
        self._asked += 1
        return f"client-{what}-{self._asked}"

    async def ask(self, message: Message, body: type[T], frames: Sequence[bytes] = ()) -> T:
        """The body of the answer; asked again until there is one. Raises `RefusedError`."""
        assert self._bus is not None
        world = self._world
        while True:
            addresses = [machine.address for machine in world.orchestrators]
            address = addresses[self._place % len(addresses)]
            try:
                _, received = await self._bus.ask(PeerRef(ORCHESTRATOR, 0, [address]), message, frames, timeout_s=ASK_S)
            except RefusedError as error:
                if error.code in ("unavailable", "store", "unreachable", "superseded"):
                    self._place += error.code == "superseded"
                    await asyncio.sleep(AGAIN_S)
                    message = self._anew(message)
                    continue
                raise
            except DCNRError as error:
                if not self._unreachable:
                    world.recorder.told(self.session, "unreachable", text=str(error))
                self._unreachable = True
                self._place += 1
                await asyncio.sleep(AGAIN_S)
                if not isinstance(message, messages.CreateSession):
                    message = self._anew(message)
                continue
            self._unreachable = False
            return msgspec.msgpack.decode(received[0], type=body)

    def _anew(self, message: Message) -> Message:
        """The same request under a new id: a refusal would be repeated under the old one."""
        self._asked += 1
        return msgspec.structs.replace(message, request_id=f"client-again-{self._asked}")

    def _saw(self, info: messages.SessionInfo) -> None:
        """Write down what is new."""
        recorder = self._world.recorder
        self.last = info
        if info.committed != self._committed:
            self._committed = info.committed
            recorder.told(info.session, "committed", info.state, info.committed, info.final_hash)
        if info.state != self._state:
            self._state = info.state
            recorder.told(info.session, "state", info.state, info.step, info.error)
        for line in info.waiting:
            since = WAIT.search(line)
            if since is None or int(since[1]) > LONG_S:
                recorder.told(info.session, "waiting", info.state, info.step, line)
