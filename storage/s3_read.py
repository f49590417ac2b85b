"""Reading from S3: a body that breaks off is taken up again where it broke, and every byte is checked by us.

Headers can be damaged on the way as bodies can: an etag that does not follow from the bytes is asked for again, since a
wrong one would make the next conditional write look lost.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from storage.reread import SAME
from storage.s3_errors import TRANSPORT, AgainError, PreconditionError, gave_up
from storage.s3_retry import Retries
from storage.stall import Stall, StallError, watched
from storage.store import (
    CHUNK_BYTES,
    CorruptError,
    Piece,
    Stored,
    StoreUnavailableError,
    check_sha256,
    digest_of,
    too_large,
)

SURE_TRIES = 8


class Download:
    """One object being read: its body once, in as many requests as that takes. `etag`, `sha256`: from the answer."""

    def __init__(self, reader: Reader, key: str, max_bytes: int | None = None) -> None:
        self.etag = ""
        self.sha256 = ""
        self._reader = reader
        self._key = key
        self._max_bytes = max_bytes
        self._position = 0
        self._size = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The bytes. Raises StoreUnavailableError after some attempts in a row that moved nothing."""
        retry, key = self._reader.retry, self._key
        tries, requests = 0, 0
        while True:
            before, requests = self._position, requests + 1
            try:
                async with retry.connection(key), contextlib.aclosing(self._one_request()) as chunks:
                    async for chunk in chunks:
                        self._position += len(chunk)
                        yield chunk
                return
            except AgainError as error:
                tries = tries + 1 if self._position == before else 1
                if tries >= retry.limits.attempts:
                    cause = str(error) if requests == tries else f"{error}; {requests} requests in all"
                    raise gave_up(retry.url, "get", key, cause, tries) from error
            except PreconditionError as error:
                raise StoreUnavailableError(f"{retry.url}: {key} was replaced while it was read", key=key) from error
            await asyncio.sleep(retry.limits.wait_s(tries))

    async def _one_request(self) -> AsyncGenerator[bytes, None]:
        retry, key = self._reader.retry, self._key
        resumed = self._position > 0
        extra = {"Range": f"bytes={self._position}-", "IfMatch": self.etag} if resumed else {}
        try:
            answer = await retry.attempt("get", key, lambda stall: self._reader.open(key, extra))
        except AgainError as error:
            if resumed:
                raise AgainError(f"{error}; {self._position} of {self._size} bytes had come before") from error
            raise
        body = answer["Body"]
        try:
            skip = self._position if resumed and not answer.get("ContentRange") else 0
            if not resumed:
                self._size = answer["ContentLength"]
                self.etag, self.sha256 = answer["ETag"], answer["Metadata"].get("sha256", "")
                if self._max_bytes is not None and self._size > self._max_bytes:
                    raise too_large(key, retry.url, self._size, self._max_bytes)
            while chunk := await self._read(body, skip):
                useful = chunk[skip:]
                skip = max(skip - len(chunk), 0)
                if useful:
                    yield useful
        finally:
            body.close()

    async def _read(self, body: Any, skip: int) -> bytes:
        """The next chunk, b"" at the end. Raises AgainError if it breaks off, whatever the HTTP library calls that."""
        so_far = f"{self._position} of {self._size} bytes"
        stall = Stall(self._reader.retry.limits.stall_s)
        try:
            async with watched(stall):
                chunk: bytes = await body.read(CHUNK_BYTES)
        except StallError as error:
            raise AgainError(f"the body stood still for {stall.limit_s:g} s after {so_far}") from error
        except TRANSPORT as error:
            cause = f"{type(error).__name__}: {error}"
            raise AgainError(f"the body broke off after {so_far} ({cause[:200]})") from error
        if not chunk and self._position != self._size:
            raise AgainError(f"the body ended after {so_far}")
        if self._position + len(chunk[skip:]) > self._size:
            raise AgainError(f"the body has more than {self._size} bytes")
        return chunk


