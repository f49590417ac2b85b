"""What has come of large objects so far: one file for each transfer, in a folder of the service's own.

A file's size is what has come, so a service that was killed goes on where it ended. Its name is a digest of sender and
transfer, never anything that was received. What nobody has touched for a day is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from storage.disk import explain_os_error
from storage.remote.answers import NO_TRANSFER, Refusal
from storage.store import Buffer

STALE_S = 86_400.0

T = TypeVar("T")


class Spool:
    """See the module. Everything here may raise StoreUnavailableError, when the folder's disk is full, say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def name(sender: str, transfer: str) -> str:
        """What a transfer is called here."""
        return hashlib.sha256(f"{sender}/{transfer}".encode()).hexdigest()

    async def prepare(self) -> None:
        """Make the folder, and remove what is stale."""
        await self._run(self._prepare)

    async def begin(self, name: str) -> int:
        """A transfer begins or goes on; how many bytes of it are there."""
        return await self._run(lambda: self._begin(name))

    async def append(self, name: str, offset: int, data: Buffer) -> int:
        """Add a piece, if it's the next one; how many bytes are there now. Raises Refusal if nothing was begun."""
        return await self._run(lambda: self._append(name, offset, data))

    async def open(self, name: str) -> BinaryIO:
        """The file. Raises Refusal if there is none."""
        return await self._run(lambda: self._open(name, "rb"))

    async def remove(self, name: str) -> None:
        """Forget a transfer."""
        await self._run(lambda: self.path(name).unlink(missing_ok=True))

    async def sweep(self) -> None:
        """Remove what nobody has touched for long."""
        await self._run(self._sweep)

    def path(self, name: str) -> Path:
        """Where a transfer's file is."""
        return self._folder / name

    # ------------------------------------------------------------ in a thread

    def _prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        now = time.time()
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if now - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                    os.unlink(entry.path)

    def _begin(self, name: str) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path(name), "ab", opener=_no_link) as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_size

    def _append(self, name: str, offset: int, data: Buffer) -> int:
        with self._open(name, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if offset > size or offset + len(data) <= size:
                return size
            view = memoryview(data)[size - offset :]
            try:
                while view:
                    done = os.pwrite(file.fileno(), view, size)
                    size, view = size + done, view[done:]
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
            return size

    def _open(self, name: str, mode: str) -> BinaryIO:
        try:
            return open(self.path(name), mode, opener=_no_link)  # type: ignore[return-value]
        except FileNotFoundError as error:
            raise Refusal(NO_TRANSFER, "nothing has come of this transfer yet", "begin it") from error

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise explain_os_error(f"the spool {self._folder}", self._folder, error) from error


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
