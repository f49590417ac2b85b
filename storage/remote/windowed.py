"""Carries out what a transfer asks for, as much at once as its window allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

from storage.remote.pieces import Ask
from storage.remote.window import Sent, Window

R = TypeVar("R")


class Transfer(Protocol):
    """A `Download` or an `Upload`."""

    @property
    def done(self) -> bool:
        """Nothing is left to do."""

    def asks(self, window_bytes: int) -> list[Ask]:
        """What to do now."""


async def in_window(
    transfer: Transfer, window: Window, work: Callable[[Ask], Awaitable[R]]
) -> AsyncGenerator[tuple[Ask, R], None]:
    """Each piece and what `work` gave for it, as they come; the caller tells the transfer. Raises the first error."""
    now = asyncio.get_running_loop().time
    running: dict[asyncio.Future[R], tuple[Ask, Sent]] = {}
    try:
        while not transfer.done:
            for ask in transfer.asks(window.size_bytes):
                running[asyncio.ensure_future(work(ask))] = ask, window.sent(now())
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in running if each.done()]:
                ask, sent = running.pop(task)
                result = task.result()
                window.arrived(sent, ask.size_bytes, now())
                yield ask, result
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task in running:
            if not task.cancelled():
                task.exception()  # one that came after the first is nobody's
