"""A store in an S3 bucket, or in anything that speaks its protocol.

- An object carries its SHA-256 and its writer's number as metadata. Each read is checked against the digest by us: the
  client's own checksums are off, because many servers lack them, and because they don't notice all damage.
- Retries are ours alone (the client's are off): with jitter, bounded, for broken bodies too. A conditional write that
  is answered "precondition failed" reads back the writer's number: a write whose reply was lost counts as done.
- 412 means lost; 409 means that another conditional write is under way, so it's asked again.
- A body is read to its end or its connection closed, so the pool never runs dry. Objects are deleted one by one, for
  lack of multi-delete in some servers. Large objects are uploaded in parts.
- Credentials come from the usual AWS environment; they are in no URL, message or log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import tempfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import SplitResult, parse_qs

import aioboto3
import aiohttp
import stamina
import stamina.instrumentation
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from storage.keys import check_key, check_prefix
from storage.s3_errors import TRANSPORT, AgainError, PreconditionError, explain, gave_up
from storage.s3_multipart import Multipart
from storage.s3_probe import probe_s3
from storage.store import (
    CHUNK_BYTES,
    MAX_GET_BYTES,
    Buffer,
    ConflictError,
    Entry,
    NotFoundError,
    PrefixStore,
    Store,
    Stored,
    StoreUnavailableError,
    check_sha256,
    digest_of,
    too_large,
)
from wire.errors import MisuseError, UsageError

T = TypeVar("T")

stamina.instrumentation.set_on_retry_hooks([stamina.instrumentation.LoggingOnRetryHook])


@dataclass(frozen=True, slots=True)
class S3Limits:
    """Bounds of time, memory and connections."""

    attempts: int = 6
    wait_initial_s: float = 0.1
    wait_max_s: float = 3.0
    jitter_s: float = 0.3
    connect_s: float = 5.0
    read_s: float = 30.0
    slowest_bytes_s: float = 50_000.0
    connections: int = 10
    multipart_from_bytes: int = 16 << 20
    part_bytes: int = 8 << 20

    def request_s(self, size_bytes: int) -> float:
        """Deadline of one attempt that sends so much."""
        return self.connect_s + self.read_s + size_bytes / self.slowest_bytes_s


def open_s3(parts: SplitResult, limits: S3Limits | None = None) -> Store:
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
    store = S3Store(
        parts.netloc, endpoint=endpoint, region=options.get("region", [""])[0], url=parts.geturl(), limits=limits
    )
    prefix = parts.path.strip("/")
    return PrefixStore(store, prefix + "/", owns=True) if prefix else store


@dataclass(slots=True)
class S3Store:
    """See the module's docstring. Belongs to the event loop that first uses it."""

    bucket: str
    endpoint: str = ""
    region: str = ""
    url: str = ""
    limits: S3Limits | None = None
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _client: Any = None
    _closed: bool = False

    def __post_init__(self) -> None:
        self.limits = self.limits or S3Limits()
        self.url = self.url or f"s3://{self.bucket}"

    @property
    def _limits(self) -> S3Limits:
        assert self.limits is not None
        return self.limits

    async def client(self) -> Any:
        """The S3 client, made at the first call."""
        async with self._lock:
            if self._closed:
                raise MisuseError(f"{self.url} is closed")
            if self._client is None:
                config = Config(
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    connect_timeout=self._limits.connect_s,
                    read_timeout=self._limits.read_s,
                    max_pool_connections=self._limits.connections,
                    signature_version="s3v4",
                    s3={"addressing_style": "path" if self.endpoint else "auto"},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )
                region = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
                try:
                    made = aioboto3.Session().client(
                        "s3", endpoint_url=self.endpoint or None, region_name=region or "us-east-1", config=config
                    )
                    self._client = await self._stack.enter_async_context(made)
                except (BotoCoreError, ValueError) as error:
                    raise StoreUnavailableError(f"{self.url}: {error}", hint="check the store URL") from error
            return self._client

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
        """See Store."""
        await probe_s3(self, self._multipart)

    # -------------------------------------------------------------------------------------------- reading

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        check_key(key)

        async def attempt() -> Stored:
            answer = await self._open(key, 0, "")
            expected, size = answer["Metadata"].get("sha256"), answer["ContentLength"]
            body = answer["Body"]
            try:
                if size > max_bytes:
                    raise too_large(key, self.url, size, max_bytes)
                data = bytearray()
                while chunk := await self._read(key, body, len(data), size):
                    data += chunk
            finally:
                body.close()
            actual = await asyncio.to_thread(digest_of, data)
            wanted = expected or sha256
            if wanted and actual != wanted:
                raise AgainError(
                    f"{len(data)} bytes with SHA-256 {actual[:16]}…, expected {wanted[:16]}…", corrupt=True
                )
            check_sha256(key, self.url, actual, sha256, len(data))
            return Stored(bytes(data), answer["ETag"])

        return await self._retry("get", key, attempt, size_bytes=None)

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        """See Store. A connection that breaks is taken up again where it broke."""
        check_key(key)
        digest, position, etag = hashlib.sha256(), 0, ""
        tries, last = 0, ""
        while True:
            try:
                answer = await self._retry("get", key, functools.partial(self._open, key, position, etag))
            except PreconditionError as error:
                raise StoreUnavailableError(f"{self.url}: {key} was replaced while it was read", key=key) from error
            etag, size = answer["ETag"], position + answer["ContentLength"]
            expected, body = answer["Metadata"].get("sha256"), answer["Body"]
            try:
                while chunk := await self._read(key, body, position, size):
                    digest.update(chunk)
                    position += len(chunk)
                    yield chunk
                break
            except AgainError as error:
                tries, last = tries + 1, str(error)
            finally:
                body.close()
            if tries >= self._limits.attempts:
                raise gave_up(self.url, "get", key, last, tries)
            await asyncio.sleep(min(self._limits.wait_initial_s * 2**tries, self._limits.wait_max_s))
        check_sha256(key, self.url, digest.hexdigest(), expected, position)
        check_sha256(key, self.url, digest.hexdigest(), sha256, position)

    async def _open(self, key: str, position: int, etag: str) -> Any:
        client = await self.client()
        extra: dict[str, str] = {"Range": f"bytes={position}-", "IfMatch": etag} if etag and position else {}
        async with asyncio.timeout(self._limits.request_s(0)):
            return await client.get_object(Bucket=self.bucket, Key=key, **extra)

    async def _read(self, key: str, body: Any, position: int, size: int) -> bytes:
        """The next chunk, b"" at the end. Raises AgainError if it breaks off, whatever the HTTP library calls that."""
        try:
            chunk: bytes = await body.read(CHUNK_BYTES)
        except TRANSPORT as error:
            cause = f"{type(error).__name__}: {error}"
            raise AgainError(f"the body broke off after {position} of {size} bytes ({cause[:200]})") from error
        if not chunk and position != size:
            raise AgainError(f"the body ended after {position} of {size} bytes")
        return chunk

    async def head(self, key: str) -> Entry:
        """See Store."""
        check_key(key)
        answer = await self._head(key)
        return Entry(key, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp())

    async def _head(self, key: str) -> Any:
        client = await self.client()
        return await self._retry("head", key, lambda: client.head_object(Bucket=self.bucket, Key=key))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """See Store. Held in memory and sorted, since not every server sorts."""
        check_prefix(prefix)
        client = await self.client()
        found: list[Entry] = []
        extra: dict[str, str] = {}
        while True:
            ask = dict(Bucket=self.bucket, Prefix=prefix, MaxKeys=1000, **extra)
            page = await self._retry("list", prefix, lambda ask=ask: client.list_objects_v2(**ask))  # type: ignore[misc]
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
        if len(view) > self._limits.multipart_from_bytes:
            digest = await asyncio.to_thread(digest_of, view)

            async def piece(start: int, size: int) -> bytes:
                return bytes(view[start : start + size])

            return await self._multipart.put(key, piece, len(view), digest)
        return await self._put(key, data, {})

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        check_key(key)
        try:
            return await self._put(key, data, {"IfNoneMatch": "*"})
        except PreconditionError as error:
            raise ConflictError(
                f"{self.url}: {key} exists already", key=key, hint="somebody else wrote it first; read it"
            ) from error

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        check_key(key)
        try:
            return await self._put(key, data, {"IfMatch": etag})
        except PreconditionError as error:
            raise ConflictError(
                f"{self.url}: {key} is not {etag}, which was read before, any more", key=key,
                hint="somebody else wrote it in the meantime; read it again",
            ) from error  # fmt: skip

    async def _put(self, key: str, data: Buffer, condition: Mapping[str, str]) -> str:
        client = await self.client()
        writer = uuid.uuid4().hex
        body = bytes(data)
        metadata = {"sha256": await asyncio.to_thread(digest_of, body), "writer": writer}

        async def attempt() -> str:
            answer = await client.put_object(Bucket=self.bucket, Key=key, Body=body, Metadata=metadata, **condition)
            return str(answer["ETag"])

        try:
            return await self._retry("put", key, attempt, size_bytes=len(body), unsure=bool(condition))
        except PreconditionError as error:
            if etag := await self.own_etag(key, writer):
                return etag
            if not condition:
                raise StoreUnavailableError(str(error), key=key, hint="check the store URL and the bucket") from error
            raise

    async def own_etag(self, key: str, writer: str) -> str:
        """The object's etag if `writer` wrote it, "" if it's somebody else's or isn't there."""
        try:
            answer = await self._head(key)
        except NotFoundError:
            return ""
        return str(answer["ETag"]) if answer["Metadata"].get("writer") == writer else ""

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store. Gathers the chunks in a temporary file first, since their digest is needed before the upload."""
        check_key(key)
        digest, size = hashlib.sha256(), 0
        try:
            with tempfile.NamedTemporaryFile(prefix="dcnr-") as file:
                async for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    await asyncio.to_thread(file.write, chunk)
                file.flush()
                check_sha256(key, "the stream to store", digest.hexdigest(), sha256, size)
                return await self._put_path(key, Path(file.name), size, digest.hexdigest())
        except OSError as error:
            raise StoreUnavailableError(
                f"{key} can't be gathered in {tempfile.gettempdir()}: {error.strerror or error}", key=key,
                hint="make room there, or set TMPDIR",
            ) from error  # fmt: skip

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        check_key(key)

        def look() -> tuple[int, str]:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return file.tell(), digest

        return await self._put_path(key, path, *(await asyncio.to_thread(look)))

    async def _put_path(self, key: str, path: Path, size: int, digest: str) -> str:
        if size <= self._limits.multipart_from_bytes:
            return await self._put(key, await asyncio.to_thread(path.read_bytes), {})

        def read(start: int, length: int) -> bytes:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(length)

        async def piece(start: int, length: int) -> bytes:
            return await asyncio.to_thread(read, start, length)

        return await self._multipart.put(key, piece, size, digest)

    @property
    def _multipart(self) -> Multipart:
        return Multipart(self.client, self.bucket, self._retry, self.own_etag, self._limits.part_bytes)

    async def delete(self, key: str) -> None:
        """See Store."""
        check_key(key)
        client = await self.client()
        with contextlib.suppress(NotFoundError):
            await self._retry("delete", key, lambda: client.delete_object(Bucket=self.bucket, Key=key))

    # -------------------------------------------------------------------------------------------- failures

    async def _retry(
        self, what: str, key: str, work: Callable[[], Awaitable[T]], *, size_bytes: int | None = 0, unsure: bool = False
    ) -> T:
        """`work` until it succeeds or fails for good; its errors become ours.

        `size_bytes`: what an attempt sends, for its deadline; None: it has deadlines of its own.
        """
        limits, tries = self._limits, 0
        try:
            async for attempt in stamina.retry_context(
                on=AgainError, attempts=limits.attempts, timeout=None, wait_initial=limits.wait_initial_s,
                wait_max=limits.wait_max_s, wait_jitter=limits.jitter_s,
            ):  # fmt: skip
                with attempt:
                    tries += 1
                    try:
                        async with asyncio.timeout(None if size_bytes is None else limits.request_s(size_bytes)):
                            return await work()
                    except (BotoCoreError, ClientError, aiohttp.ClientError, TimeoutError, OSError) as error:
                        raise explain(self.url, what, key, error) from error
        except AgainError as error:
            raise gave_up(self.url, what, key, str(error), tries, corrupt=error.corrupt, unsure=unsure) from error
        raise AssertionError("unreachable")
