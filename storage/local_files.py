"""The files behind a store in a folder: where a key's bytes are, and how they change. Everything here may block.

- A write goes to a temporary file, is synced, and is renamed into place; then the folder is synced. So a crash leaves
  the old bytes or the new ones, and what was reported as written is on the disk.
- All changes of a key happen under a file lock (one of 64, by the key's digest) that any process on this root takes, so
  the conditional writes hold across processes; a lock of a dead process is free.
- Everything of the store itself lives in `root/.dcnr/`, which no key can name. No symbolic link below root is followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import NamedTuple

from storage.keys import check_key
from storage.store import (
    MAX_GET_BYTES,
    Buffer,
    ConflictError,
    CorruptError,
    Entry,
    Piece,
    Stored,
    StoreUnavailableError,
    digest_of,
    too_large,
)
from storage.temporary import new_temporary, sweep

LOCKS = 64
LOCK_TIMEOUT_S = 30.0
MAX_ETAGS = 10_000

Install = Callable[[str, Path], None]
"""Put the finished temporary file in the place of a key."""


class _Version(NamedTuple):
    """What changes whenever a file is replaced: `head` and `list` need not read a version again for its digest."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Version:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class LocalFiles:
    """See the module's docstring. Raises OSError, and StoreError's children for what the system has no word for.

    FileNotFoundError means that the object isn't there, when reading (or the store, see `vanished`); that the store
    isn't, when writing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()
        self._own = root / ".dcnr"
        self._ready = False
        self._etags: dict[_Version, str] = {}

    @property
    def vanished(self) -> bool:
        """The store was written here, and isn't here any more: its disk is unmounted, or its folder was moved."""
        return self._ready and not self._own.is_dir()

    # ------------------------------------------------------------ reading

    def open(self, key: str) -> BufferedReader:
        """The object's file. Raises FileNotFoundError, CorruptError for what is no plain file."""
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

    def read(self, key: str, max_bytes: int) -> Stored:
        """The whole object."""
        with self.open(key) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise too_large(key, self.url, size, max_bytes)
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise too_large(key, self.url, len(data), max_bytes)
        return Stored(data, digest_of(data))

    def size(self, key: str) -> int:
        """How large the object is."""
        with self.open(key) as file:
            return os.fstat(file.fileno()).st_size

    def entry(self, key: str) -> Entry:
        """As `Store.head`."""
        with self.open(key) as file:
            status = os.fstat(file.fileno())
            return Entry(key, status.st_size, self._etag(file, status), status.st_mtime)

    def piece(self, key: str, offset: int, size_bytes: int) -> Piece:
        """As `RangedStore.get_range`, of whichever version is there."""
        with self.open(key) as file:
            status = os.fstat(file.fileno())
            etag = self._etag(file, status)
            data = os.pread(file.fileno(), size_bytes, offset)
        if len(data) < min(size_bytes, status.st_size - offset):
            raise StoreUnavailableError(f"{self.url}: {key} was cut short while it was read", key=key)
        return Piece(data, status.st_size, etag, etag)

    def _etag(self, file: BufferedReader, status: os.stat_result) -> str:
        version = _Version.of(status)
        return self._etags.get(version) or self._remember(version, hashlib.file_digest(file, "sha256").hexdigest())

    def walk(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, in any order. Raises FileNotFoundError if the store is here no more."""
        if self.vanished:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        folder = prefix.rpartition("/")[0]
        start = self.root / folder
        for place, folders, files in os.walk(start, onerror=_unless_gone):
            inside = Path(place).relative_to(self.root).as_posix()
            base = "" if inside == "." else inside + "/"
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if (base + name).startswith(prefix) and not name.startswith("."):
                    with contextlib.suppress(Exception):
                        yield check_key(base + name)

    # ------------------------------------------------------------ writing

    def write(self, key: str, data: Buffer, install: Install) -> str:
        """Write the whole object; its etag."""
        etag = digest_of(data)
        path, file = self.temporary()
        try:
            file.write(data)
            self.install(key, file, path, install)
            self._remember(_Version.of(os.fstat(file.fileno())), etag)
        finally:
            discard(path, file)
        return etag

    def temporary(self) -> tuple[Path, BufferedRandom]:
        """A file to gather an object in."""
        self._prepare()
        return new_temporary(self._own / "temporary")

    def install(self, key: str, file: BufferedRandom, path: Path, install: Install) -> None:
        """Make the gathered bytes durable, and put them in their place."""
        file.flush()
        os.fsync(file.fileno())
        with self._locked(key):
            install(key, path)

    def replace(self, key: str, temporary: Path) -> None:
        """An `Install` for every case."""
        self._place(key, lambda path: os.replace(temporary, path))

    def create(self, key: str, temporary: Path) -> None:
        """An `Install` where nothing is yet. Raises ConflictError."""
        try:
            self._place(key, lambda path: os.link(temporary, path, follow_symlinks=False))
        except FileExistsError as error:
            path = self._path(key)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
            _sync_folder(path.parent)  # whoever now reads it and goes on from it may rely on it
            raise ConflictError(
                f"{self.url}: {key} exists already", key=key, hint="somebody else wrote it first; read it"
            ) from error

    def swap(self, etag: str) -> Install:
        """An `Install` in place of the object that has this etag. Raises ConflictError."""

        def install(key: str, temporary: Path) -> None:
            try:
                found = self.read(key, MAX_GET_BYTES).etag
            except (FileNotFoundError, NotADirectoryError):
                found = ""
            if not found or found != etag:
                _sync_folder(self._path(key).parent)
                raise ConflictError(
                    f"{self.url}: {key} is {found[:16] or 'gone'}, no longer the {etag[:16]} that was read before",
                    key=key,
                    hint="somebody else wrote it in the meantime; read it again",
                )
            self.replace(key, temporary)

        return install

    def remove(self, key: str) -> None:
        """Delete the object if it's there, and the folders that are empty then."""
        path = self._path(key)
        if not os.path.lexists(path):
            return
        self._prepare()
        with self._locked(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            except PermissionError:
                if path.is_dir():
                    return
                raise
            _sync_folder(path.parent)
            for folder in path.parents:
                if folder == self.root:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    # ------------------------------------------------------------ inside

    def _prepare(self) -> None:
        """Make the store's own folders and sweep out what the dead left there, once."""
        if not self._ready:
            (self._own / "temporary").mkdir(parents=True, exist_ok=True)
            (self._own / "locks").mkdir(exist_ok=True)
            sweep(self._own / "temporary")
            self._ready = True

    def _path(self, key: str) -> Path:
        path = self.root.joinpath(*key.split("/"))
        folder = path.parent
        if (
            folder != self.root
            and folder.exists()
            and Path(os.path.realpath(folder)) != (Path(os.path.realpath(self.root)).joinpath(*key.split("/")[:-1]))
        ):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return path

    def _remember(self, version: _Version, etag: str) -> str:
        if len(self._etags) >= MAX_ETAGS:
            self._etags.clear()
        self._etags[version] = etag
        return etag

    def _place(self, key: str, move: Callable[[Path], None]) -> None:
        """Make the folders, `move`, and sync; once more if a delete removed an empty folder in between."""
        for attempt in range(5):
            path = self._path(key)
            try:
                new = [folder for folder in path.parents if folder.is_relative_to(self.root) and not folder.exists()]
                _make_folder(path.parent)
                move(path)
                for folder in {path.parent, *(folder.parent for folder in new)}:
                    _sync_folder(folder)
                return
            except FileNotFoundError:
                if attempt == 4:
                    raise

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


def discard(path: Path, file: BufferedRandom) -> None:
    """Remove a temporary file, and only then give up its lock. What can't be removed now is swept out later."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the rest of a buffer that a full disk did not take
        file.close()


def _unless_gone(error: OSError) -> None:
    """A folder that can't be read is no empty folder; one that was deleted in the meantime is."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


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
