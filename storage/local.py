"""A store in a folder of this machine.

- An object is the file of its key below `root`; its etag is its SHA-256. How files change: storage/local_files.py.
- What may block happens in threads of the store's own, so that a disk that hangs holds up nothing else.
- One call of the system may take `stall_s`, and large objects are moved in pieces: so a slow disk is waited for, and
  one that hangs is an error. What the system was asked for then may still happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from storage.disk import explain_os_error
from storage.keys import check_key, check_prefix
from storage.local_files import Install, LocalFiles, discard
from storage.store import (
    CHUNK_BYTES,
    MAX_GET_BYTES,
    Buffer,
    Entry,
    NotFoundError,
    Piece,
    Stored,
    StoreUnavailableError,
    check_sha256,
    digest_of,
    replaced,
    too_large,
)

STALL_S = 60.0
DISCARD_S = 1.0
THREADS = 8
WHOLE_BYTES = 16 << 20
"""Up to here an object is read or written in one call."""
PIECE_BYTES = 8 << 20
SYNC_BYTES = 64 << 20
"""So much is written before it is synced, so that the last sync has little to do."""

T = TypeVar("T")


class LocalStore:
    """See the module's docstring. `root` is created if it isn't there."""

    def __init__(self, root: Path, *, stall_s: float = STALL_S) -> None:
        self._root = Path(os.path.abspath(root))
        self._files = LocalFiles(self._root)
        self._stall_s = stall_s
        self._threads = ThreadPoolExecutor(THREADS, "dcnr-store")

    @property
    def url(self) -> str:
        """file:// and the root."""
        return self._files.url

    async def probe(self) -> None:
        """Write, read and delete an object. Raises StoreUnavailableError."""
        key = f"probe-{uuid.uuid4().hex}"
        etag = await self.put_if_absent(key, b"probe")
        try:
            if (await self.get(key)).etag != etag:
                raise StoreUnavailableError(f"{self.url}: reads back other bytes than were written", key=key)
        finally:
            await self.delete(key)

    # ------------------------------------------------------------ reading

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        check_key(key)

        def read_if_small() -> Stored | None:
            if WHOLE_BYTES < self._files.size(key) <= max_bytes:
                return None
            return self._files.read(key, max_bytes)

        stored = await self._run("read", key, read_if_small) or await self._get_in_pieces(key, max_bytes)
        check_sha256(key, self.url, stored.etag, sha256, len(stored.data))
        return stored

    async def _get_in_pieces(self, key: str, max_bytes: int) -> Stored:
        data = bytearray()
        async with contextlib.aclosing(self._pieces(key, PIECE_BYTES)) as pieces:
            async for piece in pieces:
                data += piece
                if len(data) > max_bytes:
                    raise too_large(key, self.url, len(data), max_bytes)
        return Stored(bytes(data), await self._run("read", key, lambda: digest_of(data)))

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        """See Store."""
        check_key(key)
        digest, size = hashlib.sha256(), 0
        async with contextlib.aclosing(self._pieces(key, CHUNK_BYTES)) as pieces:
            async for piece in pieces:
                digest.update(piece)
                size += len(piece)
                yield piece
        check_sha256(key, self.url, digest.hexdigest(), sha256, size)

    async def _pieces(self, key: str, size_bytes: int) -> AsyncGenerator[bytes, None]:
        file = await self._run("read", key, lambda: self._files.open(key))
        try:
            done = 0
            while piece := await self._run("read", key, lambda: file.read(size_bytes), done):
                done += len(piece)
                yield piece
        finally:
            file.close()

    async def get_range(self, key: str, offset: int, size_bytes: int, *, etag: str = "") -> Piece:
        """See RangedStore."""
        check_key(key)
        piece = await self._run("read", key, lambda: self._files.piece(key, offset, size_bytes))
        if etag not in ("", piece.etag):
            raise replaced(key, self.url)
        return piece

    async def head(self, key: str) -> Entry:
        """See Store."""
        check_key(key)
        return await self._run("read", key, lambda: self._files.entry(key))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """See Store."""
        check_prefix(prefix)
        for key in await self._run("list", prefix, lambda: sorted(self._files.walk(prefix))):
            with contextlib.suppress(NotFoundError):
                yield await self._run("read", key, functools.partial(self._files.entry, key))

    # ------------------------------------------------------------ writing

    async def put(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        return await self._write(key, data, self._files.replace)

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        return await self._write(key, data, self._files.create)

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        check_key(key)
        return await self._write(key, data, self._files.swap(etag))

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store."""
        check_key(key)
        return await self._write_chunks(key, chunks, sha256, self._files.replace)

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        check_key(key)
        return await self._write_chunks(key, file_chunks(path), None, self._files.replace)

    async def _write(self, key: str, data: Buffer, install: Install) -> str:
        view = memoryview(data).cast("B")
        if len(view) <= WHOLE_BYTES:
            return await self._run("write", key, lambda: self._files.write(key, view, install))

        async def pieces() -> AsyncGenerator[bytes, None]:
            for start in range(0, len(view), PIECE_BYTES):
                yield bytes(view[start : start + PIECE_BYTES])

        return await self._write_chunks(key, pieces(), None, install)

    async def _write_chunks(self, key: str, chunks: AsyncIterable[bytes], sha256: str | None, install: Install) -> str:
        path, file = await self._run("write", key, self._files.temporary)
        done, unsynced, digest = 0, 0, hashlib.sha256()
        try:
            async for chunk in chunks:
                digest.update(chunk)
                unsynced += len(chunk)
                sync = unsynced >= SYNC_BYTES
                await self._run("write", key, functools.partial(_append, file, chunk, sync), done)
                done, unsynced = done + len(chunk), 0 if sync else unsynced
            check_sha256(key, "the stream to store", digest.hexdigest(), sha256, done)
            await self._run("write", key, lambda: self._files.install(key, file, path, install), done)
            return digest.hexdigest()
        finally:
            discarded = asyncio.get_running_loop().run_in_executor(self._threads, discard, path, file)
            await asyncio.wait([discarded], timeout=DISCARD_S)

    async def delete(self, key: str) -> None:
        """See Store."""
        check_key(key)
        await self._run("delete", key, lambda: self._files.remove(key))

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ failures

    async def _run(self, what: str, key: str, work: Callable[[], T], done_bytes: int = 0) -> T:
        """`work` in a thread, with the system's errors turned into ours. `done_bytes`: what was moved before it."""

        def guarded() -> T:
            try:
                return work()
            except FileNotFoundError as error:
                if what == "read" and not self._files.vanished:
                    raise NotFoundError(f"{self.url}: there is no {key}", key=key) from error
                raise StoreUnavailableError(
                    f"{self.url}: {what} {key}: the store's own folder is gone", key=key,
                    hint="was its disk unmounted? Mount it again",
                ) from error  # fmt: skip
            except OSError as error:
                raise explain_os_error(f"{self.url}: {what} {key or 'all'}", self._root, error, key=key) from error

        try:
            async with asyncio.timeout(self._stall_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, guarded)
        except TimeoutError as error:
            unsure = "; it may or may not happen later" if what in ("write", "delete") else ""
            raise StoreUnavailableError(
                f"{self.url}: {what} {key or 'all'}: the disk has not answered for {self._stall_s:g} s "
                f"({done_bytes} bytes were moved before){unsure}",
                key=key, hint="check the disk or its mount, then try again",
            ) from error  # fmt: skip


async def file_chunks(path: Path) -> AsyncGenerator[bytes, None]:
    """A local file in chunks."""
    with await asyncio.to_thread(open, path, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


def _append(file: BufferedRandom, chunk: bytes, sync: bool) -> None:
    file.write(chunk)
    if sync:
        file.flush()
        os.fdatasync(file.fileno())
