"""Damage is believed once it is there again: what a line or a server spoilt on the way reads otherwise next time.

An object at rest that is damaged gives the same wrong bytes to `SAME` reads in a row. Reads that give other bytes each
time tell nothing about the object: then the store is as good as away, and nobody may go on without what is in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from storage.store import CorruptError, StoreUnavailableError

T = TypeVar("T")

SAME = 3
READS = 10
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Before the second read, and before the last ones; with jitter."""


class _Doubt(Exception):
    """This read was damaged; the next one may not be."""

    def __init__(self, cause: CorruptError) -> None:
        super().__init__(str(cause))
        self.cause = cause


async def read_again(read: Callable[[], Awaitable[T]]) -> T:
    """What `read` gives, which is called anew after a `CorruptError`, some times and with pauses.

    Raises CorruptError that is to be believed; StoreUnavailableError if each read was damaged otherwise; what `read`
    raises.
    """
    try:
        return await read()
    except CorruptError as error:
        if error.settled:
            raise
        first = error
    import stamina  # costs a client's start a tenth of a second, and is needed this seldom
    from stamina.instrumentation import LoggingOnRetryHook, set_on_retry_hooks

    set_on_retry_hooks([LoggingOnRetryHook])  # others write to standard output
    last, same = _mark(first), 1
    pause = FIRST_PAUSE_S
    try:
        async for attempt in stamina.retry_context(
            on=_Doubt, attempts=READS, timeout=None, wait_initial=pause, wait_max=LONGEST_PAUSE_S, wait_jitter=pause
        ):
            with attempt:
                if attempt.num == 1:
                    raise _Doubt(first)
                try:
                    return await read()
                except CorruptError as error:
                    same = same + 1 if _mark(error) == last else 1
                    last = _mark(error)
                    if same >= SAME or error.settled:
                        raise
                    raise _Doubt(error) from error
    except _Doubt as doubt:
        raise StoreUnavailableError(
            f"each of {READS} reads was damaged, and each otherwise: {doubt.cause.message}", key=doubt.cause.key,
            hint="what the store has may be whole: check the connection to it, then try again",
        ) from doubt.cause  # fmt: skip
    raise AssertionError("unreachable")


def _mark(error: CorruptError) -> str:
    """Equal for equal bytes."""
    return error.found or error.message
