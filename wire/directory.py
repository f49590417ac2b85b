"""Which peers a process knows: by boot, by address, by stream, by id; and what it remembers of those that are gone.

Invariants: a peer whose boot is known is in `by_boot` exactly once. `_dead` holds boots that never speak again.
`_cursors` keeps, of links that were dropped without that proof, what was received, so that a new life of the link hands
nothing over twice; and if something that had arrived could not be handed over yet, that this life can't go on, so that
nothing is missing unseen. Both are bounded, oldest first.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator

from wire.commands import Command, Release, Route
from wire.errors import MisuseError
from wire.ids import checked_id
from wire.limits import ADDRESS_CHARS, ADDRESSES, Limits
from wire.messages import PeerRef
from wire.peer import Peer, State

Key = tuple[str, int]
"""(id, boot)."""

_ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9]+)?\]):([0-9]{1,5})")


def is_address(address: str) -> bool:
    """Whether it is a TCP address that can be dialled, such as tcp://10.0.0.5:7700 or tcp://[::1]:7700."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and 0 < int(match[1]) < 65536 and len(address) <= ADDRESS_CHARS


def check_address(address: str) -> None:
    """Raises `MisuseError` unless `is_address`."""
    if not is_address(address):
        raise MisuseError(f"{address[:80]!r} is not an address", hint="write tcp://HOST:PORT")


def introduces(ref: PeerRef, key: Key) -> bool:
    """Whether `ref` is how the process `key` may introduce itself."""
    return (ref.id, ref.boot) == key and len(ref.addresses) <= ADDRESSES and all(map(is_address, ref.addresses))


