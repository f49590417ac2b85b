"""Shipped sessions (core, driver, stages) of several PNodes in one process, in virtual time, over a bad network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import structlog
import torch

from networks.graph import NodeId
from networks.network import Network
from pnode.compute_thread import ComputeStatus, ComputeThread
from pnode.data import open_source
from pnode.hub import Bounds, Hub
from pnode.liveness import find_live
from pnode.session import Session
from pnode.share import make_share
from pnode.work import Work, build_work
from storage.open import open_store
from wire.messages import Deployment, Message, PartsSaved, PeerRef, Progress, RunFailed, RunHeld
from wire.sim import Line, SimBus, SimNetwork

CONDUCTOR = "conductor"


class LoopCompute:
    """A compute thread's place taken by the loop: the same order, and a virtual time for each action."""

    name = "loop"

    def __init__(self, pick: random.Random, slowest_s: float) -> None:
        self._pick = pick
        self._slowest_s = slowest_s
        self._queue: list[tuple[str, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self._busy = False

    def submit(self, lane: str, name: str, work: Callable[[], Any], then: Callable[[Any, Any], None]) -> None:
        self._queue.append((lane, work, then))
        self._next()

    def drop(self, lane: str) -> int:
        before = len(self._queue)
        self._queue = [item for item in self._queue if item[0] != lane]
        return before - len(self._queue)

    def status(self) -> ComputeStatus:
        return ComputeStatus("idle", 0.0, "")

    def _next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            _, work, then = self._queue.pop(0)
            asyncio.get_running_loop().call_later(self._pick.uniform(0, self._slowest_s), self._run, work, then)

    def _run(self, work: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        try:
            value, error = work(), None
        except Exception as caught:
            value, error = None, caught
        self._busy = False
        then(value, error)
        self._next()


class Pipeline:
    """Sessions of one network, one per PNode of the placement."""

    def __init__(self, network: Network, data: bytes, placement: dict[str, str], *, seed: int, line: Line, home: Path):
        self.network, self.data, self.placement = network, data, placement
        self.seed, self.line = seed, line
        self.pick = random.Random(seed)
        self.home = home
        self.pnodes = list(dict.fromkeys(placement.values()))
        self.sessions: dict[str, Session] = {}
        self.works: dict[str, Work] = {}
        self.buses: dict[str, SimBus] = {}
        self.losses: list[float] = []
        self.held: dict[str, int] = {}
        self.failed: list[RunFailed] = []
        self.saved: list[tuple[str, int]] = []
        self.store = open_store(str(home))

    async def run(self, until: int, during: Callable[[Pipeline], Coroutine[Any, Any, None]] | None = None) -> None:
        """Build, start, and wait until every PNode holds (or one has failed)."""
        self.net = SimNetwork(self.seed, line=self.line)
        self.changed = asyncio.Event()
        conductor = self.buses[CONDUCTOR] = self.net.bus(CONDUCTOR)
        conductor.on_message(self._told)
        await conductor.start()
        for pnode in self.pnodes:
            self.buses[pnode] = self.net.bus(pnode)
            await self.buses[pnode].start()
        peers = {pnode: self.buses[pnode].me for pnode in self.pnodes}
        async with asyncio.TaskGroup() as group:
            for pnode in self.pnodes:
                self.sessions[pnode] = self._session(pnode, peers, group)
            for session in self.sessions.values():
                session.start(until)
            extra = group.create_task(during(self)) if during is not None else None
            async with asyncio.timeout(36_000):
                while not self.failed and not self.done():
                    await self.changed.wait()
                    self.changed.clear()
            if extra is not None:
                extra.cancel()
        for bus in self.buses.values():
            await bus.close()

    def done(self) -> bool:
        """Every PNode holds, and what was to be saved is saved."""
        return self.held.keys() == set(self.pnodes) and not any(
            s.core.uncommitted.saving for s in self.sessions.values()
        )

    def _session(self, pnode: str, peers: dict[str, PeerRef], group: asyncio.TaskGroup) -> Session:
        recipe, graph = self.network.recipe, self.network.graph
        live = find_live(graph)
        share = make_share(
            graph, {NodeId(n): p for n, p in self.placement.items()}, pnode, live=live.live, trainable=live.trainable,
            session="sim", epoch=1, microbatches=recipe.microbatches, steps=recipe.steps, clip=recipe.optimizer.clip,
            checkpoint_every=recipe.checkpoint.every,
        )  # fmt: skip
        source = open_source(self.data, recipe, None, recipe.seed, inputs=graph.inputs)
        work = build_work(self.network, share, seed=recipe.seed, device=torch.device("cpu"), source=source, trace=False)
        self.works[pnode] = work
        deployment = Deployment(
            "sim", self.network.id, self.network.digest, self.placement, peers, {}, self.buses[CONDUCTOR].me, "", "",
            recipe.steps, recipe.seed, 0, "", "", "networks/n/sessions/sim/", 0,
        )  # fmt: skip
        hub = Hub(
            pnode, self.buses[pnode], self.buses[CONDUCTOR].me, self.home, Bounds(), group.create_task,
            structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(50)),
            store=self.store, clock=asyncio.get_running_loop().time,
        )  # fmt: skip
        compute = cast(ComputeThread, LoopCompute(self.pick, 0.02))
        session = Session(hub, deployment, share, self.network, work, compute)

        def on_message(sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
            member = session.member(sender)
            if member is not None:
                session.on(member, message, frames)

        self.buses[pnode].on_message(on_message)
        self.buses[pnode].on_loss(session.lost)
        return session

    def _told(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        match message:
            case Progress():
                self.losses.extend(step.loss for step in message.steps)
            case RunHeld():
                self.held[message.pnode] = message.step
            case RunFailed():
                self.failed.append(message)
            case PartsSaved():
                self.saved.append((message.pnode, message.step))
        self.changed.set()

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state of every VNode, from the PNode that has it."""
        return {node: state for work in self.works.values() for node, state in work.cut(work.applied).states.items()}
