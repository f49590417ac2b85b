"""The bus over ZeroMQ: one bound ROUTER to receive, one DEALER per peer and lane to send.

A process that can't be dialled (`bind=None`: a command-line client, say) has no ROUTER; it receives on the DEALERs it
opened, by their identity at the other's ROUTER. The event loop watches the sockets' own descriptors, and all calls
are non-blocking. The context is closed explicitly, never by a finaliser, and no close waits longer than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import socket as sockets_of_the_system
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from wire.admission import Admission
from wire.commands import Command, Route, Transmit
from wire.directory import check_address
from wire.driver import Driver
from wire.endpoint import Endpoint, Source
from wire.errors import DCNRError, MisuseError, UsageError
from wire.guard import Guard
from wire.handshakes import FAILED, SUCCEEDED, Event, Watch, trouble
from wire.ids import Boot
from wire.keys import KeyPair
from wire.limits import DRAIN_BYTES, DRAIN_MESSAGES, LIMITS, LINGER_MS, Limits
from wire.messages import CONTROL, LANES, PeerRef
from wire.sockets import (
    Inlet,
    Monitor,
    Outlet,
    connection_of,
    new_context,
    new_dealer,
    new_router,
    refuse_fork,
    tune_allocator,
)

CLOSE_S = 1.0
"""How long closing waits for what was sent to be acknowledged."""

ROUTER_AGAIN_S, ROUTER_AGAIN_MAX_S = 0.002, 0.1
IDENTITIES = 8192


REDIAL_S, REDIAL_MAX_S = 5.0, 20.0
"""A DEALER that has been without a connection for so long while packets wait is opened anew."""


class BindError(DCNRError):
    """The address to listen on can't be had."""

    exit_code = 69


class OpenBindError(UsageError):
    """An address that other machines reach, without keys."""


class _Dealer:
    """A DEALER with its outlet and, where it also receives, its inlet. `key`: what its address, key and lane are."""

    def __init__(self, socket: zmq.Socket[bytes], key: tuple[str, str, int]) -> None:
        self.socket = socket
        self.key = key
        self.lane = key[2]
        self.outlet = Outlet(socket)
        self.inlet = Inlet(socket)
        self.fd = int(socket.getsockopt(zmq.FD))
        self.watched = False
        self.blocked_at: float | None = None  # since when it takes nothing: it has no connection
        self.handshake: Watch | None = None


