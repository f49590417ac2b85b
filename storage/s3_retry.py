"""How long to wait for an S3 server, and when to ask it again.

A request may be asked again some times, with jitter. Each attempt ends when it stands still, never because it is large:
what moves goes on. A transfer that got further before it broke begins to count anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import stamina
import stamina.instrumentation
from botocore.exceptions import BotoCoreError, ClientError

from storage.s3_errors import AgainError, explain, gave_up
from storage.stall import Stall, watched
from storage.store import StoreUnavailableError

T = TypeVar("T")

SEND_BUFFER_BYTES = 4 << 20
"""So much that was sent may still lie in this machine, not seen to move (Linux: net.ipv4.tcp_wmem)."""
SEND_BYTES = 64 << 10

stamina.instrumentation.set_on_retry_hooks([stamina.instrumentation.LoggingOnRetryHook])


@dataclass(frozen=True, slots=True)
class S3Limits:
    """Bounds of time, memory and connections."""

    attempts: int = 6
    wait_initial_s: float = 0.1
    wait_max_s: float = 3.0
    jitter_s: float = 0.3
    connect_s: float = 5.0
    stall_s: float = 30.0
    complete_s: float = 300.0  # a server may take so long to put the parts of an upload together
    queue_s: float = 600.0  # all connections may be in use for so long
    slowest_bytes_s: float = 50_000.0  # how long what lies in the send buffer may take
    connections: int = 10
    multipart_from_bytes: int = 16 << 20
    part_bytes: int = 8 << 20
    stale_upload_s: float = 7 * 86_400.0  # older uploads in parts are taken for abandoned

    def wait_s(self, tries: int) -> float:
        """How long to wait after so many attempts in a row that moved nothing."""
        return min(self.wait_initial_s * 2.0 ** (tries - 1), self.wait_max_s) + random.uniform(0, self.jitter_s)

    def unseen_s(self, sent_bytes: int) -> float:
        """How long what was sent last may still be on its way out of this machine."""
        return min(sent_bytes, SEND_BUFFER_BYTES) / self.slowest_bytes_s


class Retries:
    """The attempts of one store. At most `limits.connections` run at once; waiting for that is no standing still."""

    def __init__(self, url: str, limits: S3Limits) -> None:
        self.url = url
        self.limits = limits
        self._gate = asyncio.Semaphore(limits.connections)

    @contextlib.asynccontextmanager
    async def connection(self, key: str) -> AsyncIterator[None]:
        """The right to use one connection. Raises StoreUnavailableError if all are in use for too long."""
        try:
            async with asyncio.timeout(self.limits.queue_s):
                await self._gate.acquire()
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"{self.url}: {key}: all {self.limits.connections} connections were in use for "
                f"{self.limits.queue_s:g} s", key=key, hint="the store is too slow for what is asked of it",
            ) from error  # fmt: skip
        try:
            yield
        finally:
            self._gate.release()

    async def attempt(
        self, what: str, key: str, work: Callable[[Stall], Awaitable[T]], *, stall_s: float | None = None
    ) -> T:
        """`work` once. Raises AgainError, PreconditionError, StoreError."""
        stall = Stall(self.limits.stall_s if stall_s is None else stall_s)
        try:
            async with watched(stall):
                return await work(stall)
        except (BotoCoreError, ClientError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise explain(self.url, what, key, error, moved_bytes=stall.moved_bytes) from error

    async def __call__(
        self, what: str, key: str, work: Callable[[Stall], Awaitable[T]], *,
        stall_s: float | None = None, unsure: bool = False,
    ) -> T:  # fmt: skip
        """`work` until it succeeds or fails for good; its errors become ours.

        `unsure`: a conditional write, whose outcome nobody knows when the last answer is lost.
        """
        limits, tries = self.limits, 0
        try:
            async for attempt in stamina.retry_context(
                on=AgainError, attempts=limits.attempts, timeout=None, wait_initial=limits.wait_initial_s,
                wait_max=limits.wait_max_s, wait_jitter=limits.jitter_s,
            ):  # fmt: skip
                with attempt:
                    tries += 1
                    async with self.connection(key):
                        return await self.attempt(what, key, work, stall_s=stall_s)
        except AgainError as error:
            raise gave_up(self.url, what, key, str(error), tries, corrupt=error.corrupt, unsure=unsure) from error
        raise AssertionError("unreachable")


class SentBody(io.BytesIO):
    """Bytes to send that tell how far they got: small reads, each counted as what was sent before it."""

    def __init__(self, data: bytes, stall: Stall, limits: S3Limits) -> None:
        super().__init__(data)
        self._stall = stall
        self._limits = limits

    def read(self, size: int | None = -1, /) -> bytes:
        """At most SEND_BYTES, however many are asked for."""
        chunk = super().read(SEND_BYTES if size is None or size < 0 else min(size, SEND_BYTES))
        self._stall.moved(len(chunk), more_s=self._limits.unseen_s(self.tell()))
        return chunk

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Back to the first byte, the transfer begins again."""
        if offset == 0 and whence == 0:
            self._stall.again()
        return super().seek(offset, whence)
