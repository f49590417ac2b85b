"""The ZeroMQ context and sockets, with every option set on purpose, and packets in and out of them.

A socket's file descriptor only tells of a change of its state, once; so whoever waits for it must look at the state
after every call on the socket. `Inlet` and `Outlet` keep to that rule.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import zmq

from wire.codec import Payload
from wire.commands import Transmit
from wire.errors import MisuseError
from wire.limits import (
    HEADER_BYTES,
    LINGER_MS,
    LOOPBACK_SEND_BUFFER_BYTES,
    NO_COPY_SEND_BYTES,
    PART_BYTES,
    RECEIVE_HWM,
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    SEND_HWM,
    SOCKETS,
    ZMTP_HEARTBEAT_MS,
    ZMTP_TIMEOUT_MS,
)
from wire.messages import CONTROL
from wire.packets import Kind

NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_EVENT = struct.Struct("=Hi")
"""libzmq's event and its value: of a connection that closed, the descriptor it had."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tune_allocator() -> None:
    """Let glibc keep freed megabytes instead of giving them back: fresh pages cost as much as the copy into them."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc accepts
        mallopt(M_TRIM_THRESHOLD, 256 << 20)
    except (AttributeError, OSError):
        return


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with one I/O thread."""
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, SOCKETS)
    return context


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + HEADER_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    # TCP looks for half-open connections, by what it has sent and by probes. ZMTP's own heartbeats must stay off: with
    # them libzmq aborts the process when a peer ends whose queue is full (its issue 4364).
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, ZMTP_TIMEOUT_MS // 1000)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, ZMTP_HEARTBEAT_MS // 1000)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, ZMTP_TIMEOUT_MS // ZMTP_HEARTBEAT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, ZMTP_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.RCVTIMEO, 0)


def new_router(context: zmq.Context[zmq.Socket[bytes]], *, ipv6: bool = False) -> zmq.Socket[bytes]:
    """The socket that others dial."""
    socket = context.socket(zmq.ROUTER)
    _common(socket)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    return socket


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]], identity: bytes, lane: int, *, receives: bool, loopback: bool
) -> zmq.Socket[bytes]:
    """A socket that dials one peer for one lane."""
    socket = context.socket(zmq.DEALER)
    _common(socket)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM if receives else 1)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that does not stand yet
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if lane != CONTROL and loopback:
        socket.setsockopt(zmq.SNDBUF, LOOPBACK_SEND_BUFFER_BYTES)
    return socket


def refuse_fork(pid: int) -> None:
    """Raises `MisuseError` in a process that is not the one that made the sockets."""
    if os.getpid() != pid:
        raise MisuseError(
            f"this bus belongs to process {pid}, and a forked child ({os.getpid()}) can't use it",
            hint="start children with the spawn method, or make a bus of their own in them",
        )


class Inlet:
    """Takes whole packets out of a socket, never waiting.

    An exception in the middle of a packet (Ctrl-C) would leave the next reader inside it. So it is noted when a
    packet begins and ends, and the rest of a broken one is thrown away and counted.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.torn = 0
        self._receive: Any = partial(zmq.backend.Socket.recv, socket)  # without the wrapper that is for other sockets
        self._get: Any = partial(zmq.backend.Socket.get, socket)
        self._inside = False

    def take(self) -> list[zmq.Frame] | None:
        """The parts of the next packet, or None if there is none now."""
        if self._inside:
            self._skip()
        receive = self._receive
        self._inside = True
        try:
            part = receive(NOBLOCK, False)
        except zmq.Again:
            self._inside = False
            return None
        parts = [part]
        while part.more:
            part = receive(NOBLOCK, False)
            parts.append(part)
        self._inside = False
        return parts

    def ready(self) -> bool:
        """Whether there is a packet now; half as dear as taking one and finding none."""
        return bool(self._get(zmq.EVENTS) & zmq.POLLIN)

    def _skip(self) -> None:
        self.torn += 1
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv(zmq.NOBLOCK)
        self._inside = False


class Monitor:
    """Tells which of a ROUTER's connections closed. Close it before the ROUTER."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        address = f"inproc://monitor-{id(self)}"
        router.monitor(address, zmq.EVENT_DISCONNECTED)
        self._socket: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # libzmq's I/O thread waits for room here: with a limit, a loop that stands still would stop every connection.
        # For inproc no limit on one end is none at all, if it is set before the ends are connected.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def closed(self) -> list[int]:
        """Descriptors of connections that closed since the last call."""
        found: list[int] = []
        while True:
            try:
                event, _ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found.append(_EVENT.unpack(event[: _EVENT.size])[1])

    def close(self) -> None:
        """Watch no more."""
        self._router.disable_monitor()
        self._socket.close(linger=0)


def connection_of(part: zmq.Frame) -> int | None:
    """The descriptor of the connection that a received part came over; another one may have it later."""
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


class Outlet:
    """Puts whole packets into a socket, never waiting; keeps in order what the socket does not take yet.

    What waits is bounded: data by the link's window, and of each other kind only the newest is kept.
    """

    def __init__(self, socket: zmq.Socket[bytes], prefix: bytes | None = None) -> None:
        self.socket = socket
        self.waiting: deque[Transmit] = deque()
        self.prefix = prefix
        self._put: Any = partial(zmq.backend.Socket.send, socket)
        self._inside = False

    def put(self, packet: Transmit) -> bool:
        """Send or keep a packet. False if it had to be kept."""
        if not self.waiting:
            if self._send(packet.parts):
                return True
        elif packet.kind <= Kind.PING:
            for index, other in enumerate(self.waiting):
                if other.kind == packet.kind:
                    del self.waiting[index]  # the new one goes to the end: a ping must not pass what it asks about
                    break
        self.waiting.append(packet)
        return False

    def push(self) -> bool:
        """Send what was kept, as far as the socket takes it. True if nothing is left."""
        while self.waiting:
            if not self._send(self.waiting[0].parts):
                return False
            self.waiting.popleft()
        return True

    def _send(self, parts: Sequence[Payload]) -> bool:
        put = self._put
        if self._inside:  # an exception broke off a packet here: end it, its reader refuses it whole
            put(b"", zmq.NOBLOCK)
            self._inside = False
        try:
            if self.prefix is not None:
                put(self.prefix, NOBLOCK_MORE)
                self._inside = True
            last = len(parts) - 1
            for index, part in enumerate(parts):
                more = index < last
                put(part, NOBLOCK_MORE if more else NOBLOCK, len(part) < NO_COPY_SEND_BYTES)
                self._inside = more
        except zmq.ZMQError as error:
            # Full, or (ROUTER) the peer's connection does not stand yet or any more: it may come, or the link gives up.
            if self._inside or error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True
