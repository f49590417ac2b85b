"""The storage service on real sockets: what a line carries, restarts, quotas, what is not written, odd questions."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from storage import Blobs, ConflictError, CorruptError, NotFoundError, StoreError, StoreUnavailableError, open_store
from storage.keys import blob_key
from storage.local import LocalStore
from storage.remote import CHUNK_BYTES, SERVICE_ID
from storage.remote.cache import BlobCache
from storage.remote.client import RemoteStore
from storage.remote.connection import Patience
from storage.remote.quota import parse_quotas
from storage.store import Piece, digest_of
from tests.integration.storage.cutting_proxy import cutting_proxy
from tests.integration.storage.service import Served, serving
from wire import messages as m
from wire.errors import UsageError
from wire.messages import PeerRef
from wire.requests import RefusedError
from wire.zmq_bus import ZmqBus

MB = 1 << 20
SEED = int(os.environ.get("DCNR_SEED", "1"))
LINE_BYTES_S = 6.25e6
"""50 Mbit/s."""


def data_of(size: int) -> bytes:
    return random.Random(SEED).randbytes(size)


async def test_two_hosts_with_two_cuts_each_get_every_byte_about_once(tmp_path: Path) -> None:
    """What is counted is what the line carried, headers and handshakes of ZeroMQ and all."""
    size = 20 * MB
    data = data_of(size)
    backing = LocalStore(tmp_path / "store")
    digest = await Blobs(backing).put(data)

    async def host(name: str, served: Served) -> float:
        async with cutting_proxy(served.address, LINE_BYTES_S) as line:
            cache = BlobCache(tmp_path / name, 1 << 30)
            async with served.client(line.address, cache=cache) as store:
                fetching = asyncio.ensure_future(Blobs(store).fetch_to_file(digest, tmp_path / f"{name}.copy"))
                for part in (0.3, 0.6):
                    while line.moved["down"] < part * size:
                        assert not fetching.done()
                        await asyncio.sleep(0.01)
                    await line.cut(1.0)
                await fetching
            assert hashlib.sha256((tmp_path / f"{name}.copy").read_bytes()).hexdigest() == digest
            assert line.cuts == 2
            return line.moved["down"] / size

    async with serving(backing, tmp_path / "spool") as served:
        begun = time.monotonic()
        ratios = await asyncio.gather(host("a", served), host("b", served))
        print(f"each byte was carried {ratios} times, in {time.monotonic() - begun:.1f} s")
    assert all(1.0 <= ratio <= 1.05 for ratio in ratios)


async def test_an_upload_goes_on_after_cuts_and_a_killed_service(tmp_path: Path) -> None:
    size = 10 * MB
    data = data_of(size)
    async with serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served:
        async with cutting_proxy(served.address, LINE_BYTES_S) as line, served.client(line.address) as store:
            sending = asyncio.ensure_future(store.put_if_absent("blobs/big", data))
            for part in (0.3, 0.6):
                while line.moved["up"] < part * size:
                    assert not sending.done()
                    await asyncio.sleep(0.01)
                if part == 0.3:
                    await line.cut(0.5)
                else:
                    await served.crash()
                    await asyncio.sleep(0.5)
                    await served.up()
            assert await sending == digest_of(data)
            print("ratio", line.moved["up"] / size)
            assert line.moved["up"] <= 1.15 * size
            with pytest.raises(ConflictError, match="exists"):
                await store.put_if_absent("blobs/big", data)
            assert (await store.get("blobs/big")).data == data
        assert list((tmp_path / "spool").iterdir()) == []


async def test_processes_of_one_machine_fetch_once_and_read_along(tmp_path: Path) -> None:
    data = data_of(6 * MB)
    cache = BlobCache(tmp_path / "cache", 1 << 30)
    async with (
        serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served,
        served.client(cache=cache) as one,
        served.client(cache=cache) as other,
    ):
        digest = await Blobs(one).put(data)

        async def read(store: RemoteStore) -> bytes:
            chunks = [chunk async for chunk in store.get_stream(blob_key(digest), sha256=digest)]
            return b"".join(chunks)

        found = await asyncio.gather(read(one), read(other), read(one), read(other))
        assert found == [data] * 4
        assert served.service.counters["bytes_read"] == len(data)
        kept = tmp_path / "cache" / digest
        kept.write_bytes(data[:-1] + b"?")  # and nothing of it is believed
        with pytest.raises(CorruptError):
            await read(one)
        await Blobs(one).fetch_to_file(digest, tmp_path / "copy")
        assert kept.read_bytes() == (tmp_path / "copy").read_bytes() == data
        assert served.service.counters["bytes_read"] == 2 * len(data)


async def test_the_cache_keeps_to_its_limit(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", 3 * MB)
    async with (
        serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served,
        served.client(cache=cache) as store,
    ):
        digests = [await Blobs(store).put(bytes([n]) * MB) for n in range(5)]
        for number, digest in enumerate(digests):
            await Blobs(store).fetch_to_file(digest, tmp_path / f"copy{number}")
            await asyncio.sleep(0.02)
            if number > 0:
                await Blobs(store).fetch_to_file(digests[0], tmp_path / f"first{number}")  # always in use
                await asyncio.sleep(0.02)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {digests[0], digests[3], digests[4]}


async def test_nobody_there_is_said_soon_and_a_service_that_comes_is_found(tmp_path: Path) -> None:
    async with (
        serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served,
        served.client(patience=Patience(stall_s=1.0, connect_s=0.5)) as store,
    ):
        await served.down()
        with pytest.raises(StoreUnavailableError, match=r"dcnr://127.*given nothing for 0.5 s.*dcnr storage"):
            await store.get("k")
        await served.up()
        await store.put("k", b"1")
        await served.crash()
        with pytest.raises(StoreUnavailableError, match=r"nothing for 1 s.*may or may not happen later"):
            await store.put("k", b"2")
        await served.up()
        assert (await store.get("k")).data in (b"1", b"2")


class Losing(LocalStore):
    """Carries the next write out, and then its process is killed before it can say so."""

    strike = False
    struck: asyncio.Event

    async def put_if_absent(self, key: str, data: Any) -> str:
        etag = await super().put_if_absent(key, data)
        await self._lose()
        return etag

    async def put_if_match(self, key: str, data: Any, etag: str) -> str:
        etag = await super().put_if_match(key, data, etag)
        await self._lose()
        return etag

    async def _lose(self) -> None:
        if self.strike:
            self.strike = False
            self.struck.set()
            await asyncio.sleep(3600)


@pytest.mark.parametrize("size", [10, CHUNK_BYTES + 1], ids=["small", "large"])
async def test_a_conditional_write_whose_answer_died_with_the_process_counts_once(tmp_path: Path, size: int) -> None:
    backing = Losing(tmp_path / "store")
    backing.struck = asyncio.Event()
    first, second = b"1" * size, b"2" * size

    async def losing(served: Served, write: Any) -> str:
        backing.strike = True
        backing.struck.clear()
        writing = asyncio.ensure_future(write)
        await backing.struck.wait()
        for task in list(served.service._tasks):
            task.cancel()
        await served.crash()
        await served.up()
        etag: str = await writing
        return etag

    async with serving(backing, tmp_path / "spool") as served, served.client() as store:
        etag = await losing(served, store.put_if_absent("k", first))
        assert (await store.get("k")).etag == etag
        newer = await losing(served, store.put_if_match("k", second, etag))
        assert (await store.get("k")).data == second
        with pytest.raises(ConflictError):
            await store.put_if_match("k", first, etag)
        assert (await store.head("k")).etag == newer


async def test_what_only_an_orchestrator_writes(tmp_path: Path) -> None:
    async with (
        serving(LocalStore(tmp_path / "store"), tmp_path / "spool", truth=False) as served,
        served.client() as store,
    ):
        head, part = "networks/n/sessions/n-1/head.json", "networks/n/sessions/n-1/parts/a.safetensors"
        await store.put(part, b"part")
        for write in (
            store.put(head, b"x"), store.put_if_absent("registry/term.json", b"x"), store.delete(head),
            store.put("networks/n/sessions/n-1/manifests/1-a.json", b"x" * (CHUNK_BYTES + 1)),
        ):  # fmt: skip
            with pytest.raises(StoreError, match="written by the orchestrator alone"):
                await write
        assert [entry.key async for entry in store.list("")] == [part]


async def test_quotas(tmp_path: Path) -> None:
    """Each network has its own; blobs are nobody's. What is refused is a store that is full, and room can be made."""
    backing = LocalStore(tmp_path / "store")
    quotas = parse_quotas(["1m", "big=3m", "shared=2m"])
    async with serving(backing, tmp_path / "spool", quotas=quotas) as served, served.client() as store:
        await store.put("networks/a/x", bytes(600_000))
        with pytest.raises(StoreUnavailableError, match=r"network a may store 1048576 bytes: 600000 are stored"):
            await store.put("networks/a/y", bytes(600_000))
        await store.put("networks/b/y", bytes(600_000))
        await store.put("networks/big/y", bytes(2_000_000))
        await store.put("blobs/y", bytes(2_000_000))
        with pytest.raises(StoreUnavailableError, match="belongs to no network"):
            await store.put("blobs/z", bytes(100_000))
        await store.put("networks/a/small", b"1")
        await store.delete("networks/a/x")
        served.service._counted_at.clear()  # as after some seconds
        await store.put("networks/a/y", bytes(600_000))
        both = [store.put(f"networks/c/{n}", bytes([n]) * 600_000) for n in range(2)]
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(type(outcome) for outcome in outcomes if not isinstance(outcome, str)) == [
            StoreUnavailableError
        ], "what is on its way counts"


