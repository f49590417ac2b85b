"""A store in memory, as every process of the world sees it: one server, and a handle for each process.

A request travels to the server, takes effect there, and its answer travels back. A process that dies in between leaves
a request behind that still takes effect or doesn't, as the seed says; its answer reaches nobody. Faults are looked up
per request, by who asks and what for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from storage.keys import check_key, check_prefix
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
from tests.sim.life import LIFE, Life, WorldLoop
from tests.sim.record import Recorder

URL = "sim://store"
CLIENT_GIVES_UP_S = 40.0
"""After so long without an answer a client reports the store as away; what it asked for may still happen."""

WRITES = frozenset({"put", "if_absent", "if_match", "delete"})


@dataclass(slots=True)
class StoreFault:
    """What goes wrong, for whom ("": everybody), with which chance, until when.

    kind: unavailable, slow, stall, lost_before, lost_after, late, cut, flip, full, read_only, conflict.
    """

    kind: str
    where: str
    until: float
    chance: float = 1.0
    count: int = 1 << 30
    seconds: float = 0.0

    def hits(self, life: Life | None, action: str) -> bool:
        """Whether it concerns this request."""
        if self.where and (life is None or life.machine != self.where):
            return False
        if self.kind in ("lost_after", "late", "full", "conflict", "read_only"):
            return action in WRITES and not (self.kind == "full" and action == "delete")
        if self.kind in ("cut", "flip"):
            return action == "get"
        return True


@dataclass(slots=True)
class _Kept:
    data: bytes
    etag: str
    modified_s: float


class SimStore:
    """The server."""

    def __init__(self, loop: WorldLoop, seed: int, recorder: Recorder, wall: Callable[[], float]) -> None:
        self.loop = loop
        self.random = random.Random(f"store/{seed}")
        self.recorder = recorder
        self.wall = wall
        self.objects: dict[str, _Kept] = {}
        self.faults: list[StoreFault] = []
        self.latency_s = (0.0005, 0.004)
        self.gone = False

    def fault(self, life: Life | None, action: str) -> StoreFault | None:
        """The first fault that hits this request."""
        if not self.faults:
            return None
        now = self.loop.time()
        self.faults = [fault for fault in self.faults if fault.until > now and fault.count > 0]
        for fault in self.faults:
            if fault.hits(life, action) and (fault.chance >= 1.0 or self.random.random() < fault.chance):
                fault.count -= 1
                return fault
        return None

    # ------------------------------------------------------------ requests

    async def request(self, action: str, key: str, effect: Callable[[], Any]) -> Any:
        """Carry `effect` to the server and its result, or the exception that it raises, back."""
        life = LIFE.get()
        if self.gone:
            raise StoreUnavailableError(f"{URL}: {key}: the world has ended", key=key)
        future: asyncio.Future[Any] = self.loop.create_future()
        fault = self.fault(life, action)
        there, back = self.random.uniform(*self.latency_s), self.random.uniform(*self.latency_s)
        outcome: tuple[Any, BaseException | None] = (None, None)
        kind = fault.kind if fault is not None else ""

        def arrive() -> None:
            """In the world's own context: the server works whatever becomes of those who asked."""
            nonlocal outcome
            if life is not None and life.over and self.random.random() < 0.5:
                return
            try:
                outcome = (effect(), None)
            except StoreError as error:
                outcome = (None, error)

        def answer() -> None:
            if future.done():
                return
            value, error = outcome
            if kind == "lost_after":
                error = _away(key, "the answer was lost; it may or may not have been stored")
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        def refuse() -> None:
            if not future.done():
                future.set_exception(_refusal(kind, key))

        if kind in ("unavailable", "lost_before", "full", "read_only", "conflict"):
            self._at(there + back, refuse)
        elif kind == "late":
            self._at(there + back, refuse)
            self._at(there + back + self.random.uniform(0.01, 3.0), arrive)
        elif kind == "stall":
            assert fault is not None
            left = max(fault.until - self.loop.time(), 0.0)
            self._at(left + there, arrive)
            if left < CLIENT_GIVES_UP_S:
                self._at(left + there + back, answer)
            else:
                self._at(CLIENT_GIVES_UP_S, refuse)
        else:
            if kind == "slow":
                there += self.random.uniform(0.1, 2.0)
                back += self.random.uniform(0.1, 2.0)
            self._at(there, arrive)
            self._at(there + back, answer)
        try:
            value = await future
        finally:
            if future.done() and not future.cancelled():
                future.exception()  # it may be that nobody waits any more
        if kind in ("cut", "flip") and isinstance(value, Stored):
            return _spoilt(value, kind, key, self.random)
        return value

    def _at(self, delay_s: float, what: Callable[[], None]) -> None:
        self.loop.call_later(delay_s, what, context=_NOBODY)

    # ------------------------------------------------------------ what the server does

    def read(self, key: str, max_bytes: int) -> Stored:
        """Raises NotFoundError."""
        kept = self._kept(key)
        if len(kept.data) > max_bytes:
            raise too_large(key, URL, len(kept.data), max_bytes)
        return Stored(kept.data, kept.etag)

    def entry(self, key: str) -> Entry:
        """Raises NotFoundError."""
        kept = self._kept(key)
        return Entry(key, len(kept.data), kept.etag, kept.modified_s)

    def entries(self, prefix: str) -> list[Entry]:
        """In ascending order."""
        return [self.entry(key) for key in sorted(self.objects) if key.startswith(prefix)]

    def write(self, life: Life | None, how: str, key: str, data: bytes, etag: str = "") -> str:
        """Raises ConflictError."""
        kept = self.objects.get(key)
        if how == "if_absent" and kept is not None:
            raise ConflictError(f"{URL}: {key} exists already", key=key, hint="somebody else wrote it first; read it")
        if how == "if_match" and (kept is None or kept.etag != etag):
            found = kept.etag[:16] if kept is not None else "gone"
            raise ConflictError(
                f"{URL}: {key} is {found}, no longer the {etag[:16]} that was read before", key=key,
                hint="somebody else wrote it in the meantime; read it again",
            )  # fmt: skip
        digest = digest_of(data)
        self.objects[key] = _Kept(data, digest, self.wall())
        self.recorder.wrote(life, how, key, digest, data)
        return digest

    def remove(self, life: Life | None, key: str) -> None:
        """Nothing happens if it isn't there."""
        if self.objects.pop(key, None) is not None:
            self.recorder.wrote(life, "delete", key, "", b"")

    def _kept(self, key: str) -> _Kept:
        kept = self.objects.get(key)
        if kept is None:
            raise NotFoundError(f"{URL}: there is no {key}", key=key)
        return kept


