"""Virtual time: what takes hours passes at once, in the same order each time, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from wire.simloop import DeadlockError, SimClock, SimLoop, run_sim


def test_time_jumps():
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    start = time.monotonic()
    assert run_sim(main()) == pytest.approx(86_400)
    assert time.monotonic() - start < 5


def test_timeouts_and_order():
    async def main() -> list[str]:
        seen: list[str] = []

        async def say(word: str, after: float) -> None:
            await asyncio.sleep(after)
            seen.append(word)

        async with asyncio.TaskGroup() as group:
            group.create_task(say("c", 3))
            group.create_task(say("a", 1))
            group.create_task(say("b", 2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() == pytest.approx(8)
        return seen

    assert run_sim(main()) == ["a", "b", "c"]


def test_waiting_for_ever_is_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    loop = SimLoop()
    task = loop.create_task(main())
    with pytest.raises(DeadlockError, match="every task waits"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_executors_run_in_place():
    async def main() -> tuple[int, int]:
        return await asyncio.to_thread(threading.get_ident), threading.get_ident()

    here, there = run_sim(main())
    assert here == there


def test_time_stands_still_while_a_thread_works():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(5, lambda: None)

        def work() -> None:
            time.sleep(0.05)
            loop.call_soon_threadsafe(done.set)

        with loop.held():
            thread = threading.Thread(target=work)
            thread.start()
            await done.wait()
        thread.join()
        assert loop.time() == 0.0

    run_sim(main())


def test_the_clock_keeps_the_order_of_asking():
    clock = SimClock()
    seen: list[int] = []
    for number in range(5):
        clock.call_at(1.0, lambda number=number: seen.append(number))
    clock.call_at(0.5, lambda: seen.append(9)).cancel()
    assert not clock.run(2.0)
    assert seen == [0, 1, 2, 3, 4]
    assert clock.now() == 2.0
    assert not clock.step()