class Slow(LocalStore):
    """Notes how much is read that nobody has taken yet."""

    read = 0

    async def get_range(self, key: str, offset: int, size_bytes: int, *, etag: str = "") -> Piece:
        piece = await super().get_range(key, offset, size_bytes, etag=etag)
        self.read += len(piece.data)
        return piece


async def test_nothing_is_read_for_one_that_takes_nothing(tmp_path: Path) -> None:
    """Also a client that asks for far more than it takes costs bounded memory, and others get theirs meanwhile."""
    backing = Slow(tmp_path / "store")
    await backing.put("k", bytes(200 * MB))
    await backing.put("other", bytes(20 * MB))
    async with serving(backing, tmp_path / "spool") as served:
        greedy = ZmqBus("greedy")
        await greedy.start()
        try:
            service = PeerRef(SERVICE_ID, 0, [served.address])
            await greedy.ask(service, m.OpenStore("open"), timeout_s=5)
            greedy._dealer_ready = lambda dealer: None  # type: ignore[method-assign, assignment]
            for dealer in greedy._dealers.values():
                asyncio.get_running_loop().remove_reader(dealer.fd)
            for number in range(1500):
                greedy.send(service, m.StoreRead(f"r{number}", "k", number * CHUNK_BYTES, CHUNK_BYTES))
                for dealer in greedy._dealers.values():
                    dealer.outlet.push()
                if number % 50 == 0:
                    await asyncio.sleep(0.01)
            async with served.client() as store:
                assert len((await store.get("other")).data) == 20 * MB
            assert served.service.counters["refused_busy"] > 0
            assert backing.read <= 20 * MB + 40 * MB
        finally:
            greedy._end()


