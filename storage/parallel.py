"""Some of many at a time, all or the first error: nothing of it runs on after an error was raised.

Not by a TaskGroup: when one of its tasks fails it cancels the task that waits for it and, up to Python 3.12, leaves
that counted as cancelled for ever. The HTTP library then takes any later hitch in the same task for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


async def in_parallel(work: Callable[[A], Awaitable[R]], items: Iterable[A], at_once: int) -> list[R]:
    """The results, in the order of `items`. The first error ends the others and is raised as it is."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: A) -> R:
        async with gate:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        done: set[asyncio.Task[R]] = set()
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # an error that came after the first one is nobody's
