"""Who may be joined to whom by this process, and with which tickets. Pure: time is passed in, sockets are numbers.

A stream joins two processes that can't dial each other. Each of the two gets a ticket of its own, good for one
connection within `TICKET_S`; when both have come, the bytes are passed on. What they say is CURVE from end to end: a
ticket that somebody else sees gets him a connection to one who does not let him in.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

TICKET_S = 30.0
IDLE_S = 300.0
TICKET_CHARS = 32


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What one process does for others."""

    streams: int = 256
    streams_per_peer: int = 24  # three lanes to eight others
    waiting: int = 64  # connections that have not shown a ticket yet
    ticket_wait_s: float = 5.0
    buffer_bytes: int = 256 << 10  # per direction
    idle_s: float = IDLE_S


@dataclass(slots=True)
class Stream:
    """Two ends; `here`: the connections that have come."""

    ends: tuple[str, str]
    tickets: tuple[str, str]
    until: float
    here: dict[int, int]  # which end: its connection


class Desk:
    """The tickets and streams of one relay."""

    def __init__(
        self, limits: RelayLimits | None = None, draw: Callable[[], str] = lambda: secrets.token_hex(16)
    ) -> None:
        self.limits = limits or RelayLimits()
        self._draw = draw
        self._streams: list[Stream] = []

    def __len__(self) -> int:
        return len(self._streams)

    def problem(self, one: str, other: str, now: float) -> str:
        """Why these two are not joined now; "" if they may be."""
        self.expire(now)
        if one == other:
            return "a relay joins two different processes"
        if len(self._streams) >= self.limits.streams:
            return f"{len(self._streams)} streams are relayed already"
        for name in (one, other):
            count = sum(name in stream.ends for stream in self._streams)
            if count >= self.limits.streams_per_peer:
                return f"{count} streams of {name} are relayed already"
        return ""

    def open(self, one: str, other: str, now: float) -> tuple[str, str]:
        """A ticket for each; only if there is no `problem`."""
        tickets = self._draw(), self._draw()
        self._streams.append(Stream((one, other), tickets, now + TICKET_S, {}))
        return tickets

    def present(self, ticket: str, connection: int, now: float) -> Stream | None:
        """A connection shows a ticket: its stream, or None for no ticket, a used one or one that's too old."""
        for stream in self._streams:
            for end, expected in enumerate(stream.tickets):
                if hmac.compare_digest(expected.encode(), ticket.encode()):
                    if now >= stream.until or end in stream.here:
                        return None
                    stream.here[end] = connection
                    return stream
        return None

    def close(self, stream: Stream) -> None:
        """It has ended."""
        if stream in self._streams:
            self._streams.remove(stream)

    def expire(self, now: float) -> list[Stream]:
        """Streams that did not come together in time; their connections are to be closed."""
        late = [stream for stream in self._streams if len(stream.here) < 2 and now >= stream.until]
        for stream in late:
            self._streams.remove(stream)
        return late

    def expel(self, admitted: Callable[[str], bool]) -> list[Stream]:
        """Streams of those who are let in no longer; their connections are to be closed."""
        gone = [stream for stream in self._streams if not all(map(admitted, stream.ends))]
        for stream in gone:
            self._streams.remove(stream)
        return gone