BAD = [
    m.StoreRead("1", "../etc/passwd", 0, 10), m.StoreRead("1", "k", -1, 10), m.StoreRead("1", "k", 0, 0),
    m.StoreRead("1", "k", 0, CHUNK_BYTES + 1), m.StoreRead("1", "k", 1 << 63, 10), m.StoreRead("1", "/", 0, 10),
    m.StoreHead("1", ".dcnr/locks/01"), m.StoreList("1", "../", "", 10), m.StoreList("1", "", "", 0),
    m.StoreDelete("1", "a/../../b"), m.StorePut("1", "/k", "put", "", digest_of(b"")),
    m.StorePut("1", "k", "put", "", "0" * 64), m.StorePut("1", "k", "twice", "", digest_of(b"data")),
    m.StoreBegin("1", "../../x", "k", 10), m.StoreBegin("1", "0" * 32, "..", 10), m.StoreBegin("1", "0" * 32, "k", 0),
    m.StoreBegin("1", "0" * 32, "k", 1 << 60), m.StoreAppend("1", "../../../tmp/x", 0), m.StoreAppend("1", "0" * 32, 9),
    m.StoreFinish("1", "0" * 32, "k", "put", "", 4, digest_of(b"data")), m.ListSessions("1"),
]  # fmt: skip


