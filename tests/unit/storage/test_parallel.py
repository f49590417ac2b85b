"""All or the first error, and the task that waits is as it was."""

from __future__ import annotations

import asyncio

import pytest

from storage import NotFoundError
from storage.parallel import in_parallel


async def test_results_come_in_order_and_no_more_than_so_many_run_at_once() -> None:
    running = most = 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 if number % 2 else 0)
        running -= 1
        return number * number

    assert await in_parallel(work, range(20), 3) == [number * number for number in range(20)]
    assert most == 3
    assert await in_parallel(work, [], 3) == []


async def test_the_first_error_ends_the_others_and_leaves_nothing_behind() -> None:
    """Nor is the task counted as cancelled, as a TaskGroup leaves it: aiohttp would end it at the next hitch."""
    begun: list[int] = []
    ended: list[int] = []

    async def work(number: int) -> None:
        if number == 2:
            raise NotFoundError("gone")
        begun.append(number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    task = asyncio.current_task()
    assert task is not None
    for _ in range(2):
        begun.clear()
        ended.clear()
        with pytest.raises(NotFoundError, match="gone"):
            await in_parallel(work, range(8), 4)
        assert sorted(ended) == sorted(begun)
        assert {0, 1, 3} <= set(ended) < set(range(8))
        assert task.cancelling() == 0
    assert asyncio.all_tasks() == {task}


async def test_whoever_cancels_it_cancels_all() -> None:
    ended = 0

    async def work(number: int) -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            ended += 1

    task = asyncio.ensure_future(in_parallel(work, range(5), 3))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == 3
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_parallel(work, range(5), 3)
    assert asyncio.all_tasks() == {asyncio.current_task()}
