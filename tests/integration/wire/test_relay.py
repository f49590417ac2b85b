"""Two that can only dial, joined by a third: real sockets, and what the third sees."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.wire.keyed import Keyed, Recorder, running, until
from tests.integration.wire.peers import hop
from wire.errors import UnreachableError
from wire.ids import new_request_id
from wire.keys import KeyPair
from wire.messages import BACKWARD, Hop, PeerRef, RelayOpen, RelayTicket, TensorMeta
from wire.relay import RelayLimits
from wire.requests import RefusedError
from wire.splice import RelayServer, Stub, answer


class Behind(Keyed):
    """One that nobody can dial; it answers tickets, as a daemon does."""

    def __init__(self, name: str) -> None:
        super().__init__(name, reachable=False)
        self.streams: set[asyncio.Task[None]] = set()
        self.bus.on_message(self._message)

    def _message(self, sender, message, frames) -> None:
        if isinstance(message, RelayTicket):
            task = asyncio.ensure_future(answer(self.bus, message))
            self.streams.add(task)
            task.add_done_callback(self.streams.discard)
        else:
            self._took(sender, message, frames)


@asynccontextmanager
async def three(**limits: float) -> AsyncIterator[tuple[Behind, Behind, Keyed, RelayServer]]:
    a, b, r = Behind("a"), Behind("b"), Keyed("r")
    relay = RelayServer(r.bus, "tcp://127.0.0.1:0", limits=RelayLimits(**limits))  # type: ignore[arg-type]
    r.bus.on_message(lambda sender, message, frames: (
        relay.take(sender, message) if isinstance(message, RelayOpen) else r._took(sender, message, frames)
    ))  # fmt: skip
    async with running(a, b, r):
        await relay.start()
        for one in (a, b):
            assert one.bus.me.addresses == []
            one.bus.send(r.anyone, hop(0))
        await until(lambda: len(r.got) == 2)
        try:
            yield a, b, r, relay
        finally:
            await relay.close()
    await asyncio.sleep(0.1)


async def test_two_that_only_dial_exchange_messages_both_ways_and_the_relay_sees_none_of_it():
    secret = b"what only the two may know" * 8192
    async with three() as (a, b, r, relay), Recorder(relay.address) as line:
        relay.address = line.address  # all that goes through the relay goes through here
        stub = Stub(a.bus, [r.anyone], "b")
        await stub.start()
        there = PeerRef("b", b.bus.me.boot, [stub.address], b.pair.public)
        for step in range(20):
            size = len(secret) * (1 + step % 3)
            message = Hop("run", 1, 0, step, 0, 0, 0, step, "a", 1, [TensorMeta("uint8", [size])])
            a.bus.send(there, message, [secret * (1 + step % 3)])
            await until(lambda: b.got)
            sender, got, frames = b.got.pop()
            assert (sender.id, sender.key, got) == ("a", a.pair.public, message)
            assert frames == [secret * (1 + step % 3)]
            b.bus.send(sender, got, frames, lane=BACKWARD)
            await until(lambda: a.got)
            sender, got, frames = a.got.pop()
            assert (sender.id, sender.key, got) == ("b", b.pair.public, message)
            assert frames == [secret * (1 + step % 3)]
        captured = b"".join((*line.sent, *line.back))
        assert len(captured) > 20 * 2 * len(secret)
        assert relay.carried_bytes > 20 * 2 * len(secret)
        assert len(line.sent) >= 6, "three lanes, two ends"
        for text in (b"what only", b"two may know", b"hop", b"uint8", a.pair.public.encode()):
            assert text not in captured
        assert not a.refused and not b.refused  # noqa: PT018
        await stub.close()


async def test_a_relay_that_lies_about_who_is_there_gets_nothing(caplog):
    async with three() as (a, b, r, _):
        stub = Stub(a.bus, [r.anyone], "b")
        await stub.start()
        other = KeyPair.new().public
        with pytest.raises(UnreachableError):
            await a.bus.ask(PeerRef("b", 0, [stub.address], other), RelayOpen(new_request_id(), "x"), timeout_s=2)
        assert not b.got
        await stub.close()


async def test_a_cut_of_the_relays_lines_is_mended_and_nothing_is_lost():
    async with three() as (a, b, r, relay):
        stub = Stub(a.bus, [r.anyone], "b")
        await stub.start()
        there = PeerRef("b", b.bus.me.boot, [stub.address], b.pair.public)
        rng = random.Random(1)
        for step in range(30):
            a.bus.send(there, hop(step, [100_000]), [rng.randbytes(100_000)])
            if step in (10, 20):
                await asyncio.sleep(0.2)
                for _, writer in list(relay._ends.values()):
                    writer.close()
        await until(lambda: len(b.got) == 30, 60)
        assert [message.step for _, message, _ in b.got] == list(range(30))
        assert not a.lost and not b.lost  # noqa: PT018
        await stub.close()


async def test_who_is_not_there_or_too_much_is_refused():
    async with three(streams_per_peer=2) as (a, b, r, relay):
        for to, text in (("nobody", "no link"), ("a", "different")):
            with pytest.raises(RefusedError, match=text):
                await a.bus.ask(r.anyone, RelayOpen(new_request_id(), to), timeout_s=10)
        stub = Stub(a.bus, [r.anyone], "b")
        await stub.start()
        a.bus.send(PeerRef("b", 0, [stub.address], b.pair.public), hop(1))
        await until(lambda: "2 streams of a are relayed already" in stub.problem, 15)
        assert len(relay.desk) == 2
        await stub.close()


async def test_strangers_at_the_relays_port():
    async with three(waiting=8, ticket_wait_s=0.5) as (a, b, r, relay):
        port = int(relay.address.rpartition(":")[2])
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for index, (_, writer) in enumerate(connections):
            if index % 2:
                writer.write(random.Random(index).randbytes(100))
        await asyncio.sleep(0.1)
        assert relay._waiting <= 8
        for reader, writer in connections:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(5):
                    assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert relay._waiting == 0 and not relay._ends  # noqa: PT018
        stub = Stub(a.bus, [r.anyone], "b")
        await stub.start()
        a.bus.send(PeerRef("b", 0, [stub.address], b.pair.public), hop(1))
        await until(lambda: b.got)
        await stub.close()


async def test_a_stream_that_is_idle_ends():
    async with three(idle_s=0.3) as (a, b, r, relay):
        stub = Stub(a.bus, [r.anyone], "b")
        await stub.start()
        a.bus.send(PeerRef("b", 0, [stub.address], b.pair.public), hop(1))
        await until(lambda: b.got)
        await until(lambda: len(relay.desk) == 0, 15)
        a.bus.send(PeerRef("b", b.bus.me.boot), hop(2))
        await until(lambda: len(b.got) == 2)
        await stub.close()
