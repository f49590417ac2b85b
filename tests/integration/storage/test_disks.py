"""Real disks that are full, out of files, or read-only: a clear error, the last good state, and on when mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from storage import Blobs, CorruptError, StoreUnavailableError, open_store
from storage.keys import blob_key
from storage.local import LocalStore
from storage.retention import prune
from storage.store import digest_of
from tests.unit.storage.operations import OPERATIONS, PREFIX, finish, judge, keys_of, load, save

PAGE = 4096
SIZE = 256 * PAGE


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "dcnr-test", str(folder)], check=True, capture_output=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True, capture_output=True)


@pytest.fixture(params=[f"size={SIZE}"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of 1 MiB, made and removed by the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount(folder, request.param)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Take all room but `leave` bytes."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    status = os.statvfs(disk)
    size = status.f_bavail * status.f_frsize - leave
    with open(filler, "wb") as file:
        file.write(bytes(max(size, 0)))
    return filler


async def test_a_full_disk_keeps_the_last_state_and_goes_on_when_there_is_room(disk: Path) -> None:
    store = LocalStore(disk / "store")
    await save(store, 10)
    filler = fill(disk)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match=r"No space left on device; 0 bytes are free") as caught:
            await save(store, 20)
        assert str(disk / "store") in str(caught.value)
        assert "make room" in caught.value.hint
        assert caught.value.exit_code == 69
        assert await load(store) == 10
        assert list((disk / "store/.dcnr/temporary").iterdir()) == []
    filler.unlink()
    await save(store, 20)
    assert await load(store) == 20


@pytest.mark.parametrize("name", ["save", "publish", "register a network", "advance a record"])
async def test_room_runs_out_at_every_place(disk: Path, name: str) -> None:
    """Page by page: whatever the write was that found no room, it is the old state or the new one."""
    operation, done, pages = OPERATIONS[name], False, 0
    found = set()
    while not done:
        store = LocalStore(disk / f"store-{pages}")
        await operation.before(store)
        await store.put("first", b"the folders are there")
        filler = fill(disk, leave=pages * PAGE)
        try:
            await operation.run(store)
            done = True
        except StoreUnavailableError:
            pass
        found.add(await judge(operation, store, done=done))
        filler.unlink()
        await finish(operation, store)
        shutil.rmtree(disk / f"store-{pages}")
        pages += 1
    assert pages > 1
    assert found == {operation.old, operation.new}


async def test_old_checkpoints_can_be_deleted_on_a_full_disk(disk: Path) -> None:
    store = LocalStore(disk / "store")
    for step in (10, 20, 30):
        await save(store, step)
    fill(disk)
    assert await prune(LocalStore(disk / "store"), PREFIX, 1)
    assert await load(store) == 30
    await save(store, 40)


@pytest.mark.parametrize("disk", ["size=64m,nr_inodes=40"], indirect=True)
async def test_a_disk_without_files_left_says_that(disk: Path) -> None:
    store = LocalStore(disk / "store")

    async def put_many() -> None:
        for number in range(100):
            await store.put(f"a/{number}", b"")

    with pytest.raises(StoreUnavailableError, match="no more files are allowed"):
        await put_many()
    await store.delete("a/1")
    await store.delete("a/2")
    await store.put("b", b"")


async def test_large_objects_and_files_leave_nothing_behind(disk: Path, tmp_path: Path) -> None:
    store = LocalStore(disk / "store")
    await store.put("k", b"old")
    (tmp_path / "large").write_bytes(bytes(2 * SIZE))

    async def chunks() -> AsyncGenerator[bytes, None]:
        for _ in range(200):
            yield bytes(20_000)

    for write in (
        store.put("k", bytes(20 << 20)),
        store.put_file("k", tmp_path / "large"),
        store.put_stream("k", chunks()),
    ):
        with pytest.raises(StoreUnavailableError, match="No space left"):
            await write
        assert list((disk / "store/.dcnr/temporary").iterdir()) == []
    assert (await store.get("k")).data == b"old"


async def test_a_blob_fetched_to_a_full_disk(disk: Path, tmp_path: Path) -> None:
    """The disk of a PNode's home: the error names its path, not the store."""
    blobs = Blobs(LocalStore(tmp_path / "store"))
    data = os.urandom(SIZE // 2)
    digest = await blobs.put(data)
    filler = fill(disk, leave=10 * PAGE)
    target = disk / "home" / digest
    with pytest.raises(StoreUnavailableError, match=r"No space left on device; \d+ bytes are free") as caught:
        await blobs.fetch_to_file(digest, target)
    assert str(caught.value).startswith(str(target))
    assert list((disk / "home").iterdir()) == []
    filler.unlink()
    await blobs.fetch_to_file(digest, target)
    assert target.read_bytes() == data
    bad = await blobs.put(b"bad")
    (tmp_path / "store" / blob_key(bad)).write_bytes(b"bat")
    with pytest.raises(CorruptError):
        await blobs.fetch_to_file(bad, disk / "home" / bad)
    assert [path.name for path in (disk / "home").iterdir()] == [digest]


async def test_a_stream_to_s3_is_gathered_on_a_full_disk(
    disk: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for _ in range(200):
            yield bytes(20_000)

    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    filler = fill(disk, leave=4 * PAGE)
    async with open_store(s3_url) as store:
        with pytest.raises(StoreUnavailableError, match="No space left") as caught:
            await store.put_stream("k", chunks())
        assert str(disk) in str(caught.value)
        assert "TMPDIR" in caught.value.hint
        filler.unlink()
        await store.put_stream("k", (piece async for piece in _twenty()), sha256=digest_of(bytes(20_000)))
    assert os.listdir(disk) == []


async def _twenty() -> AsyncGenerator[bytes, None]:
    yield bytes(20_000)


async def test_a_read_only_disk_can_be_read_and_says_what_is_wrong(disk: Path) -> None:
    store = LocalStore(disk / "store")
    await save(store, 10)
    remount(disk, "ro")
    key = (await keys_of(store))[0]
    for attempt in (save(store, 20), store.delete(key), save(LocalStore(disk / "store"), 20)):
        with pytest.raises(StoreUnavailableError, match="Read-only file system") as caught:
            await attempt
        assert "mounted read-only" in caught.value.hint
        assert str(disk / "store") in str(caught.value)
    assert await load(LocalStore(disk / "store")) == 10
    with pytest.raises(StoreUnavailableError, match="Read-only file system"):
        await store.probe()
    remount(disk, "rw")
    await save(store, 20)
    assert await load(store) == 20


STRANGER = """
import asyncio, os, sys
from storage import StoreUnavailableError, open_store
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    try:
        await open_store(sys.argv[1]).put("k", b"")
    except StoreUnavailableError as error:
        print(error)
asyncio.run(main())
"""


def test_a_folder_of_somebody_else() -> None:
    """Rights don't bind root, so another user tries."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, folder], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert f"{folder}: write k: Permission denied" in done.stdout
    assert "must be writable by user" in done.stdout
