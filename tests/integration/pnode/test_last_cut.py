"""The last good cut of a run that failed for good: its way to a slow store, when the session is released at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from networks.network import Network
from storage.checkpoints import read_head
from storage.store import StoreUnavailableError
from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_daemon import Running
from tests.integration.pnode.test_training import prepare_network

SETS = ["train.optimizer.lr=1e30", "train.schedule.warmup=0", "train.steps=50"]


class Slow:
    """A store that takes nothing before it is told to, or refuses all."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.go = asyncio.Event()
        self.broken = False
        self.begun = self.cancelled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(self, key: str, data: bytes) -> str:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.broken:
            raise StoreUnavailableError("the disk is full")
        return cast(str, await self._store.put(key, data))


class Scene:
    def __init__(self, conductor: Conductor, slow: Slow, network: Network, digest: str, placement: dict[str, str]):
        self.conductor, self.slow = conductor, slow
        self.network, self.digest, self.placement = network, digest, placement
        self.good = conductor.failed[0].step

    @property
    def told(self) -> bool:
        """The orchestrator knows of the cut."""
        return ("nan-1", self.good) in self.conductor.parts


@asynccontextmanager
async def failed(folder: Path) -> AsyncIterator[Scene]:
    """A run whose step after a cut was not finite, while nothing of that cut is stored yet."""
    conductor = Conductor(folder)
    await conductor.start()
    conductor.commits.add("nan-1")
    network, data = prepare_network("mlp-digits", SETS, folder)
    _, digest = await conductor.put(network, data)
    placement = {str(node.id): "p1" for node in network.graph.nodes}
    try:
        async with Running(conductor, folder) as daemon:
            await conductor.until(lambda: "p1" in conductor.beats)
            await conductor.deploy("nan-1", network, digest, placement, checkpoint_every=1)
            slow = Slow(daemon.hub.store)
            daemon.hub.store = cast(Any, slow)
            await conductor.run("nan-1", 50)
            await conductor.until(lambda: bool(conductor.failed) and slow.begun > 0)
            scene = Scene(conductor, slow, network, digest, placement)
            assert "is not finite" in conductor.failed[0].text
            assert scene.good >= 1
            assert not conductor.parts
            yield scene
    finally:
        await conductor.close()


async def test_it_is_saved_and_committed_though_the_session_was_released(tmp_path: Path) -> None:
    async with failed(tmp_path) as scene:
        await scene.conductor.release("nan-1")
        assert scene.slow.cancelled == 0
        await asyncio.sleep(0.5)
        assert not scene.told
        scene.slow.go.set()
        await scene.conductor.until(lambda: scene.conductor.committed("nan-1") == scene.good, 10)
        head = await read_head(scene.conductor.store, scene.conductor.deployments["nan-1"].store_prefix)
        assert head is not None
        assert head.step == scene.good


async def test_a_store_that_refuses_it_is_asked_once(tmp_path: Path) -> None:
    async with failed(tmp_path) as scene:
        await scene.conductor.release("nan-1")
        begun = scene.slow.begun
        scene.slow.broken = True
        scene.slow.go.set()
        await asyncio.sleep(1.5)
        assert scene.slow.begun - begun <= 3 * (scene.good - 1), "of each cut, each part once"
        assert not scene.conductor.parts


async def test_another_epoch_ends_the_saving_of_this_one(tmp_path: Path) -> None:
    async with failed(tmp_path) as scene:
        begun = scene.slow.begun
        await scene.conductor.deploy("nan-1", scene.network, scene.digest, scene.placement, checkpoint_every=1)
        assert scene.slow.cancelled == begun
        scene.slow.go.set()
        await asyncio.sleep(0.5)
        assert not scene.told
        assert not scene.conductor.parts
