"""A store in an S3 bucket, or in anything that speaks its protocol.

- Each read is checked against a digest by us (s3_read.py), each write by the server and by us (s3_write.py). The
  client's own checksums are off: many servers lack them, and they don't notice all damage.
- Retries are ours alone (s3_retry.py; the client's are off): with jitter, bounded, for broken bodies too.
- A body is read to its end or its connection closed, so the pool never runs dry. Objects are deleted one by one, for
  lack of multi-delete in some servers. Large objects are uploaded in parts (s3_multipart.py).
- Credentials come from the usual AWS environment; they are in no URL, message or log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import SplitResult, parse_qs

import aioboto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from storage.disk import explain_os_error
from storage.keys import check_key, check_prefix
from storage.s3_errors import PreconditionError
from storage.s3_probe import probe_s3
from storage.s3_read import Reader
from storage.s3_retry import Retries, S3Limits
from storage.s3_write import Writer
from storage.store import (
    MAX_GET_BYTES,
    Buffer,
    ConflictError,
    Entry,
    NotFoundError,
    Piece,
    PrefixStore,
    RangedStore,
    Stored,
    StoreUnavailableError,
    check_sha256,
    digest_of,
    replaced,
)
from wire.errors import MisuseError, UsageError


def open_s3(parts: SplitResult, limits: S3Limits | None = None) -> RangedStore:
    """The store of a split `s3://bucket/prefix?endpoint=…&region=…` URL. Raises UsageError."""
    if parts.username or parts.password:
        raise UsageError(
            "credentials don't belong into a store URL, which is shown and logged",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
        )
    options = parse_qs(parts.query, keep_blank_values=True)
    unknown = sorted(set(options) - {"endpoint", "region"})
    if unknown or any(len(values) != 1 for values in options.values()):
        raise UsageError(
            f"store URL has the options {sorted(options)}", hint="endpoint and region are known, once each"
        )
    if not parts.netloc:
        raise UsageError("the store URL names no bucket", hint="s3://bucket/prefix?endpoint=http://host:port")
    endpoint = options.get("endpoint", [""])[0]
    if endpoint and ("@" in endpoint or not endpoint.startswith(("http://", "https://"))):
        raise UsageError("the endpoint in the store URL must be http(s)://host:port, without credentials")
    prefix = parts.path.strip("/")
    store = S3Store(
        parts.netloc, prefix=prefix + "/" if prefix else "", endpoint=endpoint, url=parts.geturl(), limits=limits,
        region=options.get("region", [""])[0],
    )  # fmt: skip
    return PrefixStore(store, prefix + "/", owns=True) if prefix else store


class S3Store:
    """See the module's docstring. Belongs to the event loop that first uses it. `prefix`: where its own keys are."""

    def __init__(
        self, bucket: str, *, prefix: str = "", endpoint: str = "", region: str = "", url: str = "",
        limits: S3Limits | None = None,
    ) -> None:  # fmt: skip
        self.url = url or f"s3://{bucket}"
        self._bucket = bucket
        self._prefix = prefix
        self._endpoint = endpoint
        self._region = region
        self._limits = limits or S3Limits()
        self._retry = Retries(self.url, self._limits)
        self._reader = Reader(self.client, bucket, self._retry)
        self._writer = Writer(self.client, bucket, self._reader)
        self._stack = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()
        self._made: Any = None
        self._closed = False

    async def client(self) -> Any:
        """The S3 client, made at the first call."""
        async with self._lock:
            if self._closed:
                raise MisuseError(f"{self.url} is closed")
            if self._made is None:
                limits = self._limits
                config = Config(
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    connect_timeout=limits.connect_s,
                    read_timeout=max(limits.complete_s, limits.stall_s + limits.unseen_s(1 << 30)),  # ours end earlier
                    max_pool_connections=limits.connections,
                    signature_version="s3v4",
                    s3={"addressing_style": "path" if self._endpoint else "auto"},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )
                region = self._region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
                try:
                    made = aioboto3.Session().client(
                        "s3", endpoint_url=self._endpoint or None, region_name=region or "us-east-1", config=config
                    )
                    self._made = await self._stack.enter_async_context(made)
                except (BotoCoreError, ValueError) as error:
                    raise StoreUnavailableError(f"{self.url}: {error}", hint="check the store URL") from error
            return self._made

    async def close(self) -> None:
        """See Store."""
        self._closed = True
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def probe(self) -> None:
        """See Store. Also removes what uploads of dead processes left, long ago."""
        await probe_s3(self, self._writer.multipart)
        with contextlib.suppress(
            StoreUnavailableError, KeyError, TypeError, ValueError
        ):  # some servers can't list them
            await self._writer.multipart.sweep(self._prefix)

    # -------------------------------------------------------------------------------------------- reading

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        check_key(key)
        return await self._reader.get(key, sha256, max_bytes)

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        """See Store. A connection that breaks is taken up again where it broke."""
        check_key(key)
        async with contextlib.aclosing(self._reader.get_stream(key, sha256)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def get_range(self, key: str, offset: int, size_bytes: int, *, etag: str = "") -> Piece:
        """See RangedStore. What is small is read whole and verified."""
        check_key(key)
        answer = await self._reader.head(key) if not etag else {}
        if answer and offset == 0 and answer["ContentLength"] <= size_bytes:
            stored = await self._reader.get(key, None, MAX_GET_BYTES)
            return Piece(stored.data[:size_bytes], len(stored.data), stored.etag, digest_of(stored.data))
        try:
            return await self._reader.get_range(key, offset, size_bytes, etag or str(answer["ETag"]))
        except PreconditionError as error:
            raise replaced(key, self.url) from error

    async def head(self, key: str) -> Entry:
        """See Store."""
        check_key(key)
        answer = await self._reader.head(key)
        return Entry(key, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp())

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """See Store. Held in memory and sorted, since not every server sorts."""
        check_prefix(prefix)
        client = await self.client()
        found: list[Entry] = []
        extra: dict[str, str] = {}
        while True:
            ask = dict(Bucket=self._bucket, Prefix=prefix, MaxKeys=1000, **extra)
            page = await self._retry("list", prefix, lambda stall, ask=ask: client.list_objects_v2(**ask))  # type: ignore[misc]
            for item in page.get("Contents", []):
                found.append(Entry(item["Key"], item["Size"], item["ETag"], item["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                break
            extra = {"ContinuationToken": page["NextContinuationToken"]}
        for entry in sorted(found, key=lambda entry: entry.key):
            yield entry

    # -------------------------------------------------------------------------------------------- writing

    async def put(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        view = memoryview(data).cast("B")
        if len(view) <= self._limits.multipart_from_bytes:
            return await self._writer.put(key, bytes(view), {})

        async def piece(start: int, size: int) -> bytes:
            return bytes(view[start : start + size])

        return await self._writer.multipart.put(key, piece, len(view), await asyncio.to_thread(digest_of, view))

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        try:
            return await self._writer.put(key, bytes(data), {"IfNoneMatch": "*"})
        except PreconditionError as error:
            raise ConflictError(
                f"{self.url}: {key} exists already", key=key, hint="somebody else wrote it first; read it"
            ) from error

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        check_key(key)
        try:
            return await self._writer.put(key, bytes(data), {"IfMatch": etag})
        except PreconditionError as error:
            raise ConflictError(
                f"{self.url}: {key} is not {etag}, which was read before, any more", key=key,
                hint="somebody else wrote it in the meantime; read it again",
            ) from error  # fmt: skip

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store. Gathers the chunks in a temporary file first, since their digest is needed before the upload."""
        check_key(key)
        digest, size = hashlib.sha256(), 0
        file = await asyncio.to_thread(self._gather_file, key)
        try:
            async for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                await asyncio.to_thread(self._gather, key, file, chunk)
            check_sha256(key, "the stream to store", digest.hexdigest(), sha256, size)
            return await self._put_file(key, file, size, digest.hexdigest())
        finally:
            with contextlib.suppress(OSError):
                file.close()

    def _gather_file(self, key: str) -> IO[bytes]:
        """A file without a name: nothing is left of it, however this process ends."""
        try:
            return tempfile.TemporaryFile(prefix="dcnr-", buffering=0)
        except OSError as error:
            raise self._no_room(key, error) from error

    def _gather(self, key: str, file: IO[bytes], chunk: bytes) -> None:
        view = memoryview(chunk)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            raise self._no_room(key, error) from error

    def _no_room(self, key: str, error: OSError) -> Exception:
        folder = Path(tempfile.gettempdir())
        found = explain_os_error(f"{key} is gathered in {folder} before it is sent", folder, error, key=key)
        found.hint = f"{found.hint}; TMPDIR names another folder"
        return found

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        check_key(key)
        with await asyncio.to_thread(open, path, "rb") as file:
            digest = await asyncio.to_thread(lambda: hashlib.file_digest(file, "sha256").hexdigest())
            return await self._put_file(key, file, file.tell(), digest)

    async def _put_file(self, key: str, file: IO[bytes], size: int, digest: str) -> str:
        def read(start: int, length: int) -> bytes:
            return os.pread(file.fileno(), length, start)

        if size <= self._limits.multipart_from_bytes:
            return await self._writer.put(key, await asyncio.to_thread(read, 0, size), {})

        async def piece(start: int, length: int) -> bytes:
            return await asyncio.to_thread(read, start, length)

        return await self._writer.multipart.put(key, piece, size, digest)

    async def delete(self, key: str) -> None:
        """See Store."""
        check_key(key)
        client = await self.client()
        with contextlib.suppress(NotFoundError):
            await self._retry("delete", key, lambda stall: client.delete_object(Bucket=self._bucket, Key=key))
