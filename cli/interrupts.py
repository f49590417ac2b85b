"""Ctrl-C and SIGTERM as exceptions that can't get lost.

An exception raised by a signal's handler may be swallowed by whatever runs at that moment: an import, a destructor, a
callback out of C. So it is raised once more after `AGAIN_S`, and at `END_S` the process ends with the signal's exit
code, unless somebody has said by then that it is dealt with.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
AGAIN_S, END_S = 0.6, 1.5

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
        _start(AGAIN_S, lambda again: _thread.interrupt_main(signal.Signals(again)), number)
        _start(END_S, os._exit, code_of(_came[0]))
    raise Terminated if _came[0] == signal.SIGTERM else KeyboardInterrupt


def _start(seconds: float, what: Callable[[int], object], argument: int) -> None:
    timer = threading.Timer(seconds, what, (argument,))
    timer.daemon = True
    timer.start()
    _timers.append(timer)
