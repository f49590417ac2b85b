"""How late the event loop is: a timer that notes by how much it was overslept. About ten wake-ups a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

EVERY_S = 0.1
KEPT = 3000


class LoopLag:
    """`take` gives the worst since the last call; `percentile` looks at the last five minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worst = 0.0
        self._seen: deque[float] = deque(maxlen=KEPT)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = self._clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            late = max(0.0, self._clock() - due)
            self._seen.append(late)
            self._worst = max(self._worst, late)

    def take(self) -> float:
        """The worst lag since the last call, in seconds."""
        worst, self._worst = self._worst, 0.0
        return worst

    def percentile(self, share: float) -> float:
        """The lag that so large a share of the measurements did not exceed."""
        found = sorted(self._seen)
        return found[min(len(found) - 1, int(share * len(found)))] if found else 0.0
