"""One lane of the link between two boots: what was sent and not acknowledged, what has come and in which order.

Pure: no sockets, no clock; time is passed in. Invariants:

- `SendLane` numbers parcels from 0 without gaps. A parcel stays in `flying` until it is acknowledged; whatever is in
  `flying` was transmitted at least once, whatever is in `waiting` never was.
- A parcel is transmitted again only on evidence that it is missing: three parcels transmitted later have arrived, or a
  ping transmitted later was answered, or it arrived damaged. Time alone only makes a ping. So a peer that merely stands
  still is never sent anything twice, and costs no more than the window.
- `ReceiveLane` hands over each number once, in order. What comes early waits in a bounded buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from wire.codec import Payload
from wire.errors import DCNRError
from wire.limits import ACK_RANGES, Limits
from wire.packets import Kind

REORDER = 3
"""Parcels transmitted later that must have arrived before one counts as lost."""

PINGS = 8
"""Pings whose answers are still understood: on a slow line several are under way."""


class QueueFull(DCNRError):
    """The bytes queued for a peer exceed the limit: it is slower than we send, or it stands still."""


class Parcel(msgspec.Struct, eq=False):
    """What is sent reliably as one packet. `fields`: the header's after the sequence number; `label`: for people."""

    kind: Kind
    fields: tuple[Any, ...]
    payloads: Sequence[Payload]
    size: int
    label: str
    last: bool = True  # of its message
    seq: int = -1
    order: int = -1
    transmissions: int = 0
    damaged: int = 0
    digests: list[int] | None = None


@dataclass(slots=True)
class SendLane:
    """The sending end of a lane."""

    limits: Limits
    waiting: deque[Parcel] = field(default_factory=deque)
    flying: dict[int, Parcel] = field(default_factory=dict)
    flying_bytes: int = 0
    next_seq: int = 0
    order: int = 0
    ping: int = 0
    ping_orders: dict[int, int] = field(default_factory=dict)  # of the last pings: what was transmitted before
    stall_s: float = 0.0
    stall_at: float | None = None
    progress_at: float = 0.0  # when the peer last showed that it takes what this lane sends

    @property
    def base(self) -> int:
        """The lowest number that is not acknowledged."""
        return next(iter(self.flying)) if self.flying else self.next_seq

    def pump(self, now: float) -> list[Parcel]:
        """Take from `waiting` what the window allows; the caller transmits it."""
        ready: list[Parcel] = []
        limits = self.limits
        while self.waiting and len(self.flying) < limits.window_packets:
            parcel = self.waiting[0]
            if self.flying and self.flying_bytes + parcel.size > limits.window_bytes:
                break
            self.waiting.popleft()
            parcel.seq = self.next_seq
            self.next_seq += 1
            self.flying[parcel.seq] = parcel
            self.flying_bytes += parcel.size
            self._transmitted(parcel)
            ready.append(parcel)
        if ready and self.stall_at is None:
            self._restart(now)
        return ready

    def _transmitted(self, parcel: Parcel) -> None:
        parcel.order = self.order
        parcel.transmissions += 1
        self.order += 1

    def _restart(self, now: float) -> None:
        self.stall_s = self.limits.stall_s
        self.stall_at = now + self.stall_s if self.flying else None
        self.progress_at = now

    def acked_below(self, below: int, now: float) -> list[Parcel]:
        """The peer has stored everything below this number. Returns what is done with."""
        done: list[Parcel] = []
        flying = self.flying
        while flying:
            seq = next(iter(flying))
            if seq >= below:
                break
            parcel = flying.pop(seq)
            self.flying_bytes -= parcel.size
            done.append(parcel)
        if done:
            self._restart(now)
        return done

    def acked_beyond(
        self,
        done: Sequence[Parcel],
        ranges: Sequence[tuple[int, int]],
        damaged: Sequence[int],
        ping: int,
        now: float,
    ) -> tuple[list[Parcel], list[Parcel]]:
        """What the rest of an Ack says, after `acked_below` gave `done`.

        Returns (further parcels done with, parcels to transmit again).
        """
        flying = self.flying
        further: list[Parcel] = []
        for first, last in ranges:
            for seq in range(max(first, self.base), min(last, self.next_seq - 1) + 1):
                parcel = flying.pop(seq, None)
                if parcel is not None:
                    self.flying_bytes -= parcel.size
                    further.append(parcel)
        # Of a parcel transmitted twice nobody can tell which one arrived: it proves nothing about what went in between.
        once = (parcel.order for parcel in (*done, *further) if parcel.transmissions == 1)
        lost_before = max(once, default=-1) - REORDER + 1
        if ping in self.ping_orders:
            lost_before = max(lost_before, self.ping_orders[ping])
            self.stall_s = self.limits.stall_s
            self.progress_at = now
        if further or (ping and flying):
            self.stall_at = now + self.limits.stall_s if flying else None
        again = [parcel for parcel in flying.values() if parcel.order < lost_before]
        for seq in damaged:
            parcel = flying.get(seq)
            if parcel is not None:
                parcel.damaged += 1
                if parcel not in again:
                    again.append(parcel)
        for parcel in again:
            self._transmitted(parcel)
        return further, again

    def stalled(self, now: float) -> int:
        """The number of a ping to send if there was no progress for too long, else 0. Backs off."""
        if self.stall_at is None or now < self.stall_at:
            return 0
        self.ping += 1
        self.ping_orders[self.ping] = self.order
        self.ping_orders.pop(self.ping - PINGS, None)
        self.stall_s = min(self.stall_s * 2, self.limits.stall_max_s)
        self.stall_at = now + self.stall_s
        return self.ping


