"""Stands in for a compute thread: the same lanes and turns, real torch arithmetic, and a virtual time for each action.

It can die or hang. A frozen process's action ends after the thaw; a dead one's never does.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from pnode.compute_thread import ComputeDeadError, ComputeStatus
from tests.sim.life import WorldLoop

Then = Callable[[Any, BaseException | None], None]


class ThreadDiedError(BaseException):
    """What ends a compute thread."""


class SimCompute:
    """See the module; the interface is `pnode.compute_thread.ComputeThread`'s."""

    def __init__(self, name: str, loop: WorldLoop, pick: random.Random, slowest_s: float, stalled_s: float) -> None:
        self.name = name
        self.stalled_s = stalled_s
        self.busy_s = 0.0
        self.slowness = 1.0
        self._loop = loop
        self._pick = pick
        self._slowest_s = slowest_s
        self._lanes: OrderedDict[str, deque[tuple[str, Callable[[], Any], Then]]] = OrderedDict()
        self._doing = ""
        self._since = 0.0
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: tuple[str, Callable[[], Any], Then] | None = None
        self.gone = ""
        """How it ended; nobody knows before they look."""
        self.death = ""
        self.hangs = False

    # ------------------------------------------------------------ ComputeThread

    def start(self) -> None:
        """Begin to work."""

    def submit(self, lane: str, name: str, work: Callable[[], Any], then: Then) -> None:
        """Queue work."""
        if self.death:
            self._answer(then, self._why())
            return
        self._lanes.setdefault(lane, deque()).append((name, work, then))
        self._next()

    def drop(self, lane: str) -> int:
        """Forget what is queued in a lane and not begun."""
        return len(self._lanes.pop(lane, ()))

    def status(self) -> ComputeStatus:
        """What it does now."""
        if self.gone and not self.death:
            self._found_dead()
        if self.death:
            return ComputeStatus("dead", 0.0, self.death)
        if not self._doing:
            return ComputeStatus("idle", 0.0, "")
        seconds = self._loop.time() - self._since
        return ComputeStatus("stalled" if seconds > self.stalled_s else "busy", seconds, self._doing)

    def stop(self, timeout_s: float) -> bool:
        """Drop what is queued; False if an action does not end."""
        self._stopped = True
        self._lanes.clear()
        return not self.hangs

    # ------------------------------------------------------------ faults

    def die(self, *, in_action: bool) -> None:
        """The thread ends; in the middle of an action, if it has one, as a MemoryError of C code would end it."""
        running = self._running
        self.gone = f"{self._doing or 'nothing'} ended the thread"
        if self._timer is not None:
            self._timer.cancel()
        if in_action and running is not None:
            self._running = None
            self._answer(running[2], ThreadDiedError("the thread died"))
            self._found_dead()

    def _found_dead(self) -> None:
        """Whoever waits is told."""
        self.death = self.gone
        left = [item for items in self._lanes.values() for item in items]
        if self._running is not None:
            left.insert(0, self._running)
        self._running = None
        self._lanes.clear()
        for _, _, then in left:
            self._answer(then, self._why())

    def _why(self) -> ComputeDeadError:
        return ComputeDeadError(f"the compute thread is dead: {self.death}", hint="see this PNode's log")

    def _answer(self, then: Then, error: BaseException) -> None:
        self._loop.call_soon(then, None, error)

    def hang(self) -> None:
        """The action that runs now, or the next one, never ends."""
        self.hangs = True
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ the thread

    def _next(self) -> None:
        if self._running is not None or self.gone or self._stopped:
            return
        for lane, items in self._lanes.items():
            if items:
                self._running = items.popleft()
                self._lanes.move_to_end(lane)
                break
        if self._running is None:
            return
        self._doing, self._since = self._running[0], self._loop.time()
        if not self.hangs:
            delay = self._pick.uniform(0.2, 1.0) * self._slowest_s * self.slowness
            self._timer = self._loop.call_later(delay, self._end)

    def _end(self) -> None:
        assert self._running is not None
        _, work, then = self._running
        value: Any = None
        error: BaseException | None = None
        try:
            value = work()
        except Exception as caught:
            error = caught
        self.busy_s += self._loop.time() - self._since
        self._running, self._doing, self._timer = None, "", None
        then(value, error)
        self._next()
