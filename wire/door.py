"""Connections that nobody has proved anything on yet: how many there may be, and how fast they may come. Pure.

libzmq takes in what a stranger sends until the handshake ends, up to a packet's size in a buffer; and each handshake
costs the I/O thread the work of some scalar multiplications, which the others then wait for. Rules:

- A connection is a stranger's until this side has sent it what ends a handshake: `look` tells how much went each way.
- One that has sent more than `HANDSHAKE_BYTES` and is still a stranger is no handshake: it is ended.
- Beyond `strangers` of them, those of the address that has most are ended, the newest first.
- An address that opens more than `rate` connections per second (after a burst of `burst`) is shut out for `BAN_S`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

HANDSHAKE_BYTES = 4096
"""A handshake takes a greeting of 64, HELLO of 202 and INITIATE of some 400 bytes."""
PROVED_BYTES = 64 + 170 + 40
"""Greeting and WELCOME go to everybody; only READY, 60 bytes and more, makes it more than this."""
SWEEP_S = 0.05
BAN_S = 10.0
ADDRESSES = 4096
BANNED = 64
"""Addresses that are shut out at a time; the filter in the kernel is a list that each first packet is compared with."""

Look = Callable[[int], tuple[int, int] | None]
"""Bytes received and sent on a connection; None if it's no connection any more."""


@dataclass(frozen=True, slots=True)
class Doorway:
    """Limits of connections that have not shown an admitted key."""

    strangers: int = 256
    rate: float = 50.0  # per address and second …
    burst: float = 300.0  # … after so many at once: a hundred peers with three lanes behind one address


class Door:
    """See the module. Connections are known by their descriptor."""

    def __init__(self, limits: Doorway | None = None) -> None:
        self.limits = limits or Doorway()
        self.strangers: dict[int, str] = {}
        """Descriptor to address, oldest first."""
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: left of its burst, at
        self._banned: OrderedDict[str, float] = OrderedDict()  # until

    def accepted(self, descriptor: int, address: str, now: float, look: Look) -> list[int]:
        """A connection was accepted; the connections to end."""
        self.strangers.pop(descriptor, None)
        if self._over_rate(address, now):
            return [descriptor]
        self.strangers[descriptor] = address
        if len(self.strangers) <= self.limits.strangers:
            return []
        ended = self.sweep(look)
        while len(self.strangers) > self.limits.strangers:
            ended.append(self._one_too_many())
        return ended

    def closed(self, descriptor: int) -> str:
        """A connection has ended; the address of a stranger, "" if it was none."""
        return self.strangers.pop(descriptor, "")

    def sweep(self, look: Look) -> list[int]:
        """Look at all strangers; the connections to end."""
        ended = []
        for descriptor in list(self.strangers):
            found = look(descriptor)
            if found is None or found[1] > PROVED_BYTES:
                del self.strangers[descriptor]
            elif found[0] > HANDSHAKE_BYTES:
                del self.strangers[descriptor]
                ended.append(descriptor)
        return ended

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
        [(most, _)] = Counter(self.strangers.values()).most_common(1)
        descriptor = next(number for number, address in reversed(self.strangers.items()) if address == most)
        del self.strangers[descriptor]
        return descriptor
