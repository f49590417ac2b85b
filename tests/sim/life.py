"""Processes in one event loop: a process can stand still, and after its death nothing of it ever runs again.

Every task, timer and callback of a process carries the process's `Life` in its context. The loop looks at it before it
runs anything: of a frozen life it is put aside until the thaw, of a dead one for good, with no `finally` and no
`except CancelledError`. So a kill is a kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections.abc import Callable
from enum import Enum
from typing import Any

from wire.simloop import DeadlockError, SimLoop


class Stand(Enum):
    """Whether a process runs."""

    RUNS = "runs"
    FROZEN = "frozen"
    OVER = "over"


class Life:
    """One process from its start to its end. `context`: in which all that it does runs. `held`: what was put aside."""

    __slots__ = ("boot", "context", "held", "machine", "name", "stand")

    def __init__(self, name: str, boot: int, machine: str) -> None:
        self.name = name
        self.boot = boot
        self.machine = machine
        self.stand = Stand.RUNS
        self.held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(LIFE.set, self)

    @property
    def over(self) -> bool:
        """It is dead, or has ended."""
        return self.stand is Stand.OVER


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
"""The process that runs now; None: the world itself."""

_RUNS = Stand.RUNS


class _Handle(asyncio.Handle):
    """A callback that runs only if its process does."""

    __slots__ = ("life",)

    def __init__(self, callback: Any, args: Any, loop: Any, context: Any, life: Life) -> None:
        super().__init__(callback, args, loop, context)
        self.life = life

    def _run(self) -> None:
        if self.life.stand is _RUNS:
            super()._run()
        else:
            self.life.held.append(self)


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ("life",)

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any, life: Life | None) -> None:
        super().__init__(when, callback, args, loop, context)
        self.life = life

    def _run(self) -> None:
        life = self.life
        if life is None or life.stand is _RUNS:
            super()._run()
        else:
            life.held.append(self)


class WorldLoop(SimLoop):
    """Virtual time for many processes; nothing outside the program is ever waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, int, _TimerHandle]] = []
        self._count = 0
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(self._note)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def thaw(self, life: Life) -> None:
        """Run what became due meanwhile."""
        held, life.held = life.held, []
        self._ready.extend(held)  # type: ignore[attr-defined]

    # ------------------------------------------------------------ what asyncio asks of a loop

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See asyncio; in the life of `context`, or of the caller."""
        life = LIFE.get() if context is None else context.get(LIFE)
        handle = (
            asyncio.Handle(callback, args, self, context)
            if life is None
            else _Handle(callback, args, self, context, life)
        )
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self._virtual_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio; in the life of `context`, or of the caller."""
        life = LIFE.get() if context is None else context.get(LIFE)
        handle = _TimerHandle(when, callback, args, self, context, life)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time comes."""

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise DeadlockError("every task waits and no timer is set")
            self._virtual_s = max(self._virtual_s, timers[0][0])
        now = self._virtual_s
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def finish(self) -> None:
        """Cancel every task, of all lives, and let them end; then close. What they do has no effect any more."""
        try:
            for _ in range(20):
                tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(Exception):
                    self.run_until_complete(asyncio.wait(tasks, timeout=60))
        finally:
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            self._timers.clear()
            self.close()