class ZmqBus(Driver):
    """`wire.bus.Bus` over ZeroMQ.

    `bind`: where to listen, such as `tcp://127.0.0.1:0` (any free port) or `tcp://[::1]:7700`; None for a process that
    only dials. `advertise`: the addresses that others should dial, if not the bound one. `keys` and `admission`: CURVE
    on every connection, and who is let in; without them it binds to loopback only. `reachable` False: what it binds
    to is for relayed connections only (`wire.splice`), and nobody is told of it.
    """

    def __init__(
        self,
        peer_id: str,
        *,
        bind: str | None = None,
        advertise: Sequence[str] = (),
        boot: Boot | None = None,
        limits: Limits = LIMITS,
        keys: KeyPair | None = None,
        admission: Admission | None = None,
        reachable: bool = True,
    ) -> None:
        super().__init__(peer_id, boot=boot, limits=limits)
        if (keys is None) != (admission is None):
            raise MisuseError("a bus with keys needs an allow-list, and one without keys has none")
        self._admission = admission
        self._guard: Guard | None = None
        if keys is not None and admission is not None:
            self._guard = Guard(keys, admission, lambda: self._wall())
        self._troubles: dict[tuple[str, str], str] = {}
        self._redial_timer: asyncio.TimerHandle | None = None
        self._redial_s = REDIAL_S
        self._bind = bind
        self._receives = bind is None or not reachable  # on the DEALERs that it opens
        self.inner = ""
        """Where it is bound."""
        self._advertise = list(advertise)
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._router_fd = -1
        self._router_inlet: Inlet | None = None
        self._router_scheduled = False
        self._replies: dict[tuple[str, int, int], Outlet] = {}  # to peers that dialled us, by (id, boot, lane)
        self._replies_timer: asyncio.TimerHandle | None = None
        self._replies_s = ROUTER_AGAIN_S
        self._identities: dict[tuple[str, int, int], bytes] = {}
        self._sources: dict[bytes, Source | None] = {}
        self._monitor: Monitor | None = None
        self._connections: dict[int, bytes] = {}  # identities by the descriptor of the connection for control
        self._broken: list[bytes] = []  # identities whose connection closed, until all that came over it is taken
        self._dealers: dict[tuple[str, str, int], _Dealer] = {}  # by address, key and lane
        self._dealer_numbers: dict[str, int] = {}  # by address: two of one peer's addresses never share an identity
        self._unroutable = 0
        self._bad_parts = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._packets_in = 0
        self._packets_out = 0

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Bind (unless dial-only) and begin to receive. Raises `BindError`."""
        self._usable()
        if self._endpoint is not None:
            return
        if self._guard is None and self._bind is not None and not is_loopback(self._bind):
            raise OpenBindError(
                f"{self._bind} is open to other machines, and there are no keys",
                hint="dcnr keys makes them; or bind to tcp://127.0.0.1:PORT",
            )
        tune_allocator()
        self._context = new_context()
        if self._guard is not None:
            self._guard.open(self._context, self._running_loop)
        addresses: list[str] = []
        if self._bind is not None:
            try:
                addresses = self._listen(self._bind)
            except BaseException:
                self._end()
                raise
        key = self._guard.keys.public if self._guard is not None else ""
        self._endpoint = Endpoint(PeerRef(self._id, self._boot, addresses, key), self._limits)
        if self._admission is not None:
            self._admission.watch(self._expel)
        if self._router is not None:
            if self._guard is None:  # a socket has one monitor, and with keys the doorkeeper has it
                self._monitor = Monitor(self._router)
                self._running_loop.add_reader(self._monitor.fd, self._look_at_connections)
                self._look_at_connections()  # its descriptor tells only whoever has found nothing once
            else:
                self._guard.keeper.closed = lambda descriptor: self._closed_connections([descriptor])
            self._running_loop.add_reader(self._router_fd, self._drain_router)

    def _listen(self, bind: str) -> list[str]:
        assert self._context is not None
        self._router = router = new_router(self._context, ipv6="[" in bind)
        if self._guard is not None:
            self._guard.arm_router(self._context, router)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            raise BindError(
                f"can't listen on {bind}: {error.strerror}",
                hint="is another process using the port? (tcp://HOST:0 takes any free one)",
            ) from error
        self._router_inlet = Inlet(router)
        self._router_fd = int(router.getsockopt(zmq.FD))
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.inner = bound
        for address in self._advertise:
            check_address(address)
        if self._receives:
            return []
        return self._advertise or [_dialable(bound)]

    async def close(self) -> None:
        """Flush for a bounded time, say goodbye, close every socket and the context. Idempotent."""
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        try:
            if self._endpoint is not None:
                await self._flush()
        finally:
            self._closed = True
            self._abandon()
            self._end()

    async def _flush(self) -> None:
        if not self._links.idle():
            self._idle = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._idle.wait()
        goodbyes: list[Command] = []
        self._links.close("closed in good order", goodbyes)
        for command in goodbyes:
            if isinstance(command, Transmit):
                self._carry(command)
        await asyncio.sleep(0)

    def _end(self) -> None:
        """Close all sockets and the context at once; what is queued in libzmq gets LINGER_MS at most."""
        if self._timer is not None:
            self._timer.cancel()
        if self._replies_timer is not None:
            self._replies_timer.cancel()
        if self._redial_timer is not None:
            self._redial_timer.cancel()
        for dealer in self._dealers.values():
            self._close_dealer(dealer)
        self._dealers.clear()
        if self._guard is not None:
            self._guard.close()
        if self._router is not None:
            if self._monitor is not None:
                self._running_loop.remove_reader(self._monitor.fd)
                self._monitor.close()
                self._monitor = None
            if self._router_fd >= 0 and self._loop is not None:
                self._loop.remove_reader(self._router_fd)
            self._router.close(linger=LINGER_MS)
            self._router = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _usable(self) -> None:
        refuse_fork(self._pid)
        super()._usable()

    # ------------------------------------------------------------ out

    def _carry(self, packet: Transmit) -> None:
        self._packets_out += 1
        self._bytes_out += sum(map(len, packet.parts))
        if packet.route.address:
            self._dial(packet)
        elif self._router is not None:
            self._reply(packet)

    def _dial(self, packet: Transmit) -> None:
        _, _, address, key = packet.route
        dealer = self._dealers.get((address, key, packet.lane))
        if dealer is None:
            try:
                dealer = self._open_dealers(address, key, packet.lane)
            except zmq.ZMQError:  # an address that makes no sense to libzmq, or no descriptors left
                self._unroutable += 1
                return
        if not dealer.outlet.put(packet):
            if dealer.blocked_at is None:
                dealer.blocked_at = self._now()
                self._redial_later()
            if not dealer.watched:
                self._watch(dealer)
        elif self._receives:
            self._running_loop.call_soon(self._dealer_ready, dealer)

    def _open_dealers(self, address: str, key: str, lane: int) -> _Dealer:
        """Dial for one lane; for all, if that is also how this process receives."""
        for needed in LANES if self._receives else (lane,):
            if (address, key, needed) not in self._dealers:
                self._open_dealer(address, key, needed)
        return self._dealers[(address, key, lane)]

    def _open_dealer(self, address: str, key: str, lane: int) -> None:
        assert self._context is not None
        receives = self._receives
        number = self._dealer_numbers.get(address)
        if number is None:
            # Who knows an identity could take its place at a ROUTER, so with keys it's no number that others can guess.
            number = len(self._dealer_numbers) if self._guard is None else secrets.randbits(64)
            self._dealer_numbers[address] = number
        identity = _identity(self._id, self._boot, lane, f"{number:x}")
        socket = new_dealer(self._context, identity, lane, receives=receives, loopback=is_loopback(address))
        watch: Watch | None = None
        try:
            if self._guard is not None:
                self._guard.arm_dealer(socket, key)
            if lane == CONTROL and (self._guard is not None or receives):
                heard = partial(self._shaken, (address, key, lane))
                watch = Watch(self._context, socket, FAILED | SUCCEEDED, heard, self._running_loop)
            socket.connect(address)
        except zmq.ZMQError:
            if watch is not None:
                watch.close()
            socket.close(linger=0)
            raise
        dealer = _Dealer(socket, (address, key, lane))
        dealer.handshake = watch
        self._dealers[dealer.key] = dealer
        if receives:
            self._watch(dealer)

    def _shaken(self, key: tuple[str, str, int], event: Event) -> None:
        """A handshake with somebody who was dialled succeeded or failed."""
        dealer = self._dealers.get(key)
        if event.kind != SUCCEEDED:
            self._troubles[key[:2]] = trouble(event)
            return
        self._troubles.pop(key[:2], None)
        if dealer is not None and dealer.handshake is not None:
            dealer.handshake.close()
            dealer.handshake = None

    def _trouble(self, to: PeerRef) -> str:
        return next((self._troubles[where] for a in to.addresses if (where := (a, to.key)) in self._troubles), "")

    def _redial_later(self) -> None:
        if self._redial_timer is None:
            self._redial_timer = self._running_loop.call_later(self._redial_s, self._redial)

    def _redial(self) -> None:
        """Open anew the DEALERs that have been without a connection: libzmq gives one up for good when the other side
        broke the protocol in its handshake or refused its key, and does not say so."""
        self._redial_timer = None
        now, waiting = self._now(), False
        for dealer in list(self._dealers.values()):
            if dealer.blocked_at is None:
                continue
            waiting = True
            if now - dealer.blocked_at >= self._redial_s:
                self._open_anew(dealer)
        self._redial_s = min(2 * self._redial_s, REDIAL_MAX_S) if waiting else REDIAL_S
        if waiting:
            self._redial_later()

    def _open_anew(self, dealer: _Dealer) -> None:
        address, key, lane = dealer.key
        self._close_dealer(dealer)
        del self._dealers[dealer.key]
        try:
            self._open_dealer(address, key, lane)
        except zmq.ZMQError:
            self._unroutable += 1
            return
        fresh = self._dealers[dealer.key]
        fresh.outlet.waiting.extend(dealer.outlet.waiting)
        fresh.blocked_at = self._now()
        if not fresh.watched:
            self._watch(fresh)

    def _watch(self, dealer: _Dealer) -> None:
        dealer.watched = True
        self._running_loop.add_reader(dealer.fd, self._dealer_ready, dealer)
        self._running_loop.call_soon(self._dealer_ready, dealer)

    def _dealer_ready(self, dealer: _Dealer) -> None:
        if dealer.socket.closed:
            return
        events = int(dealer.socket.getsockopt(zmq.EVENTS))
        if dealer.outlet.waiting and events & zmq.POLLOUT and dealer.outlet.push():
            dealer.blocked_at = None
        if self._receives:
            if self._drain(dealer.inlet, dealer):
                self._running_loop.call_soon(self._dealer_ready, dealer)
        elif not dealer.outlet.waiting and dealer.watched:
            dealer.watched = False
            self._running_loop.remove_reader(dealer.fd)

    def _reply(self, packet: Transmit) -> None:
        key = (packet.route.id, packet.route.boot, packet.lane)
        outlet = self._replies.get(key)
        identity = self._identities.get(key)
        if identity is None or self._router is None:
            self._unroutable += 1
            return
        if outlet is None or outlet.prefix != identity:
            outlet = self._replies[key] = Outlet(self._router, identity)
        if not outlet.put(packet):
            self._replies_s = ROUTER_AGAIN_S
            self._replies_later()
        self._router_soon()

    def _replies_later(self) -> None:
        if self._replies_timer is None:
            self._replies_timer = self._running_loop.call_later(self._replies_s, self._push_replies)

    def _push_replies(self) -> None:
        """The ROUTER can't say when one peer's queue has room again, so it is tried, ever more rarely."""
        self._replies_timer = None
        self._replies_s = min(2 * self._replies_s, ROUTER_AGAIN_MAX_S)
        left = [outlet for outlet in self._replies.values() if not outlet.push()]
        if left:
            self._replies_later()
        self._router_soon()

    def _release(self, route: Route) -> None:
        if route.address:
            for lane in LANES:
                dealer = self._dealers.pop((route.address, route.key, lane), None)
                if dealer is not None:
                    self._close_dealer(dealer)
        else:
            for lane in LANES:
                self._replies.pop((route.id, route.boot, lane), None)

    def _close_dealer(self, dealer: _Dealer) -> None:
        if dealer.watched and self._loop is not None:
            self._loop.remove_reader(dealer.fd)
            dealer.watched = False
        if dealer.handshake is not None:
            dealer.handshake.close()
        dealer.socket.close(linger=LINGER_MS)

    # ------------------------------------------------------------ in

    def _router_soon(self) -> None:
        """Look at the ROUTER again: a call on it may have used up the descriptor's signal."""
        if not self._router_scheduled:
            self._router_scheduled = True
            self._running_loop.call_soon(self._router_again)

    def _router_again(self) -> None:
        self._router_scheduled = False
        self._drain_router()

    def _drain_router(self) -> None:
        if self._router is None or self._router_inlet is None or self._closed:
            return
        if self._drain(self._router_inlet, None):
            self._router_soon()
        elif self._broken:
            broken, self._broken = self._broken, []
            for identity in broken:
                source, _ = _parsed(identity)
                if source is not None and identity not in self._sources:  # else it has dialled again
                    self._broke(source.id, source.boot)

    def _look_at_connections(self) -> None:
        """Those that closed: their peers are told of once all that they sent is taken."""
        if self._monitor is not None and not self._closed:
            self._closed_connections(self._monitor.closed())

    def _closed_connections(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            identity = self._connections.pop(descriptor, None)
            if identity is not None:
                self._sources.pop(identity, None)
                self._broken.append(identity)
        self._router_soon()

    def _drain(self, inlet: Inlet, dealer: _Dealer | None) -> bool:
        """Take packets, control first; True if there may be more. `dealer` None: from the ROUTER.

        What a packet brings may end its own connection: a peer that has restarted, a handler that forgets its peer.
        """
        bulk: list[tuple[Source, list[Any]]] = []
        taken = size = 0
        more = True
        while taken < DRAIN_MESSAGES and size < DRAIN_BYTES and not inlet.socket.closed:
            parts = None if taken == 1 and not inlet.ready() else inlet.take()
            if parts is None:
                more = False
                break
            taken += 1
            size += sum(map(len, parts))
            if self._guard is None:
                source = Source("", 0, dealer.lane) if dealer is not None else self._source(parts.pop(0))
            else:
                source = self._guarded(self._guard, parts, dealer)
            if source is None or not parts:
                self._bad_parts += 1
            elif source.lane == CONTROL or taken == 1:
                self._received(source, parts)
            else:
                bulk.append((source, parts))
            if self._closed:
                return False
        for source, parts in bulk:
            self._received(source, parts)
            if self._closed:
                return False
        self._packets_in += taken
        self._bytes_in += size
        if taken:
            self._batch_done()
        return more

    def _received(self, source: Source, parts: list[zmq.Frame]) -> None:
        self._arrived(source, parts[0].bytes, [part.buffer for part in parts[1:]])

    def _guarded(self, guard: Guard, parts: list[zmq.Frame], dealer: _Dealer | None) -> Source | None:
        """Whose a packet is, by the key that its connection proved; None for nobody's."""
        if dealer is not None:
            return guard.answered(dealer.key[1], dealer.lane)
        identity = parts.pop(0)
        source = guard.source(identity, _keyed)
        name = identity.bytes
        if source is not None and (name not in self._sources or (name, source.key) not in guard.known):
            if len(guard.known) >= IDENTITIES:
                guard.known.clear()
                self._forget_identities()
            guard.known[(name, source.key)] = self._sources[name] = source
            self._know(source, _parsed(name)[1], identity)
        return source

    def on_refusal(self, tell: Callable[[str], None]) -> None:
        """Set who writes the lines about what was refused; else they go to the logger `dcnr.wire`."""
        if self._guard is not None:
            self._guard.tell = tell

    def _expel(self) -> None:
        """The allow-list has changed: links to those who are no longer on it end now."""
        if self._endpoint is None or self._closed or self._guard is None:
            return
        guard = self._guard
        self._endpoint.expel(guard.expulsion, self._out)
        self._settle(later=True)

    def _told(self, subject: str, text: str) -> None:
        if self._guard is not None:
            self._guard.refused(subject, text)

    def _source(self, identity: zmq.Frame) -> Source | None:
        key = identity.bytes
        try:
            return self._sources[key]
        except KeyError:
            pass
        if len(self._sources) >= IDENTITIES:
            self._forget_identities()
        source, number = _parsed(key)
        self._sources[key] = source
        if source is not None:
            self._know(source, number, identity)
        return source

    def _forget_identities(self) -> None:
        self._sources.clear()
        self._identities.clear()
        self._connections.clear()

    def _know(self, source: Source, number: str, identity: zmq.Frame) -> None:
        """How to answer; its connections for the other lanes may have been silent so far."""
        descriptor = connection_of(identity) if source.lane == CONTROL else None
        if descriptor is not None:
            self._connections[descriptor] = identity.bytes
        for lane in LANES:
            known = (source.id, source.boot, lane)
            self._identities[known] = _identity(source.id, source.boot, lane, number)

    def counters(self) -> dict[str, Any]:
        """Counts of bytes, packets, messages, resends and refusals, and what is queued per peer."""
        torn = sum(dealer.inlet.torn for dealer in self._dealers.values())
        torn += self._router_inlet.torn if self._router_inlet is not None else 0
        return {
            **super().counters(),
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "packets_in": self._packets_in,
            "packets_out": self._packets_out,
            "refused_parts": self._bad_parts,
            "torn_packets": torn,
            "unroutable": self._unroutable,
            "dealers": len(self._dealers),
        }


def _identity(name: str, boot: int, lane: int, number: str) -> bytes:
    return f"{name}/{boot:x}/{lane}/{number}".encode()


def _parsed(identity: bytes) -> tuple[Source | None, str]:
    with contextlib.suppress(ValueError):
        name, boot, lane, number = identity.decode("ascii").split("/")
        if int(lane) in LANES:
            return Source(name, int(boot, 16), int(lane)), number
    return None, ""


def _keyed(identity: bytes, key: str) -> Source | None:
    source, _ = _parsed(identity)
    return source._replace(key=key) if source is not None and source.boot else None


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _dialable(bound: str) -> str:
    """The bound address with a wildcard host replaced by this machine's own."""
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    bare = host.strip("[]")
    try:
        wildcard = ipaddress.ip_address(bare).is_unspecified
    except ValueError:
        wildcard = bare in ("*", "")
    if not wildcard:
        return bound
    return f"tcp://{own_address()}:{port}"


def own_address() -> str:
    """The address this machine uses towards others (no packet is sent), or loopback."""
    with sockets_of_the_system.socket(sockets_of_the_system.AF_INET, sockets_of_the_system.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
