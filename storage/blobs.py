"""Blobs: bytes stored once under their own digest, so the same bytes are never kept twice and each read is verified."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Collection
from pathlib import Path

from storage.keys import DIGEST, blob_key, check_digest
from storage.reread import read_again
from storage.store import (
    MAX_GET_BYTES,
    Buffer,
    ConflictError,
    CorruptError,
    Entry,
    NotFoundError,
    Store,
    digest_of,
)
from storage.transfer import OnBytes, fetch_verified

GRACE_S = 3600.0
"""Blobs younger than this are never collected: a client stores them just before a session names them."""


class Blobs:
    """The blobs of a store. Any number of processes may put the same blob at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, data: Buffer) -> str:
        """Store bytes; their digest. A copy that can be seen to be damaged is replaced."""
        digest = digest_of(data)
        key = blob_key(digest)
        if not await self.has(digest, len(data)):
            try:
                await self._store.put_if_absent(key, data)
            except ConflictError:
                if not await self.has(digest, len(data)):
                    await self._store.put(key, data)
        return digest

    async def put_file(self, path: Path) -> str:
        """Store a file's contents; their digest."""

        def read() -> tuple[str, int]:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size

        digest, size = await asyncio.to_thread(read)
        key = blob_key(digest)
        if not await self.has(digest, size):
            await self._store.put_file(key, path)
        return digest

    async def get(self, digest: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """The blob, verified. Raises NotFoundError, CorruptError."""
        key = blob_key(digest)
        return (await read_again(lambda: self._store.get(key, sha256=digest, max_bytes=max_bytes))).data

    async def has(self, digest: str, size_bytes: int | None = None) -> bool:
        """Whether the blob is there and, as far as that shows without fetching it, whole.

        Its size shows, and on local disk, where an etag is the SHA-256 of what is there now, its digest.
        """
        try:
            entry = await self._store.head(blob_key(digest))
        except NotFoundError:
            return False
        seen = entry.etag if DIGEST.fullmatch(entry.etag) else digest
        return seen == digest and size_bytes in (None, entry.size_bytes)

    async def fetch_to_file(self, digest: str, path: Path, *, on_bytes: OnBytes | None = None) -> None:
        """Write the verified blob to `path`, whole or not at all; does nothing if those bytes are there already.

        Raises NotFoundError, CorruptError, StoreUnavailableError (also if the disk of `path` is full). `on_bytes`: see
        storage.transfer.
        """
        key = blob_key(digest)
        if await asyncio.to_thread(_file_digest, path) != digest:
            await fetch_verified(self._store, key, digest, path, on_bytes=on_bytes)

    async def collect(
        self, keep: Collection[str], *, now_s: float, dry_run: bool, grace_s: float = GRACE_S
    ) -> list[Entry]:
        """Delete the blobs that `keep` does not name and that are older than `grace_s`; what was, or would be, deleted.

        `now_s`: seconds since 1970 by the caller's clock; should it be ahead of the store's, the store's counts, or a
        wrong clock would make blobs look old that were stored a moment ago. `keep` must name the blobs of all networks
        and sessions of the store.
        """
        wanted = {check_digest(digest) for digest in keep}
        others: list[Entry] = []
        async for entry in self._store.list("blobs/"):
            name = entry.key.rpartition("/")[2]
            if DIGEST.fullmatch(name) and name not in wanted and now_s - entry.modified_s > grace_s:
                others.append(entry)
        if others:
            now_s = min(now_s, await self._store_now())
        found = [entry for entry in others if now_s - entry.modified_s > grace_s]
        if not dry_run:
            for entry in found:
                await self._store.delete(entry.key)
        return found

    async def _store_now(self) -> float:
        """What the clock is by which the store notes when an object was written."""
        key = f"probe-{uuid.uuid4().hex}"
        await self._store.put(key, b"")
        try:
            return (await self._store.head(key)).modified_s
        finally:
            await self._store.delete(key)


def _file_digest(path: Path) -> str | None:
    if path.is_symlink():
        raise CorruptError(f"{path} is a symbolic link", hint="remove it")
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
