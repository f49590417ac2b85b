from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from pnode.compute_thread import ComputeDeadError, ComputeStatus, ComputeThread


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
    assert "a ended it: SystemExit(3)" in status.doing


async def test_whoever_waits_for_a_dead_thread_is_told(compute: ComputeThread) -> None:
    """What was queued behind the action that ended it, and what comes later."""
    gate = threading.Event()

    def end() -> None:
        gate.wait()
        raise SystemExit(3)

    queue = [("a", end), ("a", print), ("b", print)]
    answers = [asyncio.ensure_future(outcome(compute, lane, work)) for lane, work in queue]
    await asyncio.sleep(0)
    gate.set()
    _, first = await answers[0]
    assert isinstance(first, SystemExit), "it is told what ended it, once"
    for answer in [*answers[1:], asyncio.ensure_future(outcome(compute, "c", print))]:
        value, error = await answer
        assert value is None
        assert isinstance(error, ComputeDeadError)
        assert "SystemExit(3)" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="the thread is taken away by the C library")
async def test_a_thread_that_was_taken_away_is_dead() -> None:
    """Python believes that it is alive; the system knows better."""
    loop = asyncio.get_running_loop()
    compute = ComputeThread("cpu", wake=loop.call_soon_threadsafe)
    compute.start()
    await outcome(compute, "b", print)
    leave = ctypes.CDLL(None).pthread_exit
    lost: list[BaseException | None] = []
    compute.submit("a", "F0 of step 1", lambda: leave(0), lambda value, error: lost.append(error))
    queued = asyncio.ensure_future(outcome(compute, "a", print))
    for _ in range(200):
        if compute.status().state == "dead":
            break
        await asyncio.sleep(0.02)
    assert compute.status() == ComputeStatus("dead", 0.0, "F0 of step 1 was being done")
    _, error = await queued
    assert isinstance(error, ComputeDeadError)
    assert [type(each) for each in lost] == [ComputeDeadError], "and so is who waits for what was being done"


async def test_a_thread_that_can_not_begin_is_dead() -> None:
    loop = asyncio.get_running_loop()
    compute = ComputeThread("cpu", wake=loop.call_soon_threadsafe, prepare=lambda: 1 / 0)
    compute.start()
    _, error = await outcome(compute, "a", print)
    assert isinstance(error, ComputeDeadError)
    assert "ZeroDivisionError" in compute.status().doing


async def test_a_receiver_that_fails_does_not_keep_results_from_others(compute: ComputeThread) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)
    gate, done = threading.Event(), asyncio.Event()
    compute.submit("a", "gate", gate.wait, lambda value, error: None)

    def fail(value: object, error: object) -> None:
        raise ValueError("odd")

    compute.submit("a", "first", print, fail)
    compute.submit("a", "second", print, lambda value, error: done.set())
    gate.set()
    async with asyncio.timeout(5):
        await done.wait()


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
