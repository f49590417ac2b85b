"""Carries out what `wire.door` decides about the connections at a ROUTER, and says why handshakes failed.

Connections are libzmq's; they are known here by their descriptors, from its monitor. The number may have come to mean
something else by the time its event is read, so what is ended is first looked at: only a connection at this very port
is, and who had just opened it dials again. On Linux, addresses that are shut out are filtered in the kernel, before a
connection costs anything; elsewhere each of their connections is ended when it was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from wire.door import SWEEP_S, Door, Doorway
from wire.handshakes import ACCEPTED, DISCONNECTED, FAILED, LISTENING, SUCCEEDED, Event, Watch, refusal
from wire.stalled import Suspects

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
SEARCH_S, SEARCH_MAX_S = 0.25, 4.0
"""How often it's looked for a connection that libzmq reads no more; ever more rarely."""
LIFT_S = 1.0
"""How often it's looked whether a ban has ended."""

COUNTS = sys.platform.startswith("linux")
"""Whether the system tells how much went each way on a connection; else only the rate is limited."""

_LOAD_WORD, _LOAD_BYTE, _RIGHT_SHIFT, _JUMP, _EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x05, 0x15, 0x06
_NETWORK = 0xFFF00000  # SKF_NET_OFF, where the IP header begins


class Doorkeeper:
    """The connections at one bound ROUTER. `refused(subject, text)` is for the log."""

    def __init__(self, refused: Callable[[str, str], None], door: Door | None = None) -> None:
        self.door = door or Door(Doorway() if COUNTS else Doorway(strangers=1 << 20))
        self._refused = refused
        self.closed: Callable[[int], None] = lambda descriptor: None
        """Told of each connection that has ended."""
        self._watch: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._port = 0
        self._banned: tuple[str, ...] = ()
        self._lift: asyncio.TimerHandle | None = None
        self._why = ""
        self._open: set[int] = set()
        self._suspects = Suspects()
        self._search: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def open(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Before the ROUTER is bound."""
        self._loop = loop
        events = LISTENING | ACCEPTED | DISCONNECTED | FAILED | SUCCEEDED
        self._watch = Watch(context, router, events, self._heard, loop)

    def close(self) -> None:
        """Before the ROUTER is closed."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for timer in (self._lift, self._sweep, self._search):
            if timer is not None:
                timer.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def hang_up(self, descriptor: int) -> None:
        """End a connection, if it is one at this port."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ events

    def _heard(self, event: Event) -> None:
        assert self._loop is not None
        match event.kind:
            case zmq.EVENT_LISTENING:
                with contextlib.suppress(OSError):
                    self._listener = socket.socket(fileno=os.dup(event.value))
                    self._port = self._listener.getsockname()[1]
            case zmq.EVENT_ACCEPTED:
                self._open.add(event.value)
                self._accepted(event.value, self._loop.time())
            case zmq.EVENT_DISCONNECTED:
                self.closed(event.value)
                self._open.discard(event.value)
                self._suspects.drop(event.value)
                address, why = self.door.closed(event.value), self._why
                self._why = ""
                if why:
                    if not address and self._suspects.suspect(self._open, self._read):
                        self._search_later(SEARCH_S)
                    self._refused(f"{address} {why}", f"refused a connection from {address or 'an address'}: {why}")
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._why = ""
            case _:
                self._why = refusal(event)  # the same thread's next event tells which connection it was
                if self._why:
                    self._search_later(SEARCH_S)

    def _search_later(self, pause_s: float) -> None:
        if self._search is None and self._loop is not None:
            self._search = self._loop.call_later(pause_s, self._search_now, pause_s)

    def _search_now(self, pause_s: float) -> None:
        """Find the connection that libzmq has told a failure of, and has not ended."""
        self._search = None
        why, self._why = self._why, ""
        if why:
            self._refused(f"message {why}", f"refused a message on a connection that stood: {why}")
            self._suspects.suspect(self._open, self._read)
            pause_s = SEARCH_S
        for descriptor in self._suspects.look(self._read):
            self.hang_up(descriptor)
        if self._suspects:
            self._search_later(pause_s if why else min(2 * pause_s, SEARCH_MAX_S))

    def _accepted(self, descriptor: int, now: float) -> None:
        address = ""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] == self._port:
                address = str(connection.getpeername()[0])
        if not address:
            return  # it has gone already
        self._end(self.door.accepted(descriptor, address, now, self._look), "too many, or too fast, without a key")
        self._shut_out(now)
        if self._sweep is None and self.door.strangers and COUNTS:
            self._sweep = self._loop.call_later(SWEEP_S, self._sweeps) if self._loop is not None else None

    def _sweeps(self) -> None:
        self._sweep = None
        self._end(self.door.sweep(self._look), "more than a handshake, without a key")
        if self.door.strangers and self._loop is not None:
            self._sweep = self._loop.call_later(SWEEP_S, self._sweeps)

    def _end(self, descriptors: Sequence[int], why: str) -> None:
        for descriptor in descriptors:
            self.hang_up(descriptor)
        if descriptors:
            self._refused(f"door {why}", f"ended connections: {why}")

    def _read(self, descriptor: int) -> tuple[int, int] | None:
        """Bytes read and bytes that wait to be read, on a connection at this port."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] == self._port:
                waiting = int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)
                found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136) if COUNTS else bytes(136)
                return struct.unpack_from("Q", found, 128)[0] - waiting if COUNTS else 0, waiting
        return None

    def _look(self, descriptor: int) -> tuple[int, int] | None:
        """Bytes received and sent (as far as acknowledged) on a connection at this port."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] == self._port:
                found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                acked, received = struct.unpack_from("QQ", found, 120)
                return received, acked
        return None

    def _shut_out(self, now: float) -> None:
        banned = self.door.banned(now)
        if banned == self._banned or self._listener is None or self._loop is None:
            return
        self._banned = banned
        filter_addresses(self._listener, banned)
        if self._lift is not None:
            self._lift.cancel()
        self._lift = self._loop.call_later(LIFT_S, self._look_again) if banned else None

    def _look_again(self) -> None:
        assert self._loop is not None
        self._lift = None
        before = self._banned
        self._shut_out(self._loop.time())
        if self._banned == before:
            self._lift = self._loop.call_later(LIFT_S, self._look_again)


def filter_addresses(listener: socket.socket, addresses: Sequence[str]) -> bool:
    """Let the kernel drop what these addresses send to a listening socket. False where it can't."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        if not addresses:
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            return True
        code = program(addresses)
        held = ctypes.create_string_buffer(code, len(code))
        fprog = struct.pack("HL", len(code) // 8, ctypes.addressof(held))
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
    except OSError:
        return False
    return True


def program(addresses: Sequence[str]) -> bytes:
    """A classic BPF program that drops packets from these addresses and takes all others (linux/filter.h)."""
    found: list[Any] = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    found = [getattr(address, "ipv4_mapped", None) or address for address in found]
    fours = [int(address) for address in found if address.version == 4]
    sixes = [int(address) for address in found if address.version == 6]
    four = [(_LOAD_WORD, 0, 0, _NETWORK + 12)]
    for value in fours:
        four += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, 0)]
    four.append((_RETURN, 0, 0, 0xFFFFFFFF))
    six: list[tuple[int, int, int, int]] = []
    for value in sixes:
        for word in range(4):
            rest = 2 * (3 - word) + 1  # to the instruction behind this address
            six += [(_LOAD_WORD, 0, 0, _NETWORK + 8 + 4 * word),
                    (_EQUAL, 0, rest, value >> (96 - 32 * word) & 0xFFFFFFFF)]  # fmt: skip
        six.append((_RETURN, 0, 0, 0))
    six.append((_RETURN, 0, 0, 0xFFFFFFFF))
    head = [(_LOAD_BYTE, 0, 0, _NETWORK), (_RIGHT_SHIFT, 0, 0, 4), (_EQUAL, 0, 1, 4), (_JUMP, 0, 0, len(six))]
    return b"".join(struct.pack("HBBI", *step) for step in (*head, *six, *four))
