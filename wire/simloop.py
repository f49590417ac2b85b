"""Virtual time: an asyncio event loop, and a clock without asyncio, whose time jumps to the next thing there is to do.

Whole services run on `SimLoop` unmodified, if they take their time from `loop.time()`: hours pass in milliseconds, and
the same program with the same seeds does the same things in the same order. What runs in an executor runs at once, in
place. A thread of the program's own must be announced with `held()`: until it has reported back, time stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
from collections.abc import Callable, Iterator
from typing import Any


class DeadlockError(RuntimeError):
    """Nothing is scheduled and nothing can happen: whoever waits now waits for ever."""


class _Selector(selectors.DefaultSelector):
    """Real descriptors are looked at, but only waited for while somebody holds the time."""

    loop: SimLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        if self.loop.holders:
            return super().select(None)
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("every task waits and no timer is set")
        self.loop.advance(timeout)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; it begins at 0. Use `asyncio.Runner(loop_factory=SimLoop)` or `run_sim`."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self.holders = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def advance(self, seconds: float) -> None:
        """Let time pass; the loop calls it when nothing else is left to do."""
        scheduled: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        target = self._virtual_s + seconds
        self._virtual_s = max(target, scheduled[0].when()) if scheduled else target

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run it here and now: threads would make the order depend on chance."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Time stands still meanwhile: a thread works, and will call `call_soon_threadsafe`."""
        self.holders += 1
        try:
            yield
        finally:
            self.holders -= 1


def run_sim(main: Any) -> Any:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


class _Event:
    __slots__ = ("cancelled", "what")

    def __init__(self, what: Callable[[], None]) -> None:
        self.what = what
        self.cancelled = False

    def cancel(self) -> None:
        """Don't do it."""
        self.cancelled = True


class SimClock:
    """Virtual time without asyncio: calls at times, in order of time and then of being asked for."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, _Event]] = []

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        return self._now

    def call_at(self, when: float, what: Callable[[], None]) -> _Event:
        """Call `what` at that time, or next if it is past."""
        self._count += 1
        event = _Event(what)
        heapq.heappush(self._heap, (max(when, self._now), self._count, event))
        return event

    def step(self) -> bool:
        """Do the next thing. False if there is none."""
        while self._heap:
            when, _, event = heapq.heappop(self._heap)
            self._now = when
            if not event.cancelled:
                event.what()
                return True
        return False

    def run(self, until_s: float | None = None, *, stop: Callable[[], bool] = lambda: False) -> bool:
        """Do everything up to a time, or until `stop()`. Returns whether `stop()` held."""
        while not stop():
            if not self._heap or (until_s is not None and self._heap[0][0] > until_s):
                self._now = self._now if until_s is None else max(self._now, until_s)
                return stop()
            self.step()
        return True


class LoopClock:
    """The running event loop as a clock (a `SimLoop`, or a real one)."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop if loop is not None else asyncio.get_running_loop()

    def now(self) -> float:
        """The loop's time in seconds."""
        return self._loop.time()

    def call_at(self, when: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `what` at that time of the loop."""
        return self._loop.call_at(when, what)