class Arrival(Enum):
    """What a number that arrives is to the lane."""

    NEW = 0
    DUPLICATE = 1
    TOO_FAR = 2


Item = TypeVar("Item")


@dataclass(slots=True)
class ReceiveLane(Generic[Item]):
    """The receiving end of a lane. Items are whatever the caller stores per number."""

    limits: Limits
    next_seq: int = 0
    early: dict[int, tuple[Item, int]] = field(default_factory=dict)
    early_bytes: int = 0
    since_packets: int = 0
    since_bytes: int = 0
    ack_at: float | None = None  # when the Ack is due
    answer_ping: int = 0
    damaged: list[int] = field(default_factory=list)

    def arrival(self, seq: int, size: int) -> Arrival:
        """Whether number `seq` is new, known or beyond what can be kept."""
        if seq == self.next_seq:
            return Arrival.NEW
        if seq < self.next_seq or seq in self.early:
            return Arrival.DUPLICATE
        limits = self.limits
        if len(self.early) >= limits.early_packets or self.early_bytes + size > limits.early_bytes:
            return Arrival.TOO_FAR
        return Arrival.NEW

    def store(self, seq: int, size: int, item: Item, now: float) -> list[Item]:
        """Keep a new item. Returns the items that are now in order."""
        self.since_packets += 1
        self.since_bytes += size
        if seq != self.next_seq:
            self.early[seq] = (item, size)
            self.early_bytes += size
            self.ack_at = now
            return []
        self.next_seq += 1
        ready = [item]
        if self.early:
            self.ack_at = now
            while self.next_seq in self.early:
                following, its_size = self.early.pop(self.next_seq)
                self.early_bytes -= its_size
                self.next_seq += 1
                ready.append(following)
        limits = self.limits
        if self.since_bytes >= limits.ack_bytes or self.since_packets >= limits.ack_packets:
            self.ack_at = now
        elif self.ack_at is None:
            self.ack_at = now + limits.ack_delay_s
        return ready

    def ranges(self) -> list[tuple[int, int]]:
        """What is stored beyond the first gap, as [first, last] pairs; the lowest of them."""
        found: list[tuple[int, int]] = []
        for seq in sorted(self.early):
            if found and found[-1][1] == seq - 1:
                found[-1] = (found[-1][0], seq)
            elif len(found) == ACK_RANGES:
                break
            else:
                found.append((seq, seq))
        return found

    def told(self) -> None:
        """An acknowledgement of everything so far is on its way."""
        self.since_packets = self.since_bytes = 0
        self.ack_at = None
        self.answer_ping = 0
        self.damaged.clear()

    def advance(self, base: int) -> None:
        """The sender says that everything below `base` was acknowledged once."""
        if base > self.next_seq:
            self.next_seq = base
            for seq in [seq for seq in self.early if seq < base]:
                self.early_bytes -= self.early.pop(seq)[1]
