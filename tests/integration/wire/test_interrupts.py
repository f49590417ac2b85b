"""B07: an exception in the middle of a packet (Ctrl-C, a limit of time) never makes the next reader begin inside it."""

from __future__ import annotations

import random
import signal
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import zmq

from wire.sockets import Inlet

INTERRUPTS = 1000
GAP_S = 0.0015
STAMP = struct.Struct("<QB")
READING = (Inlet.take.__code__, Inlet._skip.__code__)


class Interrupted(Exception):
    """What the signal raises, wherever the main thread is."""


class Flood(threading.Thread):
    """Sends messages of three frames, each stamped with the message's number and its own place in it."""

    def __init__(self, context: Any, address: str) -> None:
        super().__init__(daemon=True)
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.ended = threading.Event()
        self.sent = 0

    def run(self) -> None:
        filler = bytes(3000)
        while not self.ended.is_set():
            parts = [STAMP.pack(self.sent, place) + filler[: (self.sent * 7 + place) % 3000] for place in range(3)]
            if self.socket.poll(20, zmq.POLLOUT):
                self.socket.send_multipart(parts)
                self.sent += 1
        self.socket.close(linger=0)


@contextmanager
def storm(draw: random.Random, count: list[int]) -> Iterator[None]:
    """SIGALRM after random times raises wherever the main thread is inside `Inlet.take`, again and again."""

    def strike(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2 * GAP_S))
        if frame is not None and frame.f_code in READING:
            count[0] += 1
            raise Interrupted

    before = signal.signal(signal.SIGALRM, strike)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def whole(parts: list[zmq.Frame]) -> int | None:
    """The message's number if these are its identity and its three frames, in order, and nothing else."""
    stamps = [STAMP.unpack(part.bytes[: STAMP.size]) for part in parts[1:] if len(part) >= STAMP.size]
    numbers = {number for number, _ in stamps}
    if len(parts) == 4 and len(numbers) == 1 and [place for _, place in stamps] == [0, 1, 2]:
        return int(numbers.pop())
    return None


def receive(inlet: Inlet, count: list[int], draw: random.Random) -> tuple[list[int], int]:
    """Take packets until a thousand interrupts have struck. Numbers of whole messages, and of what was no message."""
    numbers: list[int] = []
    broken = 0
    with storm(draw, count):
        signal.setitimer(signal.ITIMER_REAL, GAP_S)
        while count[0] < INTERRUPTS:
            try:
                parts = inlet.take()
                if parts is not None:
                    number = whole(parts)
                    if number is None:
                        broken += 1
                    else:
                        numbers.append(number)
            except Interrupted:
                continue
    return numbers, broken


class Careless(Inlet):
    """What the case is about: a reader that forgets where it was."""

    def take(self) -> list[zmq.Frame] | None:
        self._inside = False
        return super().take()


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised while pyzmq frees a frame
@pytest.mark.parametrize("reader", [Inlet, Careless])
def test_a_thousand_interrupts_lose_no_framing(reader: type[Inlet]) -> None:
    """Field case B07. The careless reader shows that the storm does strike between the frames of a message."""
    count = [0]
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    flood = Flood(context, router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    flood.start()
    inlet = reader(router)
    try:
        numbers, broken = receive(inlet, count, random.Random(7))
    finally:
        flood.ended.set()
        flood.join(10)
        router.close(linger=0)
        context.term()
    assert count[0] >= INTERRUPTS
    assert numbers == sorted(set(numbers))
    assert len(numbers) > INTERRUPTS
    if reader is Inlet:
        assert broken == 0
        assert inlet.torn > 0
    else:
        assert broken > 0
