"""The store on local disk: writers in many processes, kill -9, full and read-only disks, strange files."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage import Blobs, ConflictError, CorruptError, NotFoundError, StoreError, StoreUnavailableError, open_store
from storage.local import LocalStore
from storage.local_files import discard
from storage.store import digest_of
from storage.temporary import new_temporary, sweep


def _add(root: str, times: int) -> None:
    async def run() -> None:
        store = LocalStore(Path(root))
        for _ in range(times):
            while True:
                stored = await store.get("counter")
                try:
                    await store.put_if_match("counter", str(int(stored.data) + 1).encode(), stored.etag)
                    break
                except ConflictError:
                    continue

    asyncio.run(run())


def _create(root: str, name: str) -> None:
    async def run() -> None:
        store = LocalStore(Path(root))
        for number in range(30):
            try:
                await store.put_if_absent(f"round/{number}", name.encode())
            except ConflictError:
                continue
            await store.put_if_absent(f"won/{number}-{name}", b"")

    asyncio.run(run())


def _all(target: object, arguments: list[tuple[object, ...]]) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=given) for given in arguments]  # type: ignore[arg-type]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


async def test_conditional_writes_hold_across_processes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("counter", b"0")
    _all(_add, [(str(tmp_path), 25)] * 3)
    assert (await store.get("counter")).data == b"75"
    _all(_create, [(str(tmp_path), name) for name in ("a", "b", "c")])
    winners = [entry.key async for entry in store.list("won/")]
    assert len(winners) == 30


WRITER = """
import asyncio, sys
from pathlib import Path
from storage.local import LocalStore
async def run():
    store = LocalStore(Path(sys.argv[1]))
    print("ready", flush=True)
    n = 0
    while True:
        n = (n + 1) % 256
        await store.put("k", bytes([n]) * 2_000_000)
