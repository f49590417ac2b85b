"""What is damaged on its way is read again; what is damaged where it lies is believed, by every reader alike."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.placing import damaged_parts
from orchestrator.truth import Truth
from pnode.fetch import Fetch
from pnode.memory import CutMemory
from storage import Blobs, CorruptError, Store, Stored, StoreUnavailableError, reread
from storage.blobs import blob_key
from storage.checkpoints import commit, load_part, read_head, read_manifest, save_part
from storage.keys import head_key
from storage.local import LocalStore
from storage.reread import READS, SAME, read_again
from storage.retention import newest_complete, prune
from storage.sealed import seal
from storage.store import check_sha256, digest_of
from storage.terms import read_term
from storage.transfer import check_verified
from tests.unit.storage.operations import PREFIX, SESSION, VNODES, manifest_of, save, session_record
from wire.messages import Part


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reread, "FIRST_PAUSE_S", 0.0001)


class Line:
    """Reads of one object `whole`: what comes is `bodies`, one after another, the last one for ever."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = list(bodies)
        self.reads = 0

    async def read(self) -> bytes:
        body = self.bodies[min(self.reads, len(self.bodies) - 1)]
        self.reads += 1
        check_sha256("k", "here", digest_of(body), digest_of(b"whole"), len(body))
        return body


@pytest.mark.parametrize("damaged", [0, 1, 2, 5, READS - 1])
async def test_the_first_whole_read_counts(damaged: int) -> None:
    line = Line(*[b"whol%d" % number for number in range(damaged)], b"whole")
    assert await read_again(line.read) == b"whole"
    assert line.reads == damaged + 1


async def test_the_same_damage_again_is_believed() -> None:
    line = Line(b"whale")
    with pytest.raises(CorruptError, match="k is corrupt"):
        await read_again(line.read)
    assert line.reads == SAME


async def test_the_same_damage_has_to_come_in_a_row() -> None:
    line = Line(b"whale", b"whale", b"while", b"whale", b"whale", b"whole")
    assert await read_again(line.read) == b"whole"


async def test_damage_that_is_another_each_time_says_nothing_about_the_object() -> None:
    line = Line(*[b"whol%d" % number for number in range(2 * READS)])
    with pytest.raises(StoreUnavailableError, match=f"each of {READS} reads was damaged") as caught:
        await read_again(line.read)
    assert line.reads == READS
    assert caught.value.key == "k"


async def test_what_a_store_read_again_itself_is_not_read_again() -> None:
    reads = 0

    async def read() -> None:
        nonlocal reads
        reads += 1
        error = CorruptError("k is corrupt", key="k")
        error.settled = True
        raise error

    with pytest.raises(CorruptError):
        await read_again(read)
    assert reads == 1


async def test_other_errors_are_raised_at_once() -> None:
    async def read() -> None:
        raise StoreUnavailableError("away")

    with pytest.raises(StoreUnavailableError, match="away"):
        await read_again(read)


# ------------------------------------------------------------------------------------------------ all readers


class Spoiling:
    """A store behind a bad line: of each object the first `times` reads come with a wrong bit, or cut short."""

    def __init__(self, store: Store, times: int) -> None:
        self._store = store
        self._times = times
        self._random = random.Random(7)
        self._reads: dict[str, int] = {}
        self.spoilt = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _spoil(self, key: str, data: bytes) -> bytes:
        self._reads[key] = self._reads.get(key, 0) + 1
        if self._reads[key] > self._times:
            return data
        self.spoilt += 1
        if self._reads[key] % 2:
            return data[: self._random.randrange(len(data))]
        changed = bytearray(data)
        changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = 1 << 30) -> Stored:
        stored = await self._store.get(key, max_bytes=max_bytes)
        data = self._spoil(key, stored.data)
        check_sha256(key, "here", digest_of(data), sha256, len(data))
        return Stored(data, stored.etag)

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        data = self._spoil(key, (await self._store.get(key)).data)
        yield data[:10]
        yield data[10:]
        check_sha256(key, "here", digest_of(data), sha256, len(data))


async def part_of(store: Store) -> Part:
    from torch import ones

    return await save_part(store, PREFIX, "fc", {"param.weight": ones(3)})


async def _newest(store: Store, folder: Path) -> object:
    resume = await newest_complete(store, PREFIX, verify=True)
    assert resume.manifest is not None
    assert resume.problems == []
    return resume.manifest.step


