"""Client and service under the simulated network: loss, damage, cuts, and services that are killed, from one seed."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog

from storage import NotFoundError, StoreUnavailableError
from storage.local import LocalStore
from storage.remote import SERVICE_ID
from storage.remote.cache import BlobCache
from storage.remote.client import RemoteStore
from storage.remote.connection import STORE_LIMITS
from storage.remote.service import StorageService
from storage.remote.spool import Spool
from storage.store import digest_of
from storage.transfer import fetch_verified
from wire.commands import Transmit
from wire.sim import Line, SimBus, SimNetwork, run_sim

SEED = int(os.environ.get("DCNR_SEED", "1"))
LOG = structlog.wrap_logger(structlog.PrintLogger(), wrapper_class=structlog.make_filtering_bound_logger(40))
HOME_LINE = Line(delay_s=0.02, rate_bytes_s=6.25e6)
MB = 1 << 20


class Counting(SimNetwork):
    """Counts the bytes that set out, by sender."""

    def __init__(self, seed: int, line: Line) -> None:
        super().__init__(seed, line=line)
        self.bytes: Counter[str] = Counter()

    def carry(self, src: SimBus, packet: Transmit) -> None:
        self.bytes[src.me.id] += sum(map(len, packet.parts))
        super().carry(src, packet)


class World:
    """A service on a folder, and clients, on one network."""

    def __init__(self, folder: Path, line: Line, seed: int) -> None:
        self.network = Counting(seed, line)
        self.store = LocalStore(folder / "store")
        self.folder = folder
        self.up()

    def up(self) -> None:
        self.bus = self.network.bus(SERVICE_ID)
        self.service = StorageService(self.bus, self.store, Spool(self.folder / "spool"), LOG)
        self.opened = asyncio.ensure_future(self.service.open())

    async def killed(self) -> None:
        """Gone without a word; its spool stays."""
        await self.opened
        self.network.crash(self.bus)
        for task in list(self.service._tasks):
            task.cancel()

    def client(self, name: str, *, cache: bool = False) -> RemoteStore:
        kept = BlobCache(self.folder / f"{name}-cache", 1 << 30) if cache else None
        return RemoteStore(
            "dcnr://sim", f"tcp://{SERVICE_ID}:7700",
            lambda: self.network.bus(name, dial_only=True, limits=STORE_LIMITS), cache=kept,
        )  # fmt: skip

    async def cut(self, name: str, seconds: float) -> None:
        """The line is dead for so long, and what was under way is gone."""
        self.network.partition(name, SERVICE_ID)
        self.network.reconnect(name, SERVICE_ID)
        self.network.reconnect(SERVICE_ID, name)
        await asyncio.sleep(seconds)
        self.network.heal(name, SERVICE_ID)


def simulate(folder: Path, line: Line, story: Callable[[World], Awaitable[None]], seed: int = SEED) -> None:
    print("seed", seed)
    random.seed(seed)

    async def main() -> None:
        world = World(folder, line, seed)
        await story(world)
        world.service.stop()
        await world.bus.close()

    run_sim(main())


def test_two_hosts_with_two_cuts_each_get_every_byte_about_once(tmp_path: Path) -> None:
    data = random.Random(SEED).randbytes(20 * MB)

    async def story(world: World) -> None:
        await world.store.put("blobs/big", data)

        async def host(name: str) -> None:
            store, path = world.client(name), tmp_path / name
            fetching = asyncio.ensure_future(fetch_verified(store, "blobs/big", digest_of(data), path))
            for pause in (1.0, 1.5):
                await asyncio.sleep(pause)
                assert not fetching.done()
                await world.cut(name, 5.0)
            await fetching
            assert path.read_bytes() == data
            await store.close()

        await asyncio.gather(host("a"), host("b"))
        ratio = world.network.bytes[SERVICE_ID] / (2 * len(data))
        print("ratio", ratio)
        assert 1.0 <= ratio <= 1.05

    simulate(tmp_path, HOME_LINE, story)


def test_an_upload_with_cuts_sends_every_byte_about_once(tmp_path: Path) -> None:
    data = random.Random(SEED).randbytes(10 * MB)

    async def story(world: World) -> None:
        store = world.client("a")
        sending = asyncio.ensure_future(store.put("blobs/big", data))
        for _ in range(2):
            await asyncio.sleep(0.7)
            assert not sending.done()
            await world.cut("a", 5.0)
        await sending
        assert (await world.store.get("blobs/big")).data == data
        ratio = world.network.bytes["a"] / len(data)
        print("ratio", ratio)
        assert 1.0 <= ratio <= 1.08
        await store.close()

    simulate(tmp_path, HOME_LINE, story)


@pytest.mark.parametrize("up", [False, True], ids=["download", "upload"])
def test_a_service_that_is_killed_goes_on_where_it_ended(tmp_path: Path, up: bool) -> None:
    data = random.Random(SEED).randbytes(10 * MB)

    async def story(world: World) -> None:
        if not up:
            await world.store.put("blobs/big", data)
        store = world.client("a")
        work = store.put("blobs/big", data) if up else store.get("blobs/big")
        working = asyncio.ensure_future(work)
        for _ in range(2):
            await asyncio.sleep(0.7)
            assert not working.done()
            await world.killed()
            await asyncio.sleep(3.0)
            world.up()
        found = await working
        assert (await world.store.get("blobs/big")).data == (data if up else found.data)
        ratio = world.network.bytes["a" if up else SERVICE_ID] / len(data)
        print("ratio", ratio)
        assert ratio <= 1.15, "two windows, and no more, were on their way to a process that was gone"
        assert list((tmp_path / "spool").iterdir()) == []
        await store.close()

    simulate(tmp_path, HOME_LINE, story)


def test_a_cut_that_outlasts_all_patience_costs_nothing_that_had_come(tmp_path: Path) -> None:
    """The read fails, and the next one goes on, by what the cache has; another of this machine fetches nothing."""
    data = random.Random(SEED).randbytes(10 * MB)

    async def story(world: World) -> None:
        await world.store.put("blobs/big", data)
        store = world.client("a", cache=True)
        fetching = asyncio.ensure_future(fetch_verified(store, "blobs/big", digest_of(data), tmp_path / "copy"))
        await asyncio.sleep(1.0)
        await world.cut("a", 200.0)
        with pytest.raises(StoreUnavailableError, match="given nothing for 15 s"):
            await fetching
        await fetch_verified(store, "blobs/big", digest_of(data), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        ratio = world.network.bytes[SERVICE_ID] / len(data)
        print("ratio", ratio)
        assert ratio <= 1.1
        before = world.network.bytes[SERVICE_ID]
        await fetch_verified(store, "blobs/big", digest_of(data), tmp_path / "again")
        assert world.network.bytes[SERVICE_ID] - before < 1000
        await store.close()

    simulate(tmp_path, HOME_LINE, story)


@pytest.mark.parametrize("seed", range(SEED, SEED + 8))
def test_bad_lines_and_killed_services(tmp_path: Path, seed: int) -> None:
    """Objects of all sizes through a line that loses, damages, doubles and reorders, while the service is killed."""
    draw = random.Random(seed)
    line = Line(
        delay_s=0.01, jitter_s=0.01, drop=draw.choice([0, 0.02, 0.1]), duplicate=0.02, reorder=0.05,
        damage=draw.choice([0, 0.01]), rate_bytes_s=4e6,
    )  # fmt: skip
    objects = {
        f"blobs/{n}": draw.randbytes(draw.choice([0, 1, 128 << 10, (128 << 10) + 1, MB, 3 * MB])) for n in range(8)
    }

    async def story(world: World) -> None:
        done = asyncio.Event()

        async def trouble() -> None:
            while not done.is_set():
                await asyncio.sleep(draw.uniform(2.0, 6.0))
                if draw.random() < 0.5:
                    await world.killed()
                    await asyncio.sleep(draw.uniform(0.1, 4.0))
                    world.up()
                else:
                    await world.cut("a", draw.uniform(0.1, 6.0))

        troubling = asyncio.ensure_future(trouble())
        store = world.client("a")

        async def one(key: str, data: bytes) -> None:
            etag = await store.put_if_absent(key, data) if draw.random() < 0.5 else await store.put(key, data)
            found = await store.get(key, sha256=digest_of(data))
            assert (found.data, found.etag) == (data, etag)
            assert await store.put_if_match(key, data[::-1], etag) == digest_of(data[::-1])
            assert b"".join([chunk async for chunk in store.get_stream(key)]) == data[::-1]

        await asyncio.gather(*(one(key, data) for key, data in objects.items()))
        assert [entry.key async for entry in store.list("blobs/")] == sorted(objects)
        await store.delete("blobs/0")
        with pytest.raises(NotFoundError):
            await store.head("blobs/0")
        done.set()
        await troubling
        await store.close()

    simulate(tmp_path, line, story, seed)
