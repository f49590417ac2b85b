"""Ctrl-C and SIGTERM as exceptions that can't get lost.

An exception raised by a signal's handler may be swallowed by whatever runs at that moment. Where Python says so (a
destructor, a callback of an import's lock) it is raised again at once. Elsewhere it is raised once more after
`AGAIN_S`, and at `END_S` the process ends with the signal's exit code, unless somebody has said by then that it is
dealt with.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED, TERMINATED = 130, 143
AT_ONCE_S, AGAIN_S, END_S = 0.01, 0.6, 1.5

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_came: list[int] = []
_timers: list[threading.Timer] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


def code_of(number: int) -> int:
    """The exit code of a command that a signal ended."""
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED


def raise_on_signals() -> None:
    """From here on both signals raise, `KeyboardInterrupt` or `Terminated`, so that a command can clean up."""
    sys.unraisablehook = _swallowed
    for number in SIGNALS:
        signal.signal(number, _raise)


def dealt_with() -> None:
    """The exception has arrived, and whoever caught it now cleans up or ends the command."""
    while _timers:
        _timers.pop().cancel()


def came() -> int:
    """The exit code that a signal asks for; 0 if none came."""
    return code_of(_came[0]) if _came else 0


def _raise(number: int, _frame: FrameType | None) -> None:
    _came.append(number)
    if not _timers:
        _start(AGAIN_S, _interrupt, number)
        _start(END_S, os._exit, code_of(_came[0]))
    raise Terminated if _came[0] == signal.SIGTERM else KeyboardInterrupt


def _swallowed(what: UnraisableHookArgs) -> None:
    """Python could not hand an exception on, and would only print it."""
    if isinstance(what.exc_value, KeyboardInterrupt) and _came:
        _start(AT_ONCE_S, _interrupt, _came[0])  # not here: it would be raised, and swallowed, in this hook
    else:
        sys.__unraisablehook__(what)


def _interrupt(number: int) -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)  # a real signal, so that a system call ends too


def _start(seconds: float, what: Callable[[int], object], argument: int) -> None:
    timer = threading.Timer(seconds, what, (argument,))
    timer.daemon = True
    timer.start()
    _timers.append(timer)