asyncio.run(run())
"""


def _write_until_killed(root: str, after_s: float) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, root], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)


async def test_kill_9_in_a_write_leaves_old_or_new(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("k", b"\0" * 2_000_000)
    for attempt in range(6):
        _write_until_killed(str(tmp_path), 0.01 + 0.013 * attempt)
        data = (await store.get("k")).data
        assert data == data[:1] * 2_000_000
        assert [entry.key async for entry in store.list("")] == ["k"]
    assert isinstance(await store.put("k", b"the lock of a dead process is free"), str)


async def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    """Whatever the clocks say: a file is left alone as long as somebody writes it."""
    store = LocalStore(tmp_path)
    await store.put("k", b"")
    folder = tmp_path / ".dcnr/temporary"
    dead = folder / f"tmp-{'0' * 32}"
    dead.write_bytes(b"x")
    path, file = new_temporary(folder)
    os.utime(path, (0, 0))
    await LocalStore(tmp_path).put("k", b"")
    assert (dead.exists(), path.exists()) == (False, True)
    file.close()
    await LocalStore(tmp_path).put("k", b"")
    assert not path.exists()


async def test_what_killed_writers_leave_is_gone_at_the_next_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for _ in range(3):
        _write_until_killed(str(tmp_path / "store"), 0.02)
    await LocalStore(tmp_path / "store").put("other", b"")
    assert list((tmp_path / "store/.dcnr/temporary").iterdir()) == []
    digest = await Blobs(store).put(b"blob")
    left = tmp_path / "blobs" / f".tmp-{'a' * 32}"
    left.parent.mkdir()
    left.write_bytes(b"half of a blob")
    await Blobs(store).fetch_to_file(digest, tmp_path / "blobs" / digest)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [digest]


async def test_a_sweep_and_many_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A sweep may take the lock between the making of a file and its locking: the writer then makes another."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    stop = False

    def sweeping() -> None:
        while not stop:
            sweep(folder)

    sweeper = asyncio.ensure_future(asyncio.to_thread(sweeping))
    for _ in range(500):
        path, file = await asyncio.to_thread(new_temporary, folder)
        assert path.exists()
        discard(path, file)
    stop = True
    await sweeper
    assert list(folder.iterdir()) == []


async def test_a_disk_that_hangs_is_an_error_and_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, stall_s=0.3)
    await store.put("k", b"old")
    release = threading.Event()
    real = os.fsync

    def hangs(descriptor: int) -> None:
        release.wait(20)
        real(descriptor)

    monkeypatch.setattr("storage.local_files.os.fsync", hangs)
    with pytest.raises(StoreUnavailableError, match=r"write k: the disk has not answered for 0\.3 s") as caught:
        await store.put("k", b"new")
    assert "may or may not happen" in str(caught.value)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 10) == 1
    assert (await store.get("k")).data == b"old"
    release.set()
    monkeypatch.undo()
    await store.put("k", b"newest")
    assert (await store.get("k")).data in (b"newest", b"new")


async def test_a_folder_that_can_not_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an orchestrator would find no sessions, and collect what they stored."""
    store = LocalStore(tmp_path)
    await store.put("a/b", b"1")
    real = os.scandir

    def broken(path: str) -> object:
        if str(path).endswith("/a"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr("os.scandir", broken)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        [entry async for entry in store.list("")]


async def test_a_store_whose_folder_vanished_says_so(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    await store.put("k", b"1")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError, match="own folder is gone") as caught:
        await store.put("k", b"2")
    assert "unmounted" in caught.value.hint
    with pytest.raises(NotFoundError):
        await LocalStore(tmp_path / "fresh").get("k")
    for mounted in (False, True):  # an unmounted disk leaves an empty folder
        if mounted:
            (tmp_path / "store").mkdir()
        with pytest.raises(StoreUnavailableError, match="own folder is gone"):
            await store.get("k")
        with pytest.raises(StoreUnavailableError, match="own folder is gone"):
            await store.head("k")
        with pytest.raises(StoreUnavailableError, match="own folder is gone"):
            [entry async for entry in store.list("")]
    (tmp_path / "store").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    await store.put("k", b"3")
    assert (await store.get("k")).data == b"3"


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    await store.put("a/k", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("storage.local_files.os.fsync", full)
    with pytest.raises(
        StoreUnavailableError, match=r"write a/k: No space left on device; \d+ bytes are free"
    ) as caught:
        await store.put("a/k", b"new")
    assert caught.value.exit_code == 69
    monkeypatch.undo()
    assert (await store.get("a/k")).data == b"old"
    assert list((tmp_path / ".dcnr/temporary").iterdir()) == []


async def test_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("storage.local_files.Path.mkdir", read_only)
    with pytest.raises(StoreUnavailableError, match="mounted read-only"):
        await LocalStore(tmp_path / "new").put("k", b"")
    with pytest.raises(StoreUnavailableError, match="mounted read-only"):
        await LocalStore(tmp_path / "new").probe()


async def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = LocalStore(root)
    await store.put("a/x", b"1")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (root / "link").symlink_to(secret)
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    async with asyncio.timeout(5):
        for key in ("link", "folder/secret", "pipe"):
            with pytest.raises(CorruptError, match=key):
                await store.get(key)
    with pytest.raises(CorruptError):
        await store.put("folder/new", b"x")
    assert not (tmp_path / "new").exists()
    await store.put("link", b"replaced")
    assert secret.read_text() == "secret"


async def test_strange_files_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("a/x", b"1")
    (tmp_path / "Capital").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "a" / "with space").write_text("x")
    assert [entry.key async for entry in store.list("")] == ["a/x"]


async def test_one_key_can_not_be_object_and_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("a", b"1")
    with pytest.raises(StoreError, match="both an object and the folder"):
        await store.put("a/b", b"2")
    with pytest.raises(NotFoundError):
        await store.head("a/b")
    await store.delete("a/b")
    await store.put("c/d", b"1")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match="both an object and the folder"):
            await write("c", b"2")
        with pytest.raises(StoreError, match="both an object and the folder"):
            await write("a/b", b"2")
    assert (await store.get("a")).data == b"1"


async def test_damage_on_the_disk_is_seen_by_a_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("k", b"hello")
    (tmp_path / "k").write_bytes(b"hellx")
    with pytest.raises(CorruptError):
        await store.get("k", sha256=digest_of(b"hello"))


async def test_a_store_that_is_a_link_itself_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = open_store(f"file://{tmp_path}/link")
    await store.put("a/b", b"1")
    assert (await store.get("a/b")).data == b"1"
    assert store.url == f"file://{tmp_path}/link"