async def _head(store: Store, folder: Path) -> object:
    head = await read_head(store, PREFIX)
    assert head is not None
    return head.step


async def _manifest(store: Store, folder: Path) -> object:
    head = await read_head(LocalStore(folder / "store"), PREFIX)
    assert head is not None
    return (await read_manifest(store, PREFIX, head.manifest_key, head.manifest_digest)).step


async def _committing(store: Store, folder: Path) -> object:
    """A commit whose answer is lost is read back."""
    head = await read_head(store, PREFIX)
    assert head is not None
    parts = [Part(vnode, digest_of(f"{vnode} after 20; ".encode() * 40), 0) for vnode in VNODES]
    parts = [Part(one.vnode, one.digest, (await store.head(f"{PREFIX}parts/{one.digest}.safetensors")).size_bytes)
             for one in parts]  # fmt: skip
    stale = manifest_of(30, parts, None)
    inner = LocalStore(folder / "store")
    await inner.delete(head_key(PREFIX))
    made = await commit(inner, PREFIX, stale, None)
    again = await commit(store, PREFIX, stale, None)
    assert again == made
    return 20


async def _pruned(store: Store, folder: Path) -> object:
    await prune(store, PREFIX, 1)
    return len([entry async for entry in store.list(f"{PREFIX}manifests/")]) * 20


async def _term(store: Store, folder: Path) -> object:
    record = await read_term(store)
    assert record is not None
    return record.term * 20


async def _records(store: Store, folder: Path) -> object:
    (record,) = await Truth(store).sessions()
    return record.epoch * 20


async def _raised(store: Store, folder: Path) -> object:
    truth = Truth(store)
    term = await truth.raise_term()
    await truth.sessions()
    await truth.put_session(SESSION, seal(session_record("paused", 2)))
    await truth.still_mine()
    return term.term * 10


async def _blob(store: Store, folder: Path) -> object:
    assert await Blobs(store).get(digest_of(b"a network")) == b"a network"
    await Blobs(store).fetch_to_file(digest_of(b"a network"), folder / "blob")
    return 20 if (folder / "blob").read_bytes() == b"a network" else 0


async def _part(store: Store, folder: Path) -> object:
    part = await part_of(LocalStore(folder / "store"))
    await check_verified(store, f"{PREFIX}parts/{part.digest}.safetensors", part.digest)
    return 20 * (await load_part(store, PREFIX, part))["param.weight"][0].item()


async def _fetched(store: Store, folder: Path) -> object:
    """As a PNode gets what it deploys."""
    part = await part_of(LocalStore(folder / "store"))
    fetch = Fetch(store, lambda: 0.0, 0.0)
    head = await read_head(store, PREFIX)
    assert head is not None
    manifest = await fetch.manifest(PREFIX, head.manifest_key, head.manifest_digest)
    assert await fetch.blob(digest_of(b"a network"), 100) == b"a network"
    state = await fetch.state(PREFIX, 20, part, CutMemory())
    return manifest.step * int(state["param.weight"][0])


async def _damaged(store: Store, folder: Path) -> object:
    resume = await newest_complete(LocalStore(folder / "store"), PREFIX)
    assert resume.manifest is not None
    assert await damaged_parts(store, PREFIX, resume.manifest) == []
    return 20


READERS: list[Callable[[Store, Path], Awaitable[object]]] = [
    _newest, _head, _manifest, _committing, _pruned, _term, _records, _raised, _blob, _part, _fetched, _damaged,
]  # fmt: skip


@pytest.mark.parametrize("times", [1, 2, 6])
@pytest.mark.parametrize("reader", READERS)
async def test_no_reader_believes_damage_on_the_way(
    tmp_path: Path, reader: Callable[[Store, Path], Awaitable[object]], times: int
) -> None:
    inner = LocalStore(tmp_path / "store")
    truth = Truth(inner)
    await truth.raise_term()
    await truth.put_session(SESSION, seal(session_record("running", 1)))
    await Blobs(inner).put(b"a network")
    for step in (10, 20):
        await save(inner, step)
    spoiling = Spoiling(inner, times)
    assert await reader(spoiling, tmp_path) == 20  # type: ignore[arg-type]
    assert spoiling.spoilt >= times


async def test_a_blob_that_is_damaged_where_it_lies(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    digest = await Blobs(store).put(b"a network")
    await store.put(blob_key(digest), b"another one")
    with pytest.raises(CorruptError, match=digest):
        await Blobs(store).get(digest)
