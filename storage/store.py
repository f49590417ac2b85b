"""What every store does, and how it fails.

Semantics, the same for each implementation (tests/integration/storage runs one suite over all of them):

- An object is replaced whole or not at all: a reader sees the old bytes or the new ones.
- When `put…` has returned, the object survives a crash of any process or machine that leaves the store's disk.
- An etag changes whenever the bytes do. `put_if_absent` and `put_if_match` let exactly one of several writers win.
- `delete` of a key that isn't there is no error.
- `list` gives keys in ascending order; each object that existed throughout the listing is in it exactly once.
- Keys are checked (storage.keys) before anything is opened or asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from storage.keys import check_folder, check_key, check_prefix
from storage.limits import GET_BYTES
from wire.errors import RemoteError

Buffer = bytes | bytearray | memoryview

MAX_GET_BYTES = GET_BYTES

CHUNK_BYTES = 1 << 20
"""Chunks of `get_stream`."""


class StoreError(RemoteError):
    """A store could not do what was asked; `key` is the object's key, "" where it is about the store itself."""

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class NotFoundError(StoreError):
    """There is no object of that key."""


class ConflictError(StoreError):
    """A conditional write lost: the object exists already, or is not the one that was read before."""


class CorruptError(StoreError):
    """The stored bytes are not those that were written. `found`: digest of what was read, "" if that is not known."""

    def __init__(self, message: str, *, key: str = "", hint: str = "", found: str = "") -> None:
        super().__init__(message, key=key, hint=hint)
        self.found = found
        self.settled = False
        """It was read again already, and was the same: see storage.reread."""


class StoreUnavailableError(StoreError):
    """The store does not answer, is full, or lacks a right or a feature. What was asked may be tried again."""

    exit_code = 69


class ClockError(StoreUnavailableError):
    """The store refuses what this machine signs, because its clock is wrong. `ahead_s`: by so much; 0: not known."""

    def __init__(self, where: str, key: str, ahead_s: float) -> None:
        minutes = f"~{abs(ahead_s) / 60:.0f} min "
        off = (
            "not the store's"
            if not ahead_s
            else f"off by {minutes}({'ahead of' if ahead_s > 0 else 'behind'} the store's)"
        )
        super().__init__(
            f"{where}: the clock of this machine is {off}, so the store refuses its requests", key=key,
            hint="set the clock (timedatectl set-ntp true); the store itself is well, and nothing is lost",
        )  # fmt: skip
        self.ahead_s = ahead_s


@dataclass(frozen=True, slots=True)
class Stored:
    """An object's bytes and the etag they had."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of an object. `size_bytes`, `etag`, `sha256`: of the whole one; `sha256` is "" if it is not known."""

    data: bytes
    size_bytes: int
    etag: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as listed. `modified_s`: when it was last written, by the store's clock, seconds since 1970."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Store(Protocol):
    """Objects by key; see the module's docstring. Every method raises StoreError's children and BadKeyError only."""

    @property
    def url(self) -> str:
        """The URL it was opened with; never holds a secret."""

    async def probe(self) -> None:
        """Check that all that DCNR needs works here. Raises StoreUnavailableError that says what does not."""

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """The whole object. Raises NotFoundError; CorruptError if its digest isn't `sha256` or it is too large."""

    def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes]:
        """The object in chunks. Raises as `get`, a wrong digest only at the end: use no byte before that."""

    async def put(self, key: str, data: Buffer) -> str:
        """Write or replace; the new etag."""

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """Write if there is no such object; the etag. Raises ConflictError."""

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """Replace the object that has this etag; the new etag. Raises ConflictError, also when it's gone."""

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """Write from chunks; nothing is stored if they break off or have another digest than `sha256`."""

    async def put_file(self, key: str, path: Path) -> str:
        """Write the contents of a local file."""

    async def head(self, key: str) -> Entry:
        """Size and etag. Raises NotFoundError."""

    def list(self, prefix: str) -> AsyncGenerator[Entry]:
        """All objects whose key begins with `prefix`."""

    async def delete(self, key: str) -> None:
        """Remove the object if it's there."""

    async def close(self) -> None:
        """Release connections. Idempotent."""

    async def __aenter__(self) -> Self:
        """Nothing is opened yet."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""


class RangedStore(Store, Protocol):
    """A store that also gives pieces of objects: what a storage service can stand on."""

    async def get_range(self, key: str, offset: int, size_bytes: int, *, etag: str = "") -> Piece:
        """Up to `size_bytes` bytes from `offset` on, fewer only at the end. They are not verified, the whole has to be.

        Raises NotFoundError; ConflictError if `etag` is given and the object has another one by now.
        """


def digest_of(data: Buffer) -> str:
    """Lower-case hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def check_sha256(key: str, where: str, actual: str, expected: str | None, size_bytes: int) -> None:
    """Raises CorruptError unless `expected` is None or equals `actual`."""
    if expected is not None and actual != expected:
        raise CorruptError(
            f"{where}: {key} is corrupt: {size_bytes} bytes with SHA-256 {actual[:16]}…, expected {expected[:16]}…",
            key=key,
            hint="the stored object was changed or damaged; restore it from a copy, or use an older checkpoint",
            found=actual,
        )