class Directory:
    """The peers of the process `me`."""

    def __init__(self, me: PeerRef, limits: Limits) -> None:
        self.me = me
        self.by_boot: dict[Key, Peer] = {}
        self._limits = limits
        self._by_address: dict[str, Peer] = {}  # whoever answers there
        self._by_stream: dict[int, Peer] = {}
        self._latest: dict[str, Peer] = {}  # by id
        self._streams = 0
        self._dead: OrderedDict[Key, str] = OrderedDict()
        self._cursors: OrderedDict[Key, tuple[int, list[int], bool]] = OrderedDict()
        self._swept_at = 0.0

    def __iter__(self) -> Iterator[Peer]:
        """All peers; safe against changes meanwhile."""
        return iter(list(self._by_stream.values()))

    def of_stream(self, stream: int) -> Peer | None:
        """The peer that our stream leads to."""
        return self._by_stream.get(stream)

    def known(self, to: PeerRef) -> Peer | None:
        """The peer that `to` means: its boot, else whoever is at its address, else the latest of its id."""
        if to.boot:
            return self.by_boot.get((to.id, to.boot))
        if not to.addresses:
            return self._latest.get(to.id)
        found = self._by_address.get(to.addresses[0])
        if found is None or to.id not in ("", found.ref.id) or to.key not in ("", found.ref.key):
            return None
        return found

    def find(self, to: PeerRef, now: float, out: list[Command]) -> Peer | None:
        """The peer to send to, made if need be; None if it is a boot that is known to be dead. Raises `MisuseError`."""
        found = self.known(to)
        if found is not None or (to.id, to.boot) in self._dead:
            return found
        if not to.addresses:
            raise MisuseError(f"no address and no link to {to.id or 'an unnamed peer'}")
        if self.me.key and not to.key:
            raise MisuseError(
                f"no key is known of {to.id or 'whoever answers'} at {to.addresses[0]}",
                hint="this process has keys, and talks to nobody without; is its token or context complete?",
            )
        if to.id:
            checked_id(to.id, "peer id")
        for address in to.addresses:
            check_address(address)
        peer = self.add(PeerRef(to.id, to.boot, list(to.addresses), to.key), now, out)
        if not to.boot:
            self._by_address[to.addresses[0]] = peer
        return peer

    def add(self, ref: PeerRef, now: float, out: list[Command]) -> Peer:
        """A new peer with a new stream."""
        self._sweep(now, out)
        self._streams += 1
        peer = Peer(self.me, ref, self._streams, self._limits, now)
        self._by_stream[peer.stream] = peer
        if ref.boot:
            self.enter(peer)
        return peer

    def renew(self, peer: Peer) -> bool:
        """Give a link on which nothing was sent yet a new stream, unless its own is the newest. Returns whether it did.

        The other side may have seen a newer one, by name or by address, that was dropped here; it goes back to none.
        """
        if peer.stream == self._streams:
            return False
        self._streams += 1
        self._renumber(peer, self._streams)
        return True

    def _renumber(self, peer: Peer, stream: int) -> None:
        del self._by_stream[peer.stream]
        peer.stream = stream
        self._by_stream[stream] = peer

    def enter(self, peer: Peer) -> None:
        """The peer's boot is known now."""
        key = (peer.ref.id, peer.ref.boot)
        self.by_boot[key] = peer
        self._latest[peer.ref.id] = peer
        stream, positions, torn = self._cursors.pop(key, (0, [], False))
        if stream:
            peer.begin_stream(stream, positions)
            peer.torn = torn

    def merge(self, pending: Peer, existing: Peer, out: list[Command]) -> None:
        """Whoever answered is known already: what waited for it goes to the link there is.

        Of streams on which nothing was sent yet the newest counts: the other side may have begun it.
        """
        for old, new in zip(pending.sending, existing.sending, strict=True):
            new.waiting.extend(old.waiting)
        existing.queued_bytes += pending.queued_bytes
        existing.queued_messages += pending.queued_messages
        for address, peer in list(self._by_address.items()):
            if peer is pending:
                self._by_address[address] = existing
        if pending.greeting_since is not None and existing.state is State.GREETING:
            existing.greeting_since = pending.greeting_since
        self.drop(pending, out)
        if existing.state is State.GREETING and pending.stream > existing.stream:
            self._renumber(existing, pending.stream)
            self.renew(existing)

    def drop(self, peer: Peer, out: list[Command]) -> None:
        """Know it no longer, but for what was received."""
        peer.state = State.GONE
        key = (peer.ref.id, peer.ref.boot)
        self._by_stream.pop(peer.stream, None)
        if self.by_boot.get(key) is peer:
            del self.by_boot[key]
            if peer.their_stream:
                positions = [receiving.next_seq for receiving in peer.receiving]
                self._cursors[key] = (peer.their_stream, positions, peer.torn or peer.incomplete())
                _bound(self._cursors, self._limits.dead_boots)
        if self._latest.get(peer.ref.id) is peer:
            del self._latest[peer.ref.id]
        for address in [address for address, other in self._by_address.items() if other is peer]:
            del self._by_address[address]
        if not self.reaches(peer.route):
            out.append(Release(peer.route))

    def reaches(self, route: Route) -> bool:
        """Whether a peer is reached by dialling as this route says."""
        where = route[2:]
        return any(peer.route[2:] == where for peer in self._by_stream.values())

    def bury(self, peer: Peer, reason: str) -> None:
        """Its boot never speaks again."""
        if peer.ref.boot:
            key = (peer.ref.id, peer.ref.boot)
            self._cursors.pop(key, None)
            self._dead[key] = reason
            _bound(self._dead, self._limits.dead_boots)

    def dead(self, key: Key) -> str:
        """Why a boot never speaks again; "" if it may."""
        return self._dead.get(key, "")

    def replaced_by(self, ref: PeerRef) -> list[Peer]:
        """Earlier boots of the same id at one of the addresses of `ref`: a new one there proves that they are gone."""
        taken = set(ref.addresses)
        return [
            other
            for (name, boot), other in self.by_boot.items()
            if name == ref.id and boot != ref.boot and taken.intersection(other.ref.addresses)
        ]

    def _sweep(self, now: float, out: list[Command]) -> None:
        """Drop links without any traffic for long, now and then."""
        if now - self._swept_at < self._limits.idle_s / 15:
            return
        self._swept_at = now
        for peer in self:
            if now - peer.heard_at > self._limits.idle_s and not peer.queued_messages:
                self.drop(peer, out)


def _bound(remembered: OrderedDict[Key, str] | OrderedDict[Key, tuple[int, list[int], bool]], count: int) -> None:
    while len(remembered) > count:
        remembered.popitem(last=False)
