"""One suite for every store: the same calls, the same outcomes, the same errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import torch

from storage import Blobs, ConflictError, CorruptError, NotFoundError, PrefixStore, Store
from storage.checkpoints import Manifest, commit, load_part, read_head, save_part
from storage.keys import BadKeyError, session_prefix
from storage.retention import collect, delete_all, newest_complete, prune
from storage.store import digest_of

BAD_KEYS = [
    "", "/", "/etc/passwd", "../x", "a/../b", "a/..", "..", ".", "a//b", "a/", "a\0b", "A", "a b", "%2e%2e/x", "a\\b",
    "ａ", "а", "a\n", ".hidden", "a/.dcnr", "x" * 300, "a/" * 300 + "a", "con:1", "a..b", "a.",
]  # fmt: skip


async def keys_of(store: Store, prefix: str = "") -> list[str]:
    return [entry.key async for entry in store.list(prefix)]


async def test_probe_passes_and_leaves_nothing(store: Store) -> None:
    await store.probe()
    assert await keys_of(store) == []


async def test_put_get_replace(store: Store) -> None:
    first = await store.put("a/b.json", b"one")
    assert (await store.get("a/b.json")).data == b"one"
    assert (await store.get("a/b.json")).etag == first
    second = await store.put("a/b.json", memoryview(bytearray(b"two")))
    assert second != first
    assert (await store.get("a/b.json", sha256=digest_of(b"two"))).data == b"two"


@pytest.mark.parametrize("data", [b"", b"\0", bytes(range(256)) * 5000], ids=["empty", "nul", "1.3MB"])
async def test_any_bytes(store: Store, data: bytes) -> None:
    await store.put("k", data)
    assert (await store.get("k")).data == data
    assert b"".join([chunk async for chunk in store.get_stream("k", sha256=digest_of(data))]) == data
    entry = await store.head("k")
    assert (entry.key, entry.size_bytes) == ("k", len(data))
    assert entry.modified_s > 1e9


async def test_large_objects(store: Store) -> None:
    data = os.urandom(1 << 20) * 18 + b"tail"
    await store.put("large", data)
    stored = await store.get("large", sha256=digest_of(data))
    assert stored.data == data
    assert (await store.head("large")).etag == stored.etag


async def test_missing(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no/such") as caught:
        await store.get("no/such")
    assert caught.value.key.endswith("no/such")
    with pytest.raises(NotFoundError):
        await store.head("no/such")
    with pytest.raises(NotFoundError):
        [chunk async for chunk in store.get_stream("no/such")]
    await store.delete("no/such")
    await store.put("x/y/z", b"1")
    for folder in ("x", "x/y"):
        with pytest.raises(NotFoundError):
            await store.get(folder)
        await store.delete(folder)
    assert await keys_of(store) == ["x/y/z"]


async def test_wrong_digest_and_size(store: Store) -> None:
    await store.put("k", b"data")
    with pytest.raises(CorruptError, match="k is corrupt: 4 bytes"):
        await store.get("k", sha256="0" * 64)
    with pytest.raises(CorruptError):
        [chunk async for chunk in store.get_stream("k", sha256="0" * 64)]
    with pytest.raises(CorruptError, match="at most 3"):
        await store.get("k", max_bytes=3)


async def test_put_if_absent(store: Store) -> None:
    etag = await store.put_if_absent("k", b"one")
    with pytest.raises(ConflictError, match="exists"):
        await store.put_if_absent("k", b"two")
    with pytest.raises(ConflictError):
        await store.put_if_absent("k", b"one")
    assert (await store.get("k")).data == b"one"
    assert (await store.get("k")).etag == etag
    await store.delete("k")
    await store.put_if_absent("k", b"three")


async def test_put_if_match(store: Store) -> None:
    first = await store.put("k", b"one")
    second = await store.put_if_match("k", b"two", first)
    with pytest.raises(ConflictError):
        await store.put_if_match("k", b"three", first)
    assert (await store.get("k")).data == b"two"
    await store.delete("k")
    with pytest.raises(ConflictError):
        await store.put_if_match("k", b"four", second)
    with pytest.raises(NotFoundError):
        await store.get("k")


async def test_exactly_one_of_many_creates(store: Store) -> None:
    tries = [store.put_if_absent("round", f"writer {n}".encode()) for n in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    winners = [n for n, result in enumerate(results) if isinstance(result, str)]
    assert len(winners) == 1
    assert all(isinstance(result, str | ConflictError) for result in results)
    assert (await store.get("round")).data == f"writer {winners[0]}".encode()


async def test_a_counter_under_contention_loses_nothing(store: Store) -> None:
    await store.put("counter", b"0")

    async def add() -> None:
        for _ in range(200):
            stored = await store.get("counter")
            try:
                await store.put_if_match("counter", str(int(stored.data) + 1).encode(), stored.etag)
                return
            except ConflictError:
                await asyncio.sleep(0.001)
        raise AssertionError("never won")

    await asyncio.gather(*(add() for _ in range(10)))
    assert (await store.get("counter")).data == b"10"


async def test_list(store: Store) -> None:
    names = ["a", "a-b/x", "a.b", "ab/c", "b/1/2", "b/1/3", "b/10", "net/x", "net-2/x", "net_2/x"]
    names[0] = "a0"
    for name in names:
        await store.put(name, name.encode())
    assert await keys_of(store) == sorted(names)
    assert await keys_of(store, "b/1") == ["b/1/2", "b/1/3", "b/10"]
    assert await keys_of(store, "b/1/") == ["b/1/2", "b/1/3"]
    assert await keys_of(store, "net/") == ["net/x"]
    assert await keys_of(store, "zzz") == []
    assert await keys_of(store, "zzz/y/") == []
    entries = {entry.key: entry async for entry in store.list("b/")}
    assert entries["b/10"].size_bytes == 4
    assert entries["b/10"].etag == (await store.head("b/10")).etag


async def test_list_beyond_one_page(store: Store) -> None:
    async def some(start: int) -> None:
        for number in range(start, 1100, 10):
            await store.put(f"many/{number:04d}", b"")

    await asyncio.gather(*(some(start) for start in range(10)))
    assert await keys_of(store, "many/") == [f"many/{number:04d}" for number in range(1100)]


async def test_delete(store: Store) -> None:
    await store.put("a/b/c", b"1")
    await store.put("a/d", b"2")
    await store.delete("a/b/c")
    await store.delete("a/b/c")
    assert await keys_of(store) == ["a/d"]
    await store.put("a/b", b"an object where a folder was")
    assert await keys_of(store) == ["a/b", "a/d"]


async def chunks(data: bytes, size: int, fail: bool = False) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
    if fail:
        raise ValueError("the source broke off")


@pytest.mark.parametrize("size", [100, 17 << 20], ids=["small", "17MB"])
async def test_streams_and_files(store: Store, tmp_path: Path, size: int) -> None:
    data = (os.urandom(1 << 16) * (size // (1 << 16) + 1))[:size]
    await store.put_stream("s", chunks(data, 1 << 20), sha256=digest_of(data))
    assert (await store.get("s")).data == data
    path = tmp_path / "file"
    path.write_bytes(data)
    etag = await store.put_file("f", path)
    assert (await store.get("f", sha256=digest_of(data))).etag == etag


async def test_a_broken_stream_stores_nothing(store: Store) -> None:
    await store.put("old", b"old")
    with pytest.raises(ValueError, match="broke off"):
        await store.put_stream("old", chunks(b"new" * 1000, 100, fail=True))
    with pytest.raises(CorruptError):
        await store.put_stream("new", chunks(b"new", 1), sha256="0" * 64)
    assert (await store.get("old")).data == b"old"
    assert await keys_of(store) == ["old"]


@pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
async def test_bad_keys_reach_no_store(store: Store, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("it was opened")

    monkeypatch.setattr("storage.local.LocalStore._run", forbidden)
    monkeypatch.setattr("storage.s3.S3Store.client", forbidden)
    calls = [
        lambda: store.get(key), lambda: store.put(key, b""), lambda: store.put_if_absent(key, b""),
        lambda: store.put_if_match(key, b"", "e"), lambda: store.head(key), lambda: store.delete(key),
        lambda: store.put_file(key, Path("/nowhere")), lambda: store.put_stream(key, chunks(b"", 1)),
        lambda: anext(store.get_stream(key)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(BadKeyError):
            await call()
    if key not in ("", "a/", "a."):
        with pytest.raises(BadKeyError):
            await anext(store.list(key))


async def test_a_view_sees_its_own_folder_only(store: Store) -> None:
    await store.put("networks/a/x", b"a")
    await store.put("networks/ab/x", b"ab")
    view = PrefixStore(store, "networks/a/")
    assert await keys_of(view) == ["x"]
    assert await keys_of(view, "x") == ["x"]
    for key in ("../ab/x", "/networks/ab/x", "..", "b/../../ab/x"):
        with pytest.raises(BadKeyError):
            await view.get(key)
        with pytest.raises(BadKeyError):
            await anext(view.list(key))
    with pytest.raises(NotFoundError):
        await view.get("networks/ab/x")
    for folder in ("networks/a", "", "/", "../"):
        with pytest.raises(BadKeyError):
            PrefixStore(store, folder)


async def test_blobs(store: Store, tmp_path: Path) -> None:
    blobs = Blobs(store)
    digest = await blobs.put(b"hello")
    assert await blobs.put(b"hello") == digest == digest_of(b"hello")
    assert await blobs.get(digest) == b"hello"
    assert await blobs.has(digest)
    assert not await blobs.has("0" * 64)
    with pytest.raises(NotFoundError):
        await blobs.get("0" * 64)
    with pytest.raises(BadKeyError):
        await blobs.get("../../etc")
    path = tmp_path / "deep" / "copy"
    await blobs.fetch_to_file(digest, path)
    await blobs.fetch_to_file(digest, path)
    assert path.read_bytes() == b"hello"
    assert await blobs.put_file(path) == digest
    (tmp_path / "big").write_bytes(bytes(3 << 20))
    await blobs.fetch_to_file(await blobs.put_file(tmp_path / "big"), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == bytes(3 << 20)


async def test_a_damaged_blob_is_refused_and_mended(store: Store, tmp_path: Path) -> None:
    blobs = Blobs(store)
    digest = await blobs.put(b"hello")
    key = f"blobs/sha256/{digest[:2]}/{digest}"
    await store.put(key, b"hellx")
    with pytest.raises(CorruptError, match=digest):
        await blobs.get(digest)
    with pytest.raises(CorruptError):
        await blobs.fetch_to_file(digest, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    if (await store.head(key)).etag == digest_of(b"hellx"):  # a server's etags don't tell
        assert not await blobs.has(digest)
        (tmp_path / "y").write_bytes(b"hello")
        await blobs.put_file(tmp_path / "y")
        assert await blobs.get(digest) == b"hello"
    await store.put(key, b"hel")
    await blobs.put(b"hello")
    assert await blobs.get(digest) == b"hello"


async def test_collecting_blobs_spares_the_young_and_the_named(store: Store) -> None:
    blobs = Blobs(store)
    kept, lost = await blobs.put(b"kept"), await blobs.put(b"lost")
    now = (await store.head(f"blobs/sha256/{lost[:2]}/{lost}")).modified_s
    assert await blobs.collect([kept], now_s=now + 60, dry_run=False) == []
    assert await blobs.collect([kept], now_s=now + 7200, dry_run=False) == [], "a clock that is ahead made it old"
    assert len(await blobs.collect([kept], now_s=now + 7200, dry_run=True, grace_s=-1)) == 1
    assert await blobs.has(lost)
    assert len(await blobs.collect([kept], now_s=now + 7200, dry_run=False, grace_s=-1)) == 1
    assert (await blobs.has(kept), await blobs.has(lost)) == (True, False)
    assert await keys_of(store, "probe-") == []


async def test_checkpoints_from_first_to_last(store: Store) -> None:
    prefix = session_prefix("net", "net-1")
    head = None
    for step in (1, 2, 3):
        part = await save_part(store, prefix, "fc", {"param.weight": torch.full((3,), float(step))})
        manifest = Manifest(
            session="net-1", network="net", network_digest="0" * 64, step=step, parts=[part],
            parent=head.manifest_key if head else "",
        )  # fmt: skip
        head = await commit(store, prefix, manifest, head)
    assert await read_head(store, prefix) == head
    resume = await newest_complete(store, prefix)
    assert resume.manifest is not None
    assert (resume.manifest.step, resume.problems) == (3, [])
    state = await load_part(store, prefix, resume.manifest.parts[0])
    assert state["param.weight"].tolist() == [3, 3, 3]
    assert len(await prune(store, prefix, 1)) == 4
    assert await collect(store, prefix, dry_run=False) == []
    assert len(await keys_of(store, prefix)) == 3
    await delete_all(store, prefix)
    assert await keys_of(store, prefix) == []
