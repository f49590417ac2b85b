"""A store in a folder of this machine.

- An object is the file of its key below `root`; its etag is its SHA-256.
- A write goes to a temporary file, is synced, and is renamed into place; then the folder is synced. So a crash leaves
  the old bytes or the new ones, and what was reported as written is on the disk.
- All changes of a key happen under a file lock (one of 64, by the key's digest) that any process on this root takes, so
  the conditional writes hold across processes; a lock of a dead process is free.
- Everything of the store itself lives in `root/.dcnr/`, which no key can name. No symbolic link below root is followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, TypeVar

from storage.keys import check_key, check_prefix
from storage.store import (
    CHUNK_BYTES,
    MAX_GET_BYTES,
    Buffer,
    ConflictError,
    CorruptError,
    Entry,
    NotFoundError,
    Stored,
    StoreError,
    StoreUnavailableError,
    check_sha256,
    digest_of,
    too_large,
)

LOCKS = 64
LOCK_TIMEOUT_S = 30.0
STALE_S = 3600.0
MAX_ETAGS = 10_000
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}

T = TypeVar("T")


class _Version(NamedTuple):
    """What changes whenever a file is replaced: `head` and `list` need not read a version again for its digest."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Version:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class LocalStore:
    """See the module's docstring. `root` is created if it isn't there."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))
        self._own = self._root / ".dcnr"
        self._ready = False
        self._etags: dict[_Version, str] = {}

    @property
    def url(self) -> str:
        """file:// and the root."""
        return self._root.as_uri()

    async def probe(self) -> None:
        """Write, read and delete an object. Raises StoreUnavailableError."""
        key = f"probe-{uuid.uuid4().hex}"
        etag = await self.put_if_absent(key, b"probe")
        try:
            if (await self.get(key)).etag != etag:
                raise StoreUnavailableError(f"{self.url}: reads back other bytes than were written", key=key)
        finally:
            await self.delete(key)

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        check_key(key)
        stored = await self._run(key, lambda: self._read(key, max_bytes))
        check_sha256(key, self.url, stored.etag, sha256, len(stored.data))
        return stored

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        """See Store."""
        check_key(key)
        file = await self._run(key, lambda: self._open(key))
        try:
            digest, size = hashlib.sha256(), 0
            while chunk := await self._run(key, lambda: file.read(CHUNK_BYTES)):
                digest.update(chunk)
                size += len(chunk)
                yield chunk
            check_sha256(key, self.url, digest.hexdigest(), sha256, size)
        finally:
            file.close()

    async def put(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        return await self._run(key, lambda: self._write(key, data, self._replace))

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        return await self._run(key, lambda: self._write(key, data, self._create))

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        check_key(key)

        def swap(key: str, temporary: Path) -> None:
            try:
                found = self._read(key, MAX_GET_BYTES).etag
            except (FileNotFoundError, NotADirectoryError):
                found = ""
            if not found or found != etag:
                raise ConflictError(
                    f"{self.url}: {key} is {found[:16] or 'gone'}, no longer the {etag[:16]} that was read before",
                    key=key,
                    hint="somebody else wrote it in the meantime; read it again",
                )
            self._replace(key, temporary)

        return await self._run(key, lambda: self._write(key, data, swap))

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store."""
        check_key(key)
        temporary = await self._run(key, self._new_temporary)
        file = await self._run(key, lambda: temporary.open("xb"))
        try:
            digest, size = hashlib.sha256(), 0
            async for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                await self._run(key, functools.partial(file.write, chunk))
            check_sha256(key, "the stream to store", digest.hexdigest(), sha256, size)
            await self._run(key, lambda: self._install(key, file, temporary, self._replace))
            return digest.hexdigest()
        finally:
            file.close()
            temporary.unlink(missing_ok=True)

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        return await self.put_stream(key, file_chunks(path))

    async def head(self, key: str) -> Entry:
        """See Store."""
        check_key(key)
        return await self._run(key, lambda: self._entry(key))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """See Store."""
        check_prefix(prefix)
        for key in await self._run(prefix, lambda: sorted(self._walk(prefix))):
            with contextlib.suppress(NotFoundError):
                yield await self._run(key, functools.partial(self._entry, key))

    async def delete(self, key: str) -> None:
        """See Store."""
        check_key(key)
        await self._run(key, lambda: self._remove(key))

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, key: str, work: Callable[[], T]) -> T:
        """`work` in a thread, with the system's errors turned into ours."""

        def guarded() -> T:
            try:
                return work()
            except OSError as error:
                raise self._explain(key, error) from error

        return await asyncio.to_thread(guarded)

    def _explain(self, key: str, error: OSError) -> StoreError:
        text = f"{self.url}: {key or 'the folder'}: {error.strerror or error}"
        if error.errno in _FULL:
            free = os.statvfs(self._root).f_bavail * os.statvfs(self._root).f_frsize if self._root.exists() else 0
            return StoreUnavailableError(f"{text}; {free} bytes are free", key=key, hint="make room, or use `dcnr gc`")
        if error.errno in _FORBIDDEN:
            return StoreUnavailableError(f"{text}", key=key, hint="the folder must be writable by this user")
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{self.url}: there is no {key}", key=key)
        if isinstance(error, NotADirectoryError | IsADirectoryError):
            return StoreError(f"{text}: one key can't be both an object and the folder of others", key=key)
        if error.errno == errno.ELOOP:
            return CorruptError(f"{self.url}: {key} is or passes through a symbolic link", key=key, hint="remove it")
        return StoreUnavailableError(text, key=key, hint="check the disk")

    def _path(self, key: str) -> Path:
        path = self._root.joinpath(*key.split("/"))
        folder = path.parent
        if (
            folder != self._root
            and folder.exists()
            and Path(os.path.realpath(folder)) != (Path(os.path.realpath(self._root)).joinpath(*key.split("/")[:-1]))
        ):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return path

    def _open(self, key: str) -> BufferedReader:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path(key), flags)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            if stat.S_ISDIR(mode):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            raise CorruptError(f"{self.url}: {key} is not a regular file", key=key, hint="remove it")
        return os.fdopen(descriptor, "rb")

    def _read(self, key: str, max_bytes: int) -> Stored:
        with self._open(key) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise too_large(key, self.url, size, max_bytes)
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise too_large(key, self.url, len(data), max_bytes)
        return Stored(data, digest_of(data))

    def _entry(self, key: str) -> Entry:
        with self._open(key) as file:
            status = os.fstat(file.fileno())
            version = _Version.of(status)
            etag = self._etags.get(version)
            if etag is None:
                etag = self._remember(version, hashlib.file_digest(file, "sha256").hexdigest())
        return Entry(key, status.st_size, etag, status.st_mtime)

    def _remember(self, version: _Version, etag: str) -> str:
        if len(self._etags) >= MAX_ETAGS:
            self._etags.clear()
        self._etags[version] = etag
        return etag

    def _walk(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        start = self._root / folder
        for place, folders, files in os.walk(start):
            inside = Path(place).relative_to(self._root).as_posix()
            base = "" if inside == "." else inside + "/"
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if (base + name).startswith(prefix) and not name.startswith("."):
                    with contextlib.suppress(Exception):
                        yield check_key(base + name)

    def _write(self, key: str, data: Buffer, install: Callable[[str, Path], None]) -> str:
        temporary = self._new_temporary()
        try:
            etag = digest_of(data)
            with open(temporary, "xb") as file:
                file.write(data)
                self._install(key, file, temporary, install)
                self._remember(_Version.of(os.fstat(file.fileno())), etag)
        finally:
            temporary.unlink(missing_ok=True)
        return etag

    def _install(self, key: str, file: BinaryIO, temporary: Path, install: Callable[[str, Path], None]) -> None:
        file.flush()
        os.fsync(file.fileno())
        with self._locked(key):
            install(key, temporary)

    def _replace(self, key: str, temporary: Path) -> None:
        self._place(key, lambda path: os.replace(temporary, path))

    def _create(self, key: str, temporary: Path) -> None:
        try:
            self._place(key, lambda path: os.link(temporary, path, follow_symlinks=False))
        except FileExistsError as error:
            if self._path(key).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
            raise ConflictError(
                f"{self.url}: {key} exists already", key=key, hint="somebody else wrote it first; read it"
            ) from error

    def _place(self, key: str, move: Callable[[Path], None]) -> None:
        """Make the folders, `move`, and sync; once more if a delete removed an empty folder in between."""
        for attempt in range(5):
            path = self._path(key)
            try:
                new = [folder for folder in path.parents if folder.is_relative_to(self._root) and not folder.exists()]
                _make_folder(path.parent)
                move(path)
                for folder in {path.parent, *(folder.parent for folder in new)}:
                    _sync_folder(folder)
                return
            except FileNotFoundError:
                if attempt == 4:
                    raise

    def _remove(self, key: str) -> None:
        self._prepare()
        with self._locked(key):
            path = self._path(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            except IsADirectoryError:
                return
            except PermissionError:
                if path.is_dir():
                    return
                raise
            _sync_folder(path.parent)
            for folder in path.parents:
                if folder == self._root:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    def _prepare(self) -> None:
        if self._ready:
            return
        (self._own / "temporary").mkdir(parents=True, exist_ok=True)
        (self._own / "locks").mkdir(exist_ok=True)
        for left in (self._own / "temporary").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink()
        self._ready = True

    def _new_temporary(self) -> Path:
        self._prepare()
        return self._own / "temporary" / uuid.uuid4().hex

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        number = hashlib.sha256(key.encode()).digest()[0] % LOCKS
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with open(self._own / "locks" / f"{number:02d}", "ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise StoreUnavailableError(
                            f"{self.url}: {key}: another process has held lock {number:02d} for {LOCK_TIMEOUT_S:.0f} s",
                            key=key, hint="look for a stopped dcnr process",
                        ) from error  # fmt: skip
                    time.sleep(0.002)
            yield


async def file_chunks(path: Path) -> AsyncGenerator[bytes, None]:
    """A local file in chunks."""
    with await asyncio.to_thread(open, path, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
