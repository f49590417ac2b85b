"""A store that fails at the n-th call: for loops that try every place at which a crash or an outage can happen."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from storage import Entry, Store, Stored, StoreUnavailableError
from storage.store import Buffer, Piece

T = TypeVar("T")


class Crash(BaseException):
    """The process died here; nothing catches it."""


class FaultyStore:
    """Passes calls on to `inner` until call number `fail_at` (1 is the first; 0: never).

    mode "before": that call does nothing; "after": it is carried out but its answer is lost; of a list or a stream the
    first item still comes. `crash`: the process dies
    there (every later call dies too); otherwise StoreUnavailableError, once or, with `lasting`, from there on.
    `struck` says whether the fault happened.
    """

    def __init__(
        self, inner: Store, *, fail_at: int = 0, mode: str = "before", crash: bool = True, lasting: bool = False
    ) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.mode = mode
        self.crash = crash
        self.lasting = lasting
        self.calls = 0
        self.log: list[str] = []
        self.struck = False

    @property
    def url(self) -> str:
        return self.inner.url

    def _begin(self, name: str, key: str) -> bool:
        """Count a call; whether it is to fail once it was carried out."""
        if self.struck and (self.crash or self.lasting):
            raise self._fault(name)
        self.calls += 1
        self.log.append(f"{name} {key}")
        if self.calls != self.fail_at:
            return False
        self.struck = True
        if self.mode == "before":
            raise self._fault(name)
        return True

    async def _call(self, name: str, key: str, work: Callable[[], Awaitable[T]]) -> T:
        fails = self._begin(name, key)
        result = await work()
        if fails:
            raise self._fault(name)
        return result

    async def _items(self, name: str, key: str, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        fails = self._begin(name, key)
        async with aclosing(items) as every:
            async for item in every:
                yield item
                if fails:
                    raise self._fault(name)
        if fails:
            raise self._fault(name)

    def _fault(self, name: str) -> BaseException:
        return Crash(name) if self.crash else StoreUnavailableError(f"planted failure in {name}")

    async def probe(self) -> None:
        await self.inner.probe()

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = 4 << 30) -> Stored:
        return await self._call("get", key, lambda: self.inner.get(key, sha256=sha256, max_bytes=max_bytes))

    async def get_range(self, key: str, offset: int, size_bytes: int, *, etag: str = "") -> Piece:
        work = lambda: self.inner.get_range(key, offset, size_bytes, etag=etag)  # type: ignore[attr-defined] # noqa: E731
        return await self._call("get_range", key, work)

    async def get_stream(self, key: str, *, sha256: str | None = None) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._items("get_stream", key, self.inner.get_stream(key, sha256=sha256))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def put(self, key: str, data: Buffer) -> str:
        return await self._call("put", key, lambda: self.inner.put(key, data))

    async def put_if_absent(self, key: str, data: Buffer) -> str:
        return await self._call("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    async def put_if_match(self, key: str, data: Buffer, etag: str) -> str:
        return await self._call("put_if_match", key, lambda: self.inner.put_if_match(key, data, etag))

    async def put_stream(self, key: str, chunks: AsyncIterable[bytes], *, sha256: str | None = None) -> str:
        return await self._call("put_stream", key, lambda: self.inner.put_stream(key, chunks, sha256=sha256))

    async def put_file(self, key: str, path: Path) -> str:
        return await self._call("put_file", key, lambda: self.inner.put_file(key, path))

    async def head(self, key: str) -> Entry:
        return await self._call("head", key, lambda: self.inner.head(key))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        async with aclosing(self._items("list", prefix, self.inner.list(prefix))) as entries:
            async for entry in entries:
                yield entry

    async def delete(self, key: str) -> None:
        await self._call("delete", key, lambda: self.inner.delete(key))

    async def close(self) -> None:
        await self.inner.close()
