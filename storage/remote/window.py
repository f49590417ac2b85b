"""How much may be under way: twice what the line holds, as the chunks that arrive tell. Pure; times are passed in.

The line holds rate x round trip. Rate: the fastest of the last chunks. Round trip: the shortest of the whole transfer,
since all later ones also wait behind what is under way by this very window. At first the window is the least there may
be, and each round trip doubles it until the rate grows no more; twice, so that a line may get twice as long meanwhile.
What is under way when a line is cut has to be sent again, so a window that is too large costs more than memory.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

HIGHEST_BYTES = 8 << 20
RATES = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A chunk that is under way: when it was asked for or sent, and what had arrived by then."""

    at_s: float
    arrived_bytes: int


class Window:
    """See the module."""

    def __init__(self, chunk_bytes: int, highest_bytes: int = HIGHEST_BYTES) -> None:
        self._lowest = 2 * chunk_bytes
        self._highest = max(highest_bytes, self._lowest)
        self._arrived = 0
        self._rates: deque[float] = deque(maxlen=RATES)
        self._round_trip_s = math.inf

    def sent(self, now: float) -> Sent:
        """A chunk sets out; keep the mark until it arrives."""
        return Sent(now, self._arrived)

    def arrived(self, sent: Sent, size_bytes: int, now: float) -> None:
        """It has arrived."""
        self._arrived += size_bytes
        took_s = max(now - sent.at_s, 1e-6)
        self._rates.append((self._arrived - sent.arrived_bytes) / took_s)
        self._round_trip_s = min(self._round_trip_s, took_s)

    @property
    def size_bytes(self) -> int:
        """So much may be under way now."""
        if not self._rates:
            return self._lowest
        held = max(self._rates) * self._round_trip_s
        return int(min(max(2 * held, self._lowest), self._highest))
