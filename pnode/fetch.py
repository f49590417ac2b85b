"""What a deployment gets from the store, and how far that is: every byte counts as it comes, so that nobody has to
guess whether a long preparation still moves.

A store that is away is tried again for a while. What was fetched stays in the session's memory, so the next try, of
this deployment or of one that takes its place, fetches only the rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pnode.memory import CutMemory, State
from storage.blobs import Blobs
from storage.checkpoints import Manifest, load_part, read_manifest
from storage.store import Store, StoreUnavailableError
from wire.messages import Part

T = TypeVar("T")

PARALLEL = 8
PATIENCE_S, MAX_PATIENCE_S = 0.25, 4.0


@dataclass(slots=True, eq=False)
class _Get:
    """One thing that is being got. `since`: when the store failed it, if nothing has come since then."""

    since: float | None = None
    text: str = ""
    limit: asyncio.Timeout | None = None


class Fetch:
    """The bytes of one preparation. `away_s`: how long a store may be away before it is given up."""

    def __init__(self, store: Store, clock: Callable[[], float], away_s: float) -> None:
        self._store = store
        self._clock = clock
        self.away_s = away_s
        self._gate = asyncio.Semaphore(PARALLEL)
        self.moved = 0
        """Bytes that have come; also grows while the fetched is put to use."""
        self.part_bytes = 0
        self.fetched = 0
        self.remembered = 0
        """States of VNodes that came from the store, and those that were in memory."""
        self._gets: set[_Get] = set()

    def _came(self, size: int) -> None:
        """Bytes, from whichever object: the store is not away."""
        self.moved += size
        for get in self._gets:
            get.since = None
            if get.limit is not None:
                get.limit.reschedule(None)

    @property
    def trouble(self) -> tuple[str, float]:
        """What the store said, and since when nothing comes from it; "" while it gives what it's asked for."""
        away = [(get.since, get.text) for get in self._gets if get.since is not None]
        since, text = min(away, default=(0.0, ""))
        return text, since

    async def blob(self, digest: str, max_bytes: int) -> bytes:
        """A small blob. Raises StoreError."""
        data = await self._patiently(lambda: Blobs(self._store).get(digest, max_bytes=max_bytes))
        self._came(len(data))
        return data

    async def blob_file(self, digest: str, path: Path) -> None:
        """A blob as a file, unless it is there. Raises StoreError."""
        await self._patiently(lambda: Blobs(self._store).fetch_to_file(digest, path, on_bytes=self._came))

    async def manifest(self, prefix: str, key: str, digest: str) -> Manifest:
        """A manifest. Raises StoreError."""
        found = await self._patiently(lambda: read_manifest(self._store, prefix, key, digest))
        self._came(1)
        return found

    async def state(self, prefix: str, step: int, part: Part, memory: CutMemory) -> State:
        """The state of one VNode after `step`: from memory, or else from the store. Raises StoreError."""
        kept = memory.find(step, part.vnode, part.digest)
        if kept is not None:
            self.remembered += 1
            return kept
        async with self._gate:
            state = await self._patiently(lambda: load_part(self._store, prefix, part, on_bytes=self._came))
        memory.add(step, part.vnode, state, part.digest)
        self.fetched += 1
        self.part_bytes += part.size_bytes
        return state

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        get = _Get()
        self._gets.add(get)
        try:
            return await self._persist(get, work)
        finally:
            self._gets.discard(get)

    async def _persist(self, get: _Get, work: Callable[[], Awaitable[T]]) -> T:
        """Try until the store was away for too long: counted from the first time that it failed."""
        patience, until, told = PATIENCE_S, None, StoreUnavailableError("the store gives nothing")
        while True:
            try:
                async with asyncio.timeout(None if until is None else max(0.0, until - self._clock())) as get.limit:
                    return await work()
            except TimeoutError as error:
                if get.limit is None or not get.limit.expired():
                    raise
                raise told from error
            except StoreUnavailableError as error:
                now, told = self._clock(), error
                until = now + self.away_s if until is None else until
                get.since, get.text = (now if get.since is None else get.since), str(error)
                if now + patience > until:
                    raise
            finally:
                get.limit = None
            await asyncio.sleep(patience * random.uniform(0.5, 1.0))
            patience = min(2 * patience, MAX_PATIENCE_S)
