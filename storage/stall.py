"""Stall timers: a transfer that moves goes on for ever, one that stands still ends.

There is no total limit, for a slow line is no fault, and nobody can say how long an object may take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class StallError(TimeoutError):
    """Nothing moved for so long."""


class Stall:
    """How far one attempt got, and until when its next byte may take."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.moved_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + limit_s

    def moved(self, size_bytes: int, *, more_s: float = 0.0) -> None:
        """So many bytes more; the next may take the limit and `more_s`. Any thread may call it."""
        self.moved_bytes += size_bytes
        self._until = self._loop.time() + self.limit_s + more_s

    def again(self) -> None:
        """The transfer begins again at its first byte."""
        self.moved_bytes = 0

    def left_s(self) -> float:
        """Seconds until it counts as standing still."""
        return self._until - self._loop.time()


@contextlib.asynccontextmanager
async def watched(stall: Stall) -> AsyncIterator[None]:
    """End what is done inside when `stall` runs out. Raises `StallError`."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    stall.moved(0)

    def look() -> None:
        nonlocal timer
        if (left_s := stall.left_s()) > 0:
            timer = loop.call_later(left_s, look)
        else:
            timeout.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as timeout:
            timer = loop.call_later(stall.limit_s, look)
            yield
    except TimeoutError as error:
        if timeout.expired():
            raise StallError(f"nothing moved for {stall.limit_s:g} s") from error
        raise
    finally:
        if timer is not None:
            timer.cancel()
