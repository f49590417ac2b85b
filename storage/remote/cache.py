"""Objects of a known digest, kept on this machine: fetched once, however many processes here want them.

- A file is whole or has the ending `.part`. Whoever fetches holds the lock of the part; others read along as it grows,
  and take over where it ends if its process dies. So what was fetched before a cut is not fetched again.
- Nothing of it is believed: the reader checks the digest of what it got, and drops the file if it is another.
- Above the limit the files go that were not used for longest; what is being fetched stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from storage.disk import FULL, explain_os_error
from storage.keys import check_digest
from storage.remote.pieces import PieceError

READ_BYTES = 1 << 20
LOOK_S = 0.05
"""How often one that reads along looks whether more has come."""

Fetch = Callable[[int], AsyncGenerator[bytes, None]]
"""Gives an object's bytes from an offset on."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of the cache. `used_s`: when it was used last."""

    name: str
    size_bytes: int
    used_s: float


def superfluous(kept: Iterable[Kept], limit_bytes: int) -> list[str]:
    """The names of the files that have to go, those first that were not used for longest."""
    found = sorted(kept, key=lambda each: (each.used_s, each.name))
    left = sum(each.size_bytes for each in found)
    names = []
    for each in found:
        if left <= limit_bytes:
            break
        names.append(each.name)
        left -= each.size_bytes
    return names


class BlobCache:
    """A folder of one user on this machine; any number of processes may use it. See the module."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    async def read(self, sha256: str, key: str, fetch: Fetch) -> AsyncGenerator[bytes, None]:
        """The object's bytes: those that are here, then those that `fetch` gives. The caller checks the digest.

        Raises what `fetch` raises. Where the disk of the cache takes nothing, all comes from `fetch`.
        """
        check_digest(sha256)
        position = 0
        try:
            whole = await asyncio.to_thread(self._open_whole, sha256)
            part = None if whole is not None else await asyncio.to_thread(self._open_part, sha256)
        except OSError as error:
            if error.errno not in FULL | {errno.EROFS, errno.EACCES, errno.EPERM}:
                raise explain_os_error(f"the cache {self.folder}", self.folder, error, key=key) from error
            whole = part = None
        file = whole or part
        if file is None:
            async with contextlib.aclosing(fetch(0)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        with file:
            if part is not None:
                while not await asyncio.to_thread(_lock, part):
                    ended = await asyncio.to_thread(self._is_whole, part, sha256)
                    while data := await asyncio.to_thread(os.pread, part.fileno(), READ_BYTES, position):
                        position += len(data)
                        yield data
                    if ended:
                        return
                    await asyncio.sleep(LOOK_S)
            while data := await asyncio.to_thread(os.pread, file.fileno(), READ_BYTES, position):
                position += len(data)
                yield data
            if part is None or await asyncio.to_thread(self._is_whole, part, sha256):
                return
            writable = True
            try:
                async with contextlib.aclosing(fetch(position)) as chunks:
                    async for chunk in chunks:
                        writable = writable and await asyncio.to_thread(_append, part, chunk)
                        yield chunk
            except PieceError:
                await self.drop(sha256)
                raise
            if writable:
                await asyncio.to_thread(self._keep, part, sha256)

    async def drop(self, sha256: str) -> None:
        """Forget what is here of it."""
        await asyncio.to_thread(self._drop, check_digest(sha256))

    # ------------------------------------------------------------ files

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256

    def _part(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.part"

    def _open_whole(self, sha256: str) -> BufferedRandom | None:
        try:
            file = open(self._path(sha256), "r+b", opener=_no_link)  # noqa: SIM115
        except FileNotFoundError:
            return None
        os.utime(file.fileno())
        return file

    def _open_part(self, sha256: str) -> BufferedRandom:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(self._part(sha256), "a+b", opener=_no_link)

    def _is_whole(self, part: BufferedRandom, sha256: str) -> bool:
        """Whether this open part has become the whole file."""
        try:
            return os.path.samestat(os.fstat(part.fileno()), os.stat(self._path(sha256)))
        except FileNotFoundError:
            return False

    def _keep(self, part: BufferedRandom, sha256: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(part.fileno())
            if os.path.samestat(os.fstat(part.fileno()), os.stat(self._part(sha256))):
                os.replace(self._part(sha256), self._path(sha256))
            self._make_room()

    def _make_room(self) -> None:
        kept = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                kept.append(Kept(entry.name, status.st_size, status.st_mtime))
        for name in superfluous(kept, self.limit_bytes):
            path = self.folder / name
            if not name.endswith(".part"):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError), open(path, "r+b") as part:
                if _lock(part):
                    path.unlink(missing_ok=True)

    def _drop(self, sha256: str) -> None:
        with contextlib.suppress(OSError):
            self._path(sha256).unlink(missing_ok=True)
            self._part(sha256).unlink(missing_ok=True)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(part: BufferedRandom) -> bool:
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _append(part: BufferedRandom, chunk: bytes) -> bool:
    """Whether the disk took it; if not, the part ends before it."""
    end = os.fstat(part.fileno()).st_size
    try:
        view = memoryview(chunk)
        while view:
            view = view[os.write(part.fileno(), view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(part.fileno(), end)
        return False
    return True
