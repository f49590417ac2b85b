"""One thread per device that owns all VNode state there: nothing needs a lock, and the event loop never computes.

Work comes in lanes (one per session, and one for each session's inference); a lane is first in, first out, and the
lanes take turns, so that sessions interleave fairly. Results go back to the event loop in batches: one wake-up however
many are done. The thread says what it is doing and since when; whether that is too long, or whether it still lives at
all, is judged from outside (`status`), so that a dead or hung thread can't look healthy. What a dead thread was doing,
what waits in its lanes, and what comes later, is answered with `ComputeDeadError`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wire.errors import DCNRError

Work = Callable[[], Any]
Then = Callable[[Any, BaseException | None], None]
TASKS = "/proc/self/task"
"""Where Linux lists the threads of this process."""


class ComputeDeadError(DCNRError):
    """The compute thread has ended, so an action will never be done."""


@dataclass(frozen=True, slots=True)
class ComputeStatus:
    """state: idle, busy, stalled (one action takes longer than the limit), dead. `doing`: the action, or ""."""

    state: str
    seconds: float
    doing: str


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    work: Work
    then: Then


class ComputeThread:
    """See the module. `submit`, `drop`, `status` and `stop` are called from the event loop's thread.

    `prepare` runs first in the thread (thread count, warm-up). `wake` is the loop's `call_soon_threadsafe`.
    """

    def __init__(
        self, name: str, *, wake: Callable[[Callable[[], None]], Any], prepare: Work | None = None,
        stalled_s: float = 30.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = name
        self.stalled_s = stalled_s
        self.busy_s = 0.0
        self._wake = wake
        self._clock = clock
        self._prepare = prepare
        self._lanes: OrderedDict[str, deque[_Item]] = OrderedDict()
        self._ready = threading.Condition()
        self._stopping = False
        self._results: deque[tuple[Then, Any, BaseException | None]] = deque()
        self._scheduled = False
        self._doing = ""
        self._item: _Item | None = None
        self._since = 0.0
        self._death = ""
        self._dead = False
        self._thread = threading.Thread(target=self._run, name=f"compute-{name}", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, lane: str, name: str, work: Work, then: Then) -> None:
        """Queue `work` in `lane`; `then(result, error)` is called in the event loop."""
        item = _Item(name, work, then)
        with self._ready:
            if not self._dead:
                self._lanes.setdefault(lane, deque()).append(item)
                self._ready.notify()
                return
        self._hand_back(item.then, None, self._why())

    def drop(self, lane: str) -> int:
        """Forget what is queued in a lane and not begun; returns how many."""
        with self._ready:
            return len(self._lanes.pop(lane, ()))

    def status(self) -> ComputeStatus:
        """What the thread does now."""
        if not self._dead and not self._lives():
            self._died(f"{self._doing or 'nothing'} was being done")
        if self._dead:
            return ComputeStatus("dead", 0.0, self._death)
        doing, since = self._doing, self._since
        if not doing:
            return ComputeStatus("idle", 0.0, "")
        seconds = self._clock() - since
        return ComputeStatus("stalled" if seconds > self.stalled_s else "busy", seconds, doing)

    def _lives(self) -> bool:
        """Python's word for it, and the system's: a thread that was taken away did not tell Python."""
        if not self._thread.is_alive():
            return False
        number = self._thread.native_id
        return number is None or not os.path.isdir(TASKS) or os.path.isdir(f"{TASKS}/{number}")

    def _died(self, how: str) -> None:
        """Nobody works here any more: whoever waits is told."""
        with self._ready:
            if self._dead or self._stopping:
                return
            self._dead, self._death = True, how
            left = [item for items in self._lanes.values() for item in items]
            if self._item is not None:
                left.insert(0, self._item)
            self._lanes.clear()
        for item in left:
            self._hand_back(item.then, None, self._why())

    def _why(self) -> ComputeDeadError:
        return ComputeDeadError(f"the compute thread is dead: {self._death}", hint="see this PNode's log")

    def stop(self, timeout_s: float) -> bool:
        """Finish the running action, drop the rest; False if it did not end in time."""
        with self._ready:
            self._stopping = True
            self._lanes.clear()
            self._ready.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------ in the compute thread

    def _run(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            while (item := self._next()) is not None:
                self._do(item)
                del item
        except BaseException as error:  # whatever ends this thread, the rest of the process goes on without it
            self._died(f"{self._doing or 'its start'} ended it: {error!r}")

    def _do(self, item: _Item) -> None:
        self._since = self._clock()
        self._doing, self._item = item.name, item
        result: Any = None
        error: BaseException | None = None
        try:
            result = item.work()
        except Exception as caught:
            error = caught
        except BaseException as caught:
            self._item = None
            self._hand_back(item.then, None, caught)
            raise
        self.busy_s += self._clock() - self._since
        self._doing, self._item = "", None
        self._hand_back(item.then, result, error)

    def _next(self) -> _Item | None:
        with self._ready:
            while not self._stopping:
                for lane, items in self._lanes.items():
                    if items:
                        item = items.popleft()
                        self._lanes.move_to_end(lane)
                        return item
                self._ready.wait()
            return None

    def _hand_back(self, then: Then, result: Any, error: BaseException | None) -> None:
        self._results.append((then, result, error))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._wake(self._deliver)
            except RuntimeError:
                self._results.clear()  # the loop is closed: nobody is left to tell

    # ------------------------------------------------------------------------------------ in the event loop

    def _deliver(self) -> None:
        self._scheduled = False
        try:
            while self._results:
                then, result, error = self._results.popleft()
                then(result, error)
        finally:
            if self._results:  # one of them raised: the others are told all the same
                self._wake(self._deliver)
