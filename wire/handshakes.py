"""What libzmq tells of connections and handshakes, as plain events.

A monitor's events come through a socket of its own, whose queue has no limit: libzmq's I/O thread would wait for room
in it, and the loop may be waiting for that thread.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import zmq

from wire.sockets import Inlet

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LISTENING = int(zmq.EVENT_LISTENING)
SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)

EVENTS_AT_ONCE = 256

_numbers = count()


class Event(NamedTuple):
    """One event: which, and its value (a descriptor, an error or a status)."""

    kind: int
    value: int


class Watch:
    """The events of one socket, handed to `heard` in the event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        events: int,
        heard: Callable[[Event], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._socket = socket
        self._heard = heard
        self._loop = loop
        endpoint = f"inproc://dcnr.watch.{next(_numbers)}"
        socket.monitor(endpoint, events)
        self._pair: zmq.Socket[bytes] | None = context.socket(zmq.PAIR)
        self._pair.setsockopt(zmq.LINGER, 0)
        self._pair.setsockopt(zmq.RCVHWM, 0)
        self._pair.connect(endpoint)
        self._inlet = Inlet(self._pair)
        self._fd = int(self._pair.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._ready)
        loop.call_soon(self._ready)

    def _ready(self) -> None:
        for _ in range(EVENTS_AT_ONCE):
            if self._pair is None:
                return
            parts = self._inlet.take()
            if parts is None:
                return
            self._heard(Event(*struct.unpack("=hi", parts[0].bytes)))
        self._loop.call_soon(self._ready)

    def close(self) -> None:
        """Before the watched socket is closed, or when its events are of no interest any more."""
        if self._pair is not None:
            self._loop.remove_reader(self._fd)
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._pair.close(linger=0)
            self._pair = None


def trouble(event: Event) -> str:
    """Why a handshake failed, for a person who dialled."""
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it refuses this process's key: not admitted, or revoked"
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if event.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "one side has keys and the other has none"
        return f"the handshake broke a rule (ZMTP error {event.value:#x})"
    return "it ended the handshake: its key is another than the expected one, or it is no DCNR"


def refusal(event: Event) -> str:
    """Why a handshake failed, for the log of the one that was dialled; "" for what the authenticator tells itself."""
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return ""
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        match event.value:
            case zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return "it has no keys (plain security)"
            case zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC | zmq.PROTOCOL_ERROR_ZMTP_KEY_EXCHANGE:
                return "it expects another key here, or repeats somebody's handshake"
            case zmq.PROTOCOL_ERROR_ZMTP_INVALID_SEQUENCE:
                return "it repeats a message of its own"
        return f"its bytes are no handshake (ZMTP error {event.value:#x})"
    return ""  # it hung up or fell silent: port scanners do, and who only looks whether the port is open
