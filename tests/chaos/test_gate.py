"""The gate: real ZeroMQ through it, whole, and hurt in each way; who speaks is known from the handshake."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import zmq

from cli.chaos.gate import Gate, Peek, Rule
from cli.chaos.zmtp import Reader, source_of
from wire.bus import Bus
from wire.codec import read_header
from wire.messages import Committed, Message, PeerRef
from wire.zmq_bus import ZmqBus

pytestmark = pytest.mark.timeout(60)


def committed(step: int) -> Committed:
    return Committed("run", 1, 0, step)


class Pair:
    """Buses a and b; b is behind a gate, a dials it."""

    def __init__(self, gate: Gate, a: Bus, b: Bus) -> None:
        self.gate, self.a, self.b = gate, a, b
        self.steps: list[int] = []
        self.came = asyncio.Event()
        self.to = PeerRef("b", 0, [gate.address])

    def send(self, step: int, size: int = 0) -> None:
        self.a.send(self.to, committed(step), [bytes(size)] if size else [])

    async def have(self, count: int, within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while len(self.steps) < count:
                self.came.clear()
                await self.came.wait()


@asynccontextmanager
async def pair(peek: Peek | None = None) -> AsyncIterator[Pair]:
    gate = Gate("b", draw=random.Random(1), peek=peek)
    await gate.open()
    a, b = ZmqBus("a", bind="tcp://127.0.0.1:0"), ZmqBus("b", bind="tcp://127.0.0.1:0", advertise=[gate.address])
    made = Pair(gate, a, b)

    def take(sender: PeerRef, message: Message, frames: object) -> None:
        if isinstance(message, Committed):
            made.steps.append(message.step)
            made.came.set()

    b.on_message(take)
    await a.start()
    await b.start()
    router = b._router  # type: ignore[attr-defined]
    gate.aim("127.0.0.1", int(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]))
    try:
        yield made
    finally:
        await a.close()
        await b.close()
        await gate.close()


async def test_all_passes_in_order_and_the_source_is_known() -> None:
    async with pair() as made:
        for step in range(200):
            made.send(step, 20_000)
        await made.have(200)
        assert made.steps == list(range(200))
        assert made.gate.sources() == ["a"]


async def test_a_cut_holds_and_what_was_held_comes() -> None:
    async with pair() as made:
        made.send(0)
        await made.have(1)
        made.gate.set("a", Rule(cut_in=True, cut_out=True))
        for step in range(1, 20):
            made.send(step)
        await asyncio.sleep(0.3)
        assert made.steps == [0]
        made.gate.set("a", None)
        await made.have(20)
        assert made.steps == list(range(20))


async def test_a_cut_of_somebody_else_holds_nothing() -> None:
    async with pair() as made:
        made.gate.set("c", Rule(cut_in=True, cut_out=True))
        made.send(0)
        await made.have(1)


async def test_a_reset_connection_loses_nothing() -> None:
    async with pair() as made:
        for step in range(300):
            made.send(step, 5_000)
            if step % 60 == 30:
                await made.have(step - 20)
                assert made.gate.drop("a") > 0
        await made.have(300, 30.0)
        assert made.steps == list(range(300))


async def test_flipped_bits_are_seen_and_nothing_wrong_gets_through() -> None:
    async with pair() as made:
        made.send(0)
        await made.have(1)
        for step in range(1, 61):
            made.gate.set("a", Rule(flips=1))
            made.send(step, 3_000)
            await asyncio.sleep(0.01)
        made.gate.set("a", None)
        await made.have(61, 40.0)
        assert made.steps == list(range(61))
        assert made.gate.flipped >= 30


async def test_delay_and_throttle_take_their_time() -> None:
    async with pair() as made:
        made.send(0)
        await made.have(1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        made.gate.set("a", Rule(delay_s=0.3))
        made.send(1)
        await made.have(2)
        assert loop.time() - began > 0.29
        began = loop.time()
        made.gate.set("a", Rule(bytes_s=100_000))
        made.send(2, 50_000)
        await made.have(3)
        assert loop.time() - began > 0.45
        assert made.steps == [0, 1, 2]


async def test_headers_of_packets_can_be_read_as_they_pass() -> None:
    seen: list[tuple[str, bytes]] = []
    async with pair(lambda source, target, header: seen.append((source, header))) as made:
        for step in range(50):
            made.send(step, 100_000 if step % 2 else 0)
        await made.have(50)
    assert {source for source, _ in seen} == {"a"}
    assert sum(b"committed" in header for _, header in seen) >= 50
    assert all(read_header(header).src == "a" for _, header in seen)


async def test_a_plain_gate_is_a_plain_proxy() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.write_eof()
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    gate = Gate("store", draw=random.Random(1), plain=True)
    await gate.open()
    gate.aim("127.0.0.1", server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(b"hello" * 100_000)
    writer.write_eof()
    assert await reader.read() == b"HELLO" * 100_000
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    server.close()
    await gate.close()


async def test_nobody_behind_the_gate_is_a_reset() -> None:
    gate = Gate("b", draw=random.Random(1), plain=True)
    await gate.open()
    gate.aim("127.0.0.1", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    await gate.close()


def test_frames_come_out_whole_however_the_bytes_are_cut() -> None:
    """A greeting, READY with an identity, then messages of several frames, short and long, in pieces of any size."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x09p1/2f/0/3"
    stream = bytearray(64) + bytes([4, len(ready)]) + ready
    wanted = []
    for number in range(40):
        header = b"header %d" % number
        wanted.append(header)
        size = (0, 10, 300, 70_000)[number % 4]
        stream += bytes([1 if size else 0, len(header)]) + header
        if size:
            stream += (bytes([0, size]) if size < 256 else b"\x02" + size.to_bytes(8, "big")) + bytes(size)
    draw = random.Random(4)
    for most in (1, 7, 100, 10**6):
        reader, found, at = Reader(), [], 0
        while at < len(stream):
            step = draw.randint(1, most) if most > 1 else 1
            found += list(reader.feed(bytes(stream[at : at + step])))
            at += step
        assert found == wanted
        assert reader.source == "p1"
    assert source_of(ready) == "p1"
    assert source_of(b"") == source_of(b"\x05HELLO") == ""
