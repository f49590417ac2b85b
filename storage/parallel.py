"""Some of many at a time, all or the first error: nothing of it runs on after an error was raised."""

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

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]