async def test_odd_questions_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async with serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served:
        bus = ZmqBus("odd")
        await bus.start()
        try:
            service = PeerRef(SERVICE_ID, 0, [served.address])
            for number, question in enumerate(BAD):
                question = type(question)(
                    *(f"q{number}" if name == "request_id" else getattr(question, name)
                      for name in question.__struct_fields__)
                )  # fmt: skip
                frames = [b"data"] if isinstance(question, m.StorePut | m.StoreAppend) else []
                with pytest.raises(RefusedError) as caught:
                    await bus.ask(service, question, frames, timeout_s=5)
                assert caught.value.code in ("bad-key", "failed", "no-transfer", "not-found", "not-here"), question
                assert "Traceback" not in str(caught.value)
        finally:
            await bus.close()
        async with served.client() as store:
            with pytest.raises(NotFoundError):
                await store.head("k")
            assert [entry.key async for entry in store.list("")] == []
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_large_object_that_is_not_what_was_said_is_not_stored(tmp_path: Path) -> None:
    async with serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served:
        bus = ZmqBus("odd")
        await bus.start()
        try:
            service = PeerRef(SERVICE_ID, 0, [served.address])
            name = "0" * 32
            for number, (size, digest) in enumerate(((4, digest_of(b"date")), (5, digest_of(b"data")))):
                await bus.ask(service, m.StoreBegin(f"b{number}", name, "k", 5), timeout_s=5)
                await bus.ask(service, m.StoreAppend(f"a{number}", name, 0), [b"data"], timeout_s=5)
                finish = m.StoreFinish(f"f{number}", name, "k", "put", "", size, digest)
                with pytest.raises(RefusedError, match=r"4 bytes with SHA-256 .* have come of k") as caught:
                    await bus.ask(service, finish, timeout_s=5)
                assert caught.value.code == "no-transfer"
        finally:
            await bus.close()
        async with served.client() as store:
            with pytest.raises(NotFoundError):
                await store.head("k")
    assert list((tmp_path / "spool").iterdir()) == []


async def test_urls(tmp_path: Path) -> None:
    for url in ("dcnr://", "dcnr://host", "dcnr://host:port", "dcnr://host:70000", "dcnr://h:1/path", "dcnr://u@h:1",
                "dcnr://h:1?x=1", "dcnr:host:1"):  # fmt: skip
        with pytest.raises(UsageError, match="dcnr://host:port"):
            open_store(url)
    async with serving(LocalStore(tmp_path / "store"), tmp_path / "spool") as served:
        url = served.address.replace("tcp", "dcnr")
        async with open_store(url) as store:
            assert store.url == url
            await store.probe()
            await store.put("k", b"1")
            assert (await store.get("k")).data == b"1"
