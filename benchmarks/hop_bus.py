"""Our side of the hop benchmark: two `ZmqBus` processes and real `Hop` messages, with codec, link and digests.

The server (`python -m benchmarks.hop_bus`, prints its address) echoes a hop whose `count` is 1 and tells on request how
long each heartbeat was under way; both processes read the same monotonic clock.
"""

from __future__ import annotations

import asyncio
import statistics
import struct
import time
from collections.abc import Sequence

from benchmarks.hop_peers import flood_count, hop_count
from wire.ids import new_request_id
from wire.loop import run
from wire.messages import BACKWARD, CONTROL, FORWARD, AskCluster, Hop, Message, Ok, PeerRef, TensorMeta
from wire.zmq_bus import ZmqBus

HEARTBEATS = 300
HEARTBEAT_EVERY_S = 0.005
STAMP = struct.Struct("!d")


def hop_of(size: int, step: int, echo: bool, direction: int = 0) -> Hop:
    """A hop of one tensor of `size` bytes; `count` 1 asks for it to come back."""
    tensors = [TensorMeta("uint8", [size])]
    return Hop("gpt-char-1", 1, 0, step, 0, 3, direction, step, "p1", int(echo), tensors)


async def serve() -> None:
    """Echo and take the time until killed."""
    bus = ZmqBus("server", bind="tcp://127.0.0.1:0")
    waits: list[float] = []

    def handle(sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, Hop):
            if message.microbatch == 1:
                waits.append(time.monotonic() - STAMP.unpack(frames[0])[0])
            elif message.count:
                bus.send(sender, message, frames, lane=BACKWARD)
        elif isinstance(message, AskCluster):
            bus.send(sender, Ok(message.request_id), [struct.pack(f"!{len(waits)}d", *waits)])
            waits.clear()

    bus.on_message(handle)
    await bus.start()
    print(bus.me.addresses[0], flush=True)
    await asyncio.Event().wait()


class BusClient:
    """The same measurements through the whole of our stack."""

    def __init__(self, bus: ZmqBus, to: PeerRef) -> None:
        self._bus = bus
        self._to = to
        self._waiting: asyncio.Future[None] | None = None
        bus.on_message(self._handle)

    @classmethod
    async def connect(cls, address: str) -> BusClient:
        """A client with a bound socket of its own, as a PNode has."""
        bus = ZmqBus("client", bind="tcp://127.0.0.1:0")
        await bus.start()
        return cls(bus, PeerRef("server", 0, [address]))

    def _handle(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _echo(self, size: int, step: int, body: bytes) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        self._bus.send(self._to, hop_of(size, step, True), [body], lane=FORWARD)
        await self._waiting

    async def hop(self, size: int) -> float:
        """Half the median round trip, in seconds."""
        body, times = bytes(size), []
        for step in range(hop_count(size)):
            start = time.perf_counter()
            await self._echo(size, step, body)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / 2

    async def flood(self, size: int, count: int = 0) -> float:
        """Bytes per second one way, one answer at the end."""
        body, count = bytes(size), count or flood_count(size)
        start = time.perf_counter()
        for step in range(count):
            self._bus.send(self._to, hop_of(size, step, False), [body])
            if step % 32 == 31:
                await asyncio.sleep(0)
        await self._echo(size, count, body)
        return count * size / (time.perf_counter() - start)

    async def small_messages(self, count: int = 40_000) -> float:
        """Messages of 100 bytes per second."""
        return await self.flood(100, count) / 100

    async def heartbeats_beside_bulk(self) -> list[float]:
        """Seconds that each heartbeat was under way while bulk of 1 MiB hops saturated the machine."""
        size = 1 << 20
        body = bytes(size)
        await self._bus.ask(self._to, AskCluster(new_request_id()), timeout_s=10)
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        for step in range(HEARTBEATS):
            while loop.time() < next_at:
                if self._bus.queued_bytes(self._to) < 32 * size:
                    self._bus.send(self._to, hop_of(size, step, False), [body])
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(0.0005)
            next_at += HEARTBEAT_EVERY_S
            beat = Hop("", 1, 0, step, 1, 0, 0, 0, "p1", 0, [TensorMeta("uint8", [STAMP.size])])
            self._bus.send(self._to, beat, [STAMP.pack(time.monotonic())], lane=CONTROL)
        await self._echo(1, 0, b"\0")
        _, frames = await self._bus.ask(self._to, AskCluster(new_request_id()), timeout_s=10)
        return list(struct.unpack(f"!{len(frames[0]) // 8}d", frames[0]))

    async def close(self) -> None:
        """Say goodbye."""
        await self._bus.close()


if __name__ == "__main__":
    run(serve())
