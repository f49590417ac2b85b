"""A store behind a storage service, for machines that reach neither its disk nor S3.

- Large objects come and go in pieces (pieces.py), as many at once as the line holds (window.py). A transfer goes on
  where it was cut: pieces that came stay, and of an upload the service keeps what it has, also over its own restart.
- Whatever is read under a known digest is checked here. With a cache, what came of it is kept, so the next read of this
  machine gets it from there, or goes on where the last one ended.
- A write whose answer was lost is asked again under its id, which its process answers without doing it twice. If that
  process is gone and a condition does not hold now, what is there is compared with what was to be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from storage.disk import explain_os_error
from storage.keys import check_key, check_prefix
from storage.remote.answers import ChangedError, NoTransferError, UnsureConflictError
from storage.remote.cache import BlobCache
from storage.remote.connection import Connection, MakeBus, Patience
from storage.remote.pieces import Ask, Download, PieceError, Upload
from storage.remote.window import Window
from storage.remote.windowed import in_window
from storage.store import (
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
from wire.ids import new_request_id
from wire.messages import (
    ProbeStore,
    StoreAppend,
    StoreBegin,
    StoreChunk,
    StoreDelete,
    StoreEntry,
    StoreFinish,
    StoreHead,
    StoreList,
    StorePut,
    StoreRead,
    StoreStaged,
    StoreWritten,
)

PAGE = 5000
TRIES = 8
"""How often an object may be replaced while it is read, or an upload begin anew."""

ReadPiece = Callable[[int, int], Awaitable[Buffer]]
"""Gives the bytes from an offset on, so many."""


class RemoteStore:
    """See the module. `address`: `tcp://host:port`. `make_bus`: a bus for this store alone; see `wire.bus`.

    `key`: the service's public key, "" where there are no keys.
    """

    def __init__(
        self, url: str, address: str, make_bus: MakeBus, *, cache: BlobCache | None = None,
        patience: Patience | None = None, key: str = "",
    ) -> None:  # fmt: skip
        self.url = url
        self._connection = Connection(url, address, make_bus, patience or Patience(), key)
        self._cache = cache
        self._uploads: dict[str, asyncio.Lock] = {}

    async def close(self) -> None:
        """See Store."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def probe(self) -> None:
        """See Store: whether the service answers, and all works that it stands on."""
        await self._connection.ask(ProbeStore(_new_id()))

    # ------------------------------------------------------------ reading

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        check_key(key)
        for _ in range(TRIES):
            with contextlib.suppress(ChangedError):
                return await self._get(key, sha256, max_bytes)
        raise StoreUnavailableError(f"{self.url}: {key} was replaced {TRIES} times while it was read", key=key)

    async def _get(self, key: str, sha256: str | None, max_bytes: int) -> Stored:
        await self._connection.open()
        first, data = await self._chunk(key, Ask(0, self._connection.chunk_bytes), "")
        if first.size_bytes > max_bytes:
            raise too_large(key, self.url, first.size_bytes, max_bytes)
        whole = bytearray(data)
        if len(data) < first.size_bytes:
            async with contextlib.aclosing(self._pieces(key, first.etag, first.size_bytes, len(data))) as pieces:
                async for piece in pieces:
                    whole += piece
        actual = digest_of(whole) if len(whole) <= self._connection.chunk_bytes else await _digest(whole)
        check_sha256(key, self.url, actual, first.sha256 or None, len(whole))
        check_sha256(key, self.url, actual, sha256, len(whole))
        return Stored(bytes(whole), first.etag)

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        """See Store. With a cache and a digest, from there as far as it goes."""
        check_key(key)
        if sha256 is not None and self._cache is not None:
            fetched = self._cache.read(sha256, key, lambda start: self._stream(key, start))
        else:
            fetched = self._stream(key, 0)
        digest, size = hashlib.sha256(), 0
        try:
            async with contextlib.aclosing(fetched) as chunks:
                async for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
        except ChangedError as error:
            raise StoreUnavailableError(error.message, key=key, hint=error.hint) from error
        except PieceError as error:  # more is in the cache than the object has
            raise CorruptError(error.message, key=key) from error
        if sha256 is not None and self._cache is not None and digest.hexdigest() != sha256:
            await self._cache.drop(sha256)
        check_sha256(key, self.url, digest.hexdigest(), sha256, size)

    async def _stream(self, key: str, start: int) -> AsyncGenerator[bytes, None]:
        """The bytes from `start` on; verified as far as the store knows the digest of the whole."""
        await self._connection.open()
        if start:
            entry = await self.head(key)
            if start > entry.size_bytes:
                raise PieceError(f"{self.url}: {key} has {entry.size_bytes} bytes, {start} had come before")
            etag, size, known, data = entry.etag, entry.size_bytes, "", b""
        else:
            first, data = await self._chunk(key, Ask(0, self._connection.chunk_bytes), "")
            etag, size, known = first.etag, first.size_bytes, first.sha256
            if data:
                yield data
        digest = hashlib.sha256(data)
        async with contextlib.aclosing(self._pieces(key, etag, size, start + len(data))) as pieces:
            async for piece in pieces:
                digest.update(piece)
                yield piece
        check_sha256(key, self.url, digest.hexdigest(), known or None, size)

    async def _pieces(self, key: str, etag: str, size_bytes: int, start: int) -> AsyncGenerator[bytes, None]:
        download = Download(size_bytes, self._connection.chunk_bytes, start)

        async def get(ask: Ask) -> bytes:
            return (await self._chunk(key, ask, etag))[1]

        answers = in_window(download, Window(self._connection.chunk_bytes), get)
        async with contextlib.aclosing(answers) as every:
            async for ask, data in every:
                for piece in download.arrived(ask, data):
                    yield piece

    async def _chunk(self, key: str, ask: Ask, etag: str) -> tuple[StoreChunk, bytes]:
        answer, frames = await self._connection.ask(
            StoreRead(_new_id(), key, ask.offset, ask.size_bytes, etag), key=key
        )
        if not isinstance(answer, StoreChunk) or len(frames) != 1 or answer.offset != ask.offset:
            raise StoreError(f"{self.url}: an odd answer to the reading of {key}", key=key)
        if len(frames[0]) != max(min(ask.size_bytes, answer.size_bytes - ask.offset), 0):
            raise StoreError(f"{self.url}: a piece of {len(frames[0])} bytes came of {key}", key=key)
        return answer, bytes(frames[0])

    async def head(self, key: str) -> Entry:
        """See Store."""
        check_key(key)
        return _entry(await self._connection.body(StoreHead(_new_id(), key), StoreEntry, key=key))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """See Store."""
        check_prefix(prefix)
        after = ""
        while True:
            page = await self._connection.body(StoreList(_new_id(), prefix, after, PAGE), list[StoreEntry], key=prefix)
            for found in page:
                yield _entry(found)
            if len(page) < PAGE:
                return
            after = page[-1].key

    # ------------------------------------------------------------ writing

    async def put(self, key: str, data: Buffer) -> str:
        """See Store."""
        return await self._put(key, data, "put", "")

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        return await self._put(key, data, "absent", "")

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        return await self._put(key, data, "match", etag)

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store. Gathers the chunks in a temporary file first, so that any of them can be sent again."""
        check_key(key)
        digest, size = hashlib.sha256(), 0
        with await asyncio.to_thread(_gathering, key) as file:
            async for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                await asyncio.to_thread(_gather, key, file, chunk)
            check_sha256(key, "the stream to store", digest.hexdigest(), sha256, size)
            return await self._put_file(key, file, size, digest.hexdigest())

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        check_key(key)
        with await asyncio.to_thread(open, path, "rb") as file:
            digest = await asyncio.to_thread(lambda: hashlib.file_digest(file, "sha256").hexdigest())
            return await self._put_file(key, file, os.fstat(file.fileno()).st_size, digest)

    async def _put_file(self, key: str, file: IO[bytes], size: int, digest: str) -> str:
        async def read(offset: int, length: int) -> bytes:
            return await asyncio.to_thread(os.pread, file.fileno(), length, offset)

        return await self._write(key, read, size, digest, "put", "")

    async def _put(self, key: str, data: Buffer, how: str, etag: str) -> str:
        check_key(key)
        view = memoryview(data).cast("B")

        async def read(offset: int, length: int) -> memoryview:
            return view[offset : offset + length]

        digest = digest_of(view) if len(view) <= 1 << 20 else await _digest(view)
        return await self._write(key, read, len(view), digest, how, etag)

    async def _write(self, key: str, read: ReadPiece, size: int, digest: str, how: str, etag: str) -> str:
        await self._connection.open()
        try:
            if size <= self._connection.chunk_bytes:
                message = StorePut(_new_id(), key, how, etag, digest)
                frame = bytes(await read(0, size))
                return (await self._connection.body(message, StoreWritten, [frame], key=key)).etag
            return await self._upload(key, read, size, digest, how, etag)
        except UnsureConflictError as error:
            if mine := await self._own_etag(key, size, digest):
                return mine
            raise ConflictError(error.message, key=key, hint=error.hint) from error

    async def _upload(self, key: str, read: ReadPiece, size: int, digest: str, how: str, etag: str) -> str:
        """In pieces. The same write of the same bytes goes on where the last one ended."""
        transfer = digest_of("\0".join((key, how, etag, digest)).encode())[:32]
        lock = self._uploads.setdefault(transfer, asyncio.Lock())
        try:
            async with lock:
                for _ in range(TRIES):
                    try:
                        await self._send(transfer, key, read, size)
                        message = StoreFinish(_new_id(), transfer, key, how, etag, size, digest)
                        return (await self._connection.body(message, StoreWritten, key=key)).etag
                    except NoTransferError as error:
                        if error.unsure and (mine := await self._own_etag(key, size, digest)):
                            return mine  # it was written, and the answer was lost with the process
                raise StoreUnavailableError(f"{self.url}: what was sent of {key} was lost {TRIES} times", key=key)
        finally:
            if not lock.locked():
                self._uploads.pop(transfer, None)

    async def _send(self, transfer: str, key: str, read: ReadPiece, size: int) -> None:
        begin = StoreBegin(_new_id(), transfer, key, size)
        staged = (await self._connection.body(begin, StoreStaged, key=key)).size_bytes
        upload = Upload(size, self._connection.chunk_bytes, min(staged, size))

        async def send(ask: Ask) -> int:
            frame = await read(ask.offset, ask.size_bytes)
            if len(frame) != ask.size_bytes:
                raise StoreError(f"{key}: the file has changed while it was sent", key=key)
            message = StoreAppend(_new_id(), transfer, ask.offset)
            return (await self._connection.body(message, StoreStaged, [frame], key=key)).size_bytes

        async with contextlib.aclosing(in_window(upload, Window(self._connection.chunk_bytes), send)) as every:
            async for ask, now_staged in every:
                upload.answered(ask, now_staged)

    async def _own_etag(self, key: str, size: int, digest: str) -> str:
        """The etag of the object if it has exactly these bytes, else ""."""
        try:
            entry = await self.head(key)
            if entry.size_bytes != size:
                return ""
            if entry.etag == digest:
                return entry.etag
            found = hashlib.sha256()
            async with contextlib.aclosing(self._pieces(key, entry.etag, size, 0)) as pieces:
                async for piece in pieces:
                    found.update(piece)
        except (NotFoundError, ChangedError):
            return ""
        return entry.etag if found.hexdigest() == digest else ""

    async def delete(self, key: str) -> None:
        """See Store."""
        check_key(key)
        await self._connection.ask(StoreDelete(_new_id(), key), key=key)


def _new_id() -> str:
    return str(new_request_id())


def _gathering(key: str) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="dcnr-", buffering=0)
    except OSError as error:
        raise _no_room(key, error) from error


def _gather(key: str, file: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise _no_room(key, error) from error


def _no_room(key: str, error: OSError) -> StoreError:
    folder = Path(tempfile.gettempdir())
    return explain_os_error(f"{key} is gathered in {folder} before it is sent", folder, error, key=key)


def _entry(found: StoreEntry) -> Entry:
    return Entry(found.key, found.size_bytes, found.etag, found.modified_s)


async def _digest(data: Buffer) -> str:
    return await asyncio.to_thread(digest_of, data)
