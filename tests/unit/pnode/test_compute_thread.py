from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pnode.compute_thread import ComputeThread


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    loop = asyncio.get_running_loop()
    found = ComputeThread("cpu", wake=loop.call_soon_threadsafe, stalled_s=0.05)
    found.start()
    yield found
    found.stop(5.0)


async def outcome(compute: ComputeThread, lane: str, work: object) -> tuple[object, BaseException | None]:
    future: asyncio.Future[tuple[object, BaseException | None]] = asyncio.get_running_loop().create_future()
    compute.submit(lane, lane, work, lambda value, error: future.set_result((value, error)))  # type: ignore[arg-type]
    return await future


async def test_results_and_errors_come_back_in_the_loop(compute: ComputeThread) -> None:
    assert await outcome(compute, "a", lambda: threading.current_thread().name) == ("compute-cpu", None)
    value, error = await outcome(compute, "a", lambda: 1 / 0)
    assert value is None
    assert isinstance(error, ZeroDivisionError)
    assert compute.status().state == "idle"


async def test_lanes_take_turns_and_keep_their_order(compute: ComputeThread) -> None:
    gate, seen = threading.Event(), []
    done = asyncio.Event()
    compute.submit("x", "gate", gate.wait, lambda value, error: None)
    for number in range(3):
        for lane in "ab":
            compute.submit(
                lane, lane, lambda lane=lane, number=number: seen.append(f"{lane}{number}"), lambda v, e: None
            )
    compute.submit("b", "last", lambda: None, lambda value, error: done.set())
    gate.set()
    await done.wait()
    assert seen == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_a_dropped_lane_is_not_done(compute: ComputeThread) -> None:
    gate, seen = threading.Event(), []
    compute.submit("x", "gate", gate.wait, lambda value, error: None)
    compute.submit("a", "a", lambda: seen.append("a"), lambda value, error: None)
    assert compute.drop("a") == 1
    gate.set()
    await outcome(compute, "b", lambda: None)
    assert seen == []


async def test_a_hung_action_is_stalled_and_named(compute: ComputeThread) -> None:
    gate = threading.Event()
    compute.submit("a", "F0 of step 1", gate.wait, lambda value, error: None)
    await asyncio.sleep(0.1)
    status = compute.status()
    assert (status.state, status.doing) == ("stalled", "F0 of step 1")
    assert status.seconds > 0.05
    gate.set()


async def test_a_thread_that_ended_is_dead_and_says_what_it_did(compute: ComputeThread) -> None:
    def end() -> None:
        raise SystemExit(3)

    _, error = await outcome(compute, "a", end)
    assert isinstance(error, SystemExit)
    compute._thread.join(5)
    status = compute.status()
    assert status.state == "dead"
    assert "a ended the thread: SystemExit(3)" in status.doing


async def test_many_results_wake_the_loop_few_times() -> None:
    loop = asyncio.get_running_loop()
    wakes = []

    def wake(what: object) -> None:
        wakes.append(what)
        loop.call_soon_threadsafe(what)  # type: ignore[arg-type]

    compute = ComputeThread("cpu", wake=wake)
    gate, done = threading.Event(), asyncio.Event()
    seen = []
    compute.submit("a", "gate", gate.wait, lambda value, error: None)
    for number in range(50):
        compute.submit("a", "n", lambda number=number: number, lambda value, error: seen.append(value))
    compute.submit("a", "last", lambda: None, lambda value, error: done.set())
    compute.start()
    gate.set()
    time_blocked = threading.Event()
    time_blocked.wait(0.2)
    await done.wait()
    compute.stop(5.0)
    assert seen == list(range(50))
    assert len(wakes) < 10
