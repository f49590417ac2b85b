"""Connections that nobody has proved anything on yet: how many there may be, and how fast they may come. Pure.

libzmq takes in what a stranger sends until the handshake ends, at most a packet's size in a buffer; so the number of
such connections is what bounds the memory that strangers can take. And each handshake costs the I/O thread the work of
some scalar multiplications, which the others then wait for. Rules:

- A connection is a stranger's until its first packet was taken, or until it is `SETTLED_S` old: libzmq has ended it by
  then, unless its handshake succeeded.
- Beyond `strangers` of them, those of the address that has most are ended, the oldest first.
- An address that opens more than `rate` connections per second (after a burst of `burst`) is shut out for `BAN_S`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

SETTLED_S = 12.0
BAN_S = 10.0
ADDRESSES = 4096
BANNED = 64
"""Addresses that are shut out at a time; the filter in the kernel is a list that each first packet is compared with."""


@dataclass(frozen=True, slots=True)
class Doorway:
    """Limits of connections that have not shown an admitted key."""

    strangers: int = 24
    rate: float = 50.0  # per address and second …
    burst: float = 300.0  # … after so many at once: a hundred peers with three lanes behind one address


class Door:
    """See the module. Connections are known by their descriptor."""

    def __init__(self, limits: Doorway | None = None) -> None:
        self.limits = limits or Doorway()
        self.ended = 0
        self.strangers: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """By descriptor: address, and since when."""
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: left of its burst, at
        self._banned: OrderedDict[str, float] = OrderedDict()  # until

    def accepted(self, descriptor: int, address: str, now: float) -> list[int]:
        """A connection was accepted; the connections to end."""
        self._settle(now)
        self.strangers.pop(descriptor, None)
        if self._over_rate(address, now):
            self.ended += 1
            return [descriptor]
        self.strangers[descriptor] = (address, now)
        ended = []
        while len(self.strangers) > self.limits.strangers:
            ended.append(self._one_too_many())
        self.ended += len(ended)
        return ended

    def spoke(self, descriptor: int) -> None:
        """A packet of an admitted key came by this connection."""
        self.strangers.pop(descriptor, None)

    def closed(self, descriptor: int) -> str:
        """A connection has ended; the address it came from, "" if that's not known any more."""
        found = self.strangers.pop(descriptor, None)
        return found[0] if found is not None else ""

    def banned(self, now: float) -> tuple[str, ...]:
        """Addresses that are shut out now."""
        for address, until in list(self._banned.items()):
            if now >= until:
                del self._banned[address]
        return tuple(self._banned)

    def _over_rate(self, address: str, now: float) -> bool:
        limits = self.limits
        left, at = self._tokens.pop(address, (limits.burst, now))
        left = min(limits.burst, left + (now - at) * limits.rate) - 1
        self._tokens[address] = (max(left, 0.0), now)
        while len(self._tokens) > ADDRESSES:
            self._tokens.popitem(last=False)
        if left >= 0:
            return False
        self._banned[address] = now + BAN_S
        self._banned.move_to_end(address)
        while len(self._banned) > BANNED:
            self._banned.popitem(last=False)
        return True

    def _one_too_many(self) -> int:
        counts: dict[str, int] = {}
        for address, _ in self.strangers.values():
            counts[address] = counts.get(address, 0) + 1
        most = max(counts, key=lambda address: counts[address])
        descriptor = next(number for number, (address, _) in self.strangers.items() if address == most)
        del self.strangers[descriptor]
        return descriptor

    def _settle(self, now: float) -> None:
        while self.strangers:
            descriptor, (_, since) = next(iter(self.strangers.items()))
            if now - since < SETTLED_S:
                return
            del self.strangers[descriptor]
