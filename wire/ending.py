"""How long a daemon may take to end, for the daemons that keep to it and for the command that waits for them.

A PNode or orchestrator that gets a signal has `END_S` for its whole end: its parts share that time, and whatever still
hangs then (a disk, a thread of some library) is left behind. Who ended it waits for `GRACE_S` before it kills, so that
only a process that can't even run its timer is killed.
"""

from __future__ import annotations

import os
import sys
import threading

END_S = 8.0
GRACE_S = 1.5 * END_S
CLOSING_S = 2.5
"""Of `END_S`, what is kept for the last part: to close the bus (1.5 s at most) and the store, and to leave."""


def end_in_time(name: str, end_s: float = END_S) -> None:
    """This process has that long from now on to end in good order; then it ends with code 1, whatever hangs."""

    def over() -> None:
        text = f"{name}: could not end in good order within {end_s:g} s, ended all the same"
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(end_s, over)
    timer.daemon = True
    timer.start()