def replaced(key: str, where: str) -> ConflictError:
    """The error for an object that is not the one any more of which a piece was asked for."""
    return ConflictError(f"{where}: {key} was replaced while it was read", key=key, hint="read it again")


def too_large(key: str, where: str, size_bytes: int, max_bytes: int) -> CorruptError:
    """The error for an object above the reader's limit."""
    return CorruptError(f"{where}: {key} has {size_bytes} bytes, at most {max_bytes} are allowed here", key=key)


class PrefixStore:
    """A view of one folder of a store: its keys are relative, and no key of another folder can be named or listed.

    Closing the view leaves the store open, unless it owns it.
    """

    def __init__(self, store: Store, prefix: str, *, owns: bool = False) -> None:
        self._store = store
        self._prefix = check_folder(prefix)
        self._owns = owns

    @property
    def url(self) -> str:
        """The whole store's URL."""
        return self._store.url

    async def probe(self) -> None:
        """See Store."""
        await self._store.probe()

    def _full(self, key: str) -> str:
        return check_key(self._prefix + check_key(key))

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        return await self._store.get(self._full(key), sha256=sha256, max_bytes=max_bytes)

    def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes]:
        """See Store."""
        return self._store.get_stream(self._full(key), sha256=sha256)

    async def get_range(self, key: str, offset: int, size_bytes: int, *, etag: str = "") -> Piece:
        """See RangedStore; only of a view of such a store."""
        ranged: RangedStore = self._store  # type: ignore[assignment]
        return await ranged.get_range(self._full(key), offset, size_bytes, etag=etag)

    async def put(self, key: str, data: Buffer) -> str:
        """See Store."""
        return await self._store.put(self._full(key), data)

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        return await self._store.put_if_absent(self._full(key), data)

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        return await self._store.put_if_match(self._full(key), data, etag)

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store."""
        return await self._store.put_stream(self._full(key), chunks, sha256=sha256)

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        return await self._store.put_file(self._full(key), path)

    async def head(self, key: str) -> Entry:
        """See Store."""
        entry = await self._store.head(self._full(key))
        return self._relative(entry)

    async def list(self, prefix: str) -> AsyncGenerator[Entry]:
        """See Store."""
        check_prefix(prefix)
        async for entry in self._store.list(self._prefix + prefix):
            yield self._relative(entry)

    def _relative(self, entry: Entry) -> Entry:
        return Entry(entry.key.removeprefix(self._prefix), entry.size_bytes, entry.etag, entry.modified_s)

    async def delete(self, key: str) -> None:
        """See Store."""
        await self._store.delete(self._full(key))

    async def close(self) -> None:
        """See Store."""
        if self._owns:
            await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
