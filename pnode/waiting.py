"""How the numerical libraries' threads wait for each other; to be said before torch is imported."""

from __future__ import annotations

import os


def sleep_while_waiting() -> None:
    """Threads that wait sleep instead of spinning, unless the environment says otherwise.

    Spinning is faster by a little on idle cores, and slower by far where anything else wants them: see decision 0050.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