class Reader:
    """Reads one bucket."""

    def __init__(self, client: Callable[[], Awaitable[Any]], bucket: str, retry: Retries) -> None:
        self.retry = retry
        self._client = client
        self._bucket = bucket

    async def open(self, key: str, extra: dict[str, str]) -> Any:
        """Ask for the object; the answer with an unread body."""
        client = await self._client()
        return await client.get_object(Bucket=self._bucket, Key=key, **extra)

    async def head(self, key: str) -> Any:
        """The object's headers. Raises NotFoundError."""
        client = await self._client()
        return await self.retry("head", key, lambda stall: client.head_object(Bucket=self._bucket, Key=key))

    async def get(self, key: str, sha256: str | None, max_bytes: int) -> Stored:
        """See Store. What arrives damaged is read again, some times."""
        limits = self.retry.limits
        seen: set[str] = set()
        for tries in range(1, limits.attempts + 1):
            download = Download(self, key, max_bytes)
            data = bytearray()
            async with contextlib.aclosing(download.chunks()) as chunks:
                async for chunk in chunks:
                    data += chunk
            actual = await asyncio.to_thread(digest_of, data)
            wanted = download.sha256 or sha256
            if not wanted or actual == wanted:
                check_sha256(key, self.retry.url, actual, sha256, len(data))
                etag = download.etag if sha256 else await self.sure_etag(key, download.etag, data)
                return Stored(bytes(data), etag)
            seen.add(actual)
            cause = f"{len(data)} bytes with SHA-256 {actual[:16]}…, expected {wanted[:16]}…"
            if tries < limits.attempts:
                await asyncio.sleep(limits.wait_s(tries))
        damaged = gave_up(self.retry.url, "get", key, cause, tries, corrupt=True)
        assert isinstance(damaged, CorruptError)
        damaged.found, damaged.settled = actual, len(seen) == 1 and tries >= SAME
        raise damaged

    async def get_range(self, key: str, offset: int, size_bytes: int, etag: str) -> Piece:
        """See RangedStore. Raises PreconditionError if the object has another etag."""
        extra = {"Range": f"bytes={offset}-{offset + size_bytes - 1}", "IfMatch": etag}

        async def look(stall: Stall) -> Piece:
            answer = await self.open(key, extra)
            body, data = answer["Body"], bytearray()
            try:
                while chunk := await body.read(CHUNK_BYTES):
                    data += chunk
                    stall.moved(len(chunk))
            finally:
                body.close()
            whole = int(str(answer.get("ContentRange", "")).rpartition("/")[2] or answer["ContentLength"])
            if len(data) != min(size_bytes, whole - offset):
                raise AgainError(f"{len(data)} bytes came from {offset} on of an object of {whole}")
            return Piece(bytes(data), whole, str(answer["ETag"]), answer["Metadata"].get("sha256", ""))

        return await self.retry("get", key, look)

    async def get_stream(self, key: str, sha256: str | None) -> AsyncGenerator[bytes, None]:
        """See Store."""
        download, digest, size = Download(self, key), hashlib.sha256(), 0
        async with contextlib.aclosing(download.chunks()) as chunks:
            async for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                yield chunk
        check_sha256(key, self.retry.url, digest.hexdigest(), download.sha256 or None, size)
        check_sha256(key, self.retry.url, digest.hexdigest(), sha256, size)

    async def sure_etag(self, key: str, etag: str, data: bytes | bytearray) -> str:
        """`etag`, if it is the MD5 of `data` or if the server says it twice. Raises CorruptError if it never does."""
        if is_md5(etag, data):
            return etag
        seen = {etag}
        for _ in range(SURE_TRIES):
            again = str((await self.head(key))["ETag"])
            if again in seen:
                return again
            seen.add(again)
        raise CorruptError(
            f"{self.retry.url}: {key} has another etag in each answer", key=key, hint="is it written all the time?"
        )


def is_md5(etag: str, data: bytes | bytearray | memoryview) -> bool:
    """Whether this etag follows from the bytes, as it does on most servers."""
    return etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


def md5_of(data: bytes) -> str:
    """The MD5 as a Content-MD5 header has it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