def _away(key: str, text: str, hint: str = "check that the store runs and can be reached") -> StoreUnavailableError:
    return StoreUnavailableError(f"{URL}: {key}: {text}", key=key, hint=hint)


def _refusal(kind: str, key: str) -> StoreUnavailableError:
    match kind:
        case "full":
            return _away(key, "No space left on device; 0 bytes are free", "make room, or use `dcnr gc`")
        case "read_only":
            return _away(key, "Read-only file system", "the folder must be writable by this user")
        case "conflict":
            return _away(key, "ConditionalRequestConflict (HTTP 409); gave up after 6 attempts")
        case "stall" | "late":
            return _away(key, "no answer in time; it may or may not have been stored")
        case _:
            return _away(key, "ServiceUnavailable SlowDown (HTTP 503); gave up after 6 attempts")


def _spoilt(stored: Stored, kind: str, key: str, pick: random.Random) -> Stored:
    """A body that broke off, or came with a wrong bit, on its way; the object itself is whole."""
    if kind == "cut":
        if pick.random() < 0.5:
            raise _away(key, f"the body broke off after {len(stored.data) // 2} of {len(stored.data)} bytes")
        return Stored(stored.data[: pick.randrange(len(stored.data))] if stored.data else b"", stored.etag)
    if not stored.data:
        return stored
    changed = bytearray(stored.data)
    changed[pick.randrange(len(changed))] ^= 1 << pick.randrange(8)
    return Stored(bytes(changed), stored.etag)


def _nobody() -> Any:
    import contextvars

    context = contextvars.Context()
    context.run(LIFE.set, None)
    return context


_NOBODY = _nobody()


class Handle:
    """`storage.store.Store` for one process (the one in whose life it is called)."""

    def __init__(self, server: SimStore) -> None:
        self._server = server

    @property
    def url(self) -> str:
        """See Store."""
        return URL

    async def probe(self) -> None:
        """See Store."""
        life = LIFE.get()

        def look() -> None:
            self._server.write(life, "put", PROBE_KEY, b"probe")
            self._server.remove(life, PROBE_KEY)

        await self._server.request("put", PROBE_KEY, look)

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = MAX_GET_BYTES) -> Stored:
        """See Store."""
        check_key(key)
        stored: Stored = await self._server.request("get", key, lambda: self._server.read(key, max_bytes))
        if sha256 is not None:
            check_sha256(key, URL, digest_of(stored.data), sha256, len(stored.data))
        return stored

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        """See Store."""
        check_key(key)
        stored: Stored = await self._server.request("get", key, lambda: self._server.read(key, MAX_GET_BYTES))
        half = len(stored.data) // 2
        yield stored.data[:half]
        yield stored.data[half:]
        check_sha256(key, URL, digest_of(stored.data), sha256, len(stored.data))

    async def put(self, key: str, data: Buffer) -> str:
        """See Store."""
        return await self._write("put", key, bytes(data))

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        """See Store."""
        return await self._write("if_absent", key, bytes(data))

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        """See Store."""
        return await self._write("if_match", key, bytes(data), etag)

    async def _write(self, how: str, key: str, data: bytes, etag: str = "") -> str:
        check_key(key)
        life, server = LIFE.get(), self._server
        found: str = await server.request(how, key, lambda: server.write(life, how, key, data, etag))
        return found

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        """See Store."""
        data = b"".join([chunk async for chunk in chunks])
        check_sha256(key, "the stream to store", digest_of(data), sha256, len(data))
        return await self._write("put", key, data)

    async def put_file(self, key: str, path: Path) -> str:
        """See Store."""
        return await self._write("put", key, path.read_bytes())  # noqa: ASYNC240

    async def head(self, key: str) -> Entry:
        """See Store."""
        check_key(key)
        entry: Entry = await self._server.request("head", key, lambda: self._server.entry(key))
        return entry

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """See Store."""
        check_prefix(prefix)
        found: list[Entry] = await self._server.request("list", prefix, lambda: self._server.entries(prefix))
        for entry in found:
            yield entry

    async def delete(self, key: str) -> None:
        """See Store."""
        check_key(key)
        life, server = LIFE.get(), self._server
        await server.request("delete", key, lambda: server.remove(life, key))

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


PROBE_KEY = "probe-sim"

__all__ = ["URL", "CorruptError", "Handle", "SimStore", "StoreFault"]
