"""The bus on real sockets, between two processes."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio
import zmq

from tests.integration.wire.peers import digest, echo_process, hop, start_echo
from wire.admission import Admission
from wire.errors import MisuseError, UnreachableError
from wire.ids import new_request_id
from wire.keys import KeyPair
from wire.limits import LIMITS
from wire.messages import BACKWARD, FORWARD, AskCluster, Hop, InferOutput, ListPNodes, Message, Ok, PeerRef, TensorMeta
from wire.zmq_bus import BindError, ZmqBus


class Client:
    """A bus that keeps what comes."""

    def __init__(self, bind: str | None = "tcp://127.0.0.1:0", **options: object) -> None:
        self.bus = ZmqBus("client", bind=bind, **options)  # type: ignore[arg-type]
        self.got: asyncio.Queue[tuple[Message, list[bytes]]] = asyncio.Queue()
        self.lost: list[tuple[PeerRef, str]] = []
        self.bus.on_message(self._took)
        self.bus.on_loss(lambda peer, reason: self.lost.append((peer, reason)))

    def _took(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        self.got.put_nowait((message, [bytes(frame) for frame in frames]))

    async def next(self) -> tuple[Message, list[bytes]]:
        async with asyncio.timeout(30):
            return await self.got.get()

    async def log(self, to: PeerRef) -> list[str]:
        """What the echo process has got."""
        _, frames = await self.bus.ask(to, AskCluster(new_request_id()), timeout_s=30)
        return bytes(frames[0]).decode().split()

    async def their_counters(self, to: PeerRef) -> dict[str, int]:
        _, frames = await self.bus.ask(to, ListPNodes(new_request_id()), timeout_s=30)
        pairs = (pair.split("=") for pair in bytes(frames[0]).decode().split(";"))
        return {key: int(value) for key, value in pairs}

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110, the bus has no event for it
                await asyncio.sleep(0.005)

    async def acknowledged(self, to: PeerRef, timeout_s: float = 60) -> None:
        await self.until(lambda: not self.bus.queued_bytes(to), timeout_s)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    made = Client()
    await made.bus.start()
    yield made
    await made.bus.close()


def echoed(step: int, sizes: Sequence[int]) -> Hop:
    tensors = [TensorMeta("uint8", [size]) for size in sizes]
    return Hop("run", 1, 0, step, 0, 0, 0, step, "a", 1, tensors)


@pytest.mark.parametrize("bind", [None, "tcp://127.0.0.1:0", "tcp://[::1]:0"])
async def test_messages_of_all_sizes_there_and_back(bind):
    client = Client(bind)
    await client.bus.start()
    rng = random.Random(1)
    with echo_process("tcp://[::1]:0" if bind and "::" in bind else "tcp://127.0.0.1:0") as server:
        for step, sizes in enumerate([[], [0], [1], [100, 0, 70_000], [1 << 20], [5 << 20, 3], [17 << 20]]):
            frames = [rng.randbytes(size) for size in sizes]
            client.bus.send(server.anyone, echoed(step, sizes), frames)
            message, back = await client.next()
            assert message == echoed(step, sizes)
            assert back == frames
        assert "damaged" not in client.bus.counters()
        await client.bus.close()


async def test_a_message_may_end_the_connection_that_it_came_over():
    """Seen where a client watched an orchestrator that was killed and came back."""
    problems: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    client = Client(bind=None)

    def handle(sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        client.bus.forget(sender)
        client.got.put_nowait((message, []))

    client.bus.on_message(handle)
    with echo_process() as server:
        await client.bus.start()
        for step in range(20):
            client.bus.send(server.anyone, echoed(step, []))
        time.sleep(0.3)  # noqa: ASYNC251, so that several answers wait together
        message, _ = await client.next()
        await asyncio.sleep(0.1)
        await client.bus.close()
    assert message.step == 0
    assert problems == []


async def test_all_addresses_and_boots_are_known_after_the_first_answer(client):
    with echo_process() as server:
        client.bus.send(server.anyone, echoed(1, []))
        await client.next()
        client.bus.send(server.ref, echoed(2, []))
        client.bus.send(PeerRef("echo"), echoed(3, []))  # there is a link by that id
        assert [(await client.next())[0].step for _ in range(2)] == [2, 3]
        assert client.bus.counters()["dealers"] <= 2


async def test_16_mib_without_a_copy_and_the_buffer_used_again_once_acknowledged(client):
    """B09: what arrives is what was in the buffer when it was sent, every time."""
    size = 16 << 20
    buffer = bytearray(size)
    expected = []
    with echo_process() as server:
        for step in range(20):
            buffer[:] = bytes([step]) * size
            client.bus.send(server.anyone, hop(step, [size]), [buffer])
            expected.append(f"{step}:{digest([buffer])}")
            await client.acknowledged(server.anyone)
        assert await client.log(server.anyone) == expected


async def test_a_buffer_changed_too_early_never_arrives_as_something_else(client):
    size = 16 << 20
    with echo_process() as server:
        await client.log(server.anyone)
        buffer = bytearray(size)
        right = f"0:{digest([buffer])}"
        client.bus.send(server.anyone, hop(0, [size]), [buffer])
        buffer[:] = b"\1" * size
        await client.until(lambda: bool(client.lost) or not client.bus.queued_bytes(server.anyone))
        log = await client.log(server.anyone)
        assert log in ([], [right])
        if not log:
            assert "was changed by this process" in client.lost[0][1]


async def test_a_receiver_killed_and_restarted_under_a_new_boot(client):
    server = start_echo()
    address = server.ref.addresses[0]
    await client.log(server.anyone)
    for step in range(300):
        client.bus.send(server.ref, hop(step, [65536]), [bytes(65536)])
    server.kill()
    with echo_process(address) as restarted:
        assert restarted.ref.boot != server.ref.boot
        await client.until(lambda: bool(client.lost))
        [(peer, reason)] = client.lost
        assert peer.boot == server.ref.boot
        assert "restarted" in reason or "has taken its address" in reason
        assert await client.log(restarted.anyone) == []  # nothing of the old boot's reaches the new one
        client.bus.send(restarted.ref, hop(7))
        async with asyncio.timeout(30):
            while not await client.log(restarted.anyone):
                pass
    assert len(client.lost) == 1


async def test_a_receiver_that_stands_still_loses_nothing(client):
    """B01: 2,000 activations of 64 KiB while the receiver is stopped."""
    with echo_process() as server:
        await client.log(server.anyone)
        server.signal(signal.SIGSTOP)
        body = bytes(65536)
        for step in range(2000):
            client.bus.send(server.ref, hop(step, [65536]), [body])
            if step % 100 == 0:
                await asyncio.sleep(0.05)
        assert client.bus.queued_bytes(server.ref) > 100 << 20
        await asyncio.sleep(2)
        server.signal(signal.SIGCONT)
        await client.acknowledged(server.ref)
        log = await client.log(server.anyone)
        assert [int(entry.split(":")[0]) for entry in log] == list(range(2000))
        assert client.lost == []
        assert client.bus.counters()["peers"][f"echo/{server.ref.boot}"]["resends"] == 0


async def test_the_end_of_a_process_shows_at_once_by_its_connection_and_a_pause_does_not(client):
    broken: asyncio.Queue[PeerRef] = asyncio.Queue()
    client.bus.on_break(broken.put_nowait)
    for _ in range(3):
        with echo_process() as server:
            await client.log(server.anyone)
            (known,) = client.bus.heard()
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            assert broken.empty(), "its system still keeps the connection"
            server.signal(signal.SIGCONT)
            await client.log(server.anyone)
            server.kill()
            async with asyncio.timeout(5):
                assert await broken.get() == known
            assert client.bus.heard() == [], "what came before is no sign of life"
            assert not client.lost, "a hint, no loss"
            client.bus.forget(known)


async def test_control_passes_bulk(client):
    with echo_process() as server:
        await client.log(server.anyone)
        for step in range(64):
            client.bus.send(server.ref, hop(step, [4 << 20]), [bytes(4 << 20)])
        start = time.monotonic()
        await client.log(server.anyone)
        assert time.monotonic() - start < 2
        assert client.bus.queued_bytes(server.ref) > 0
        await client.acknowledged(server.ref)


async def test_a_handler_that_fails_does_not_stop_the_bus(client):
    with echo_process() as server:
        client.bus.send(server.anyone, InferOutput("r", 0, "y", 1, 1, []))
        assert await client.log(server.anyone) == []


class Proxy:
    """TCP in between, to break connections in ways a test can choose."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.pairs.append((writer, there_writer))
        self.tasks.append(asyncio.create_task(self.pump(reader, there_writer)))
        self.tasks.append(asyncio.create_task(self.pump(there_reader, writer)))

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass

    def half_open(self) -> None:
        """The dialling side's connections break; the other side is not told."""
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        for near, _ in self.pairs:
            near.transport.abort()

    async def close(self) -> None:
        self.half_open()
        for _, far in self.pairs:
            far.transport.abort()
        self.server.close()
        await asyncio.sleep(0.05)


async def test_half_open_connections_are_taken_over(client):
    """The ROUTER still holds the old connection when the same identity comes back."""
    with echo_process() as server:
        proxy = Proxy(int(server.ref.addresses[0].rpartition(":")[2]))
        through = PeerRef("echo", 0, [await proxy.start()])
        try:
            step = 0
            for _ in range(4):
                for _ in range(50):
                    client.bus.send(through, hop(step, [40_000]), [bytes(40_000)])
                    step += 1
                await asyncio.sleep(0.02)
                proxy.half_open()
                await asyncio.sleep(0.1)
            await client.acknowledged(through)
            log = await client.log(through)
            assert [int(entry.split(":")[0]) for entry in log] == list(range(step))
            assert client.lost == []
        finally:
            client.bus.forget(through)
            await proxy.close()


async def test_storms_of_signals_and_cancellations(client):
    """B07: 1,000 SIGINTs there and 1,000 cancelled questions here lose no message and no framing."""
    rng = random.Random(7)
    with echo_process() as server:
        await client.log(server.anyone)
        asking: list[asyncio.Task[object]] = []
        for step in range(1000):
            sizes = [rng.choice([10, 20_000, 100_000]) for _ in range(3)]
            client.bus.send(server.ref, hop(step, sizes), [bytes(size) for size in sizes])
            server.signal(signal.SIGINT)
            question = AskCluster(new_request_id())
            asking.append(asyncio.create_task(client.bus.ask(server.ref, question, timeout_s=30)))
            if step % 3 == 0:
                await asyncio.sleep(rng.random() * 0.002)
            asking[rng.randrange(len(asking))].cancel()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await client.acknowledged(server.ref)
        log = await client.log(server.anyone)
        assert [int(entry.split(":")[0]) for entry in log] == list(range(1000))
        counters = await client.their_counters(server.anyone)
        assert counters["torn_packets"] == counters.get("refused_frames", 0) == 0


async def test_strangers_and_garbage_are_counted_and_change_nothing(client):
    with echo_process() as server:
        port = int(server.ref.addresses[0].rpartition(":")[2])
        context = zmq.Context()

        def stranger(identity: bytes, *packets: list[bytes]) -> zmq.Socket[bytes]:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, identity)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            for packet in packets:
                dealer.send_multipart(packet)
            return dealer

        hostile = [[bytes.fromhex("dd7fffffff"), b"x"], [b""], [b"\x80" * 200_000], [b"a"] * 400, [b"cos\nsystem\n."]]
        names = [b"nonsense", b"a/b/c/d", b"client/1/9/0", b"\xff\xfe", b"echo/5/0/0"]
        strangers = [stranger(name, *hostile) for name in names]
        strangers.append(stranger(b"big/5/0/0", [bytes(8 << 20)]))
        try:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + struct.pack("!Q", 1 << 63))
                await asyncio.sleep(0.3)
            client.bus.send(server.anyone, echoed(1, [3]), [b"abc"])
            assert (await client.next())[1] == [b"abc"]
            counters = await client.their_counters(server.anyone)
            assert counters["refused_headers"] + counters["refused_parts"] >= 20
            assert counters["messages_received"] == 2
        finally:
            for dealer in strangers:
                dealer.close(linger=0)
            context.term()


async def test_two_hundred_buses_start_and_stop():
    """B05: nothing is left to a finaliser, and no close hangs, whether somebody answers or not."""
    with echo_process() as server:
        for number in range(100):
            start = time.monotonic()
            reachable, unreachable = Client(None), Client(None if number % 2 else "tcp://127.0.0.1:0")
            await reachable.bus.start()
            await unreachable.bus.start()
            assert (await reachable.bus.ask(server.anyone, AskCluster("r"), timeout_s=5))[0] == Ok("r")
            nobody = PeerRef("", 0, ["tcp://127.0.0.1:9"])
            with pytest.raises(UnreachableError):
                await unreachable.bus.ask(nobody, AskCluster("r"), timeout_s=0.01)
            unreachable.bus.forget(nobody)
            await asyncio.gather(reachable.bus.close(), unreachable.bus.close())
            assert time.monotonic() - start < 2


async def test_closing_is_idempotent_and_ends_all_use(client):
    with echo_process() as server:
        await client.log(server.anyone)
        await client.bus.close()
        await client.bus.close()
        with pytest.raises(MisuseError, match="closed"):
            client.bus.send(server.anyone, hop(1))


async def test_questions_end_when_the_bus_closes(client):
    asking = asyncio.create_task(client.bus.ask(PeerRef("", 0, ["tcp://127.0.0.1:9"]), AskCluster("r"), timeout_s=60))
    await asyncio.sleep(0.05)
    await client.bus.close()
    with pytest.raises(UnreachableError, match="bus was closed"):
        await asking


async def test_closing_with_somebody_unreachable_is_bounded(client):
    client.bus.send(PeerRef("", 0, ["tcp://127.0.0.1:9"]), hop(1, [1 << 20]), [bytes(1 << 20)])
    start = time.monotonic()
    await client.bus.close()
    assert time.monotonic() - start < 2


async def test_an_address_in_use_is_one_clear_line(client):
    taken = client.bus.me.addresses[0]
    with pytest.raises(BindError, match=f"can't listen on {taken}"):
        await ZmqBus("other", bind=taken).start()
    with pytest.raises(BindError, match="can't listen on"):
        await ZmqBus("other", bind="tcp://localhost:nowhere").start()


async def test_the_wildcard_is_advertised_as_an_address_that_can_be_dialled():
    open_to_all = {"keys": KeyPair.new(), "admission": Admission()}
    bus = ZmqBus("wild", bind="tcp://0.0.0.0:0", **open_to_all)
    await bus.start()
    assert "0.0.0.0" not in bus.me.addresses[0]
    await bus.close()
    bus = ZmqBus("wild", bind="tcp://0.0.0.0:0", advertise=["tcp://example.org:7700"], **open_to_all)
    await bus.start()
    assert bus.me.addresses == ["tcp://example.org:7700"]
    await bus.close()


async def test_dial_only_both_ways_in_bulk():
    """What can't be dialled receives on its own connections, in every lane."""
    client = Client(None)
    await client.bus.start()
    with echo_process() as server:
        body = random.Random(1).randbytes(9 << 20)
        for step in range(10):
            client.bus.send(server.anyone, echoed(step, [len(body)]), [body], lane=FORWARD if step % 2 else BACKWARD)
        steps = []
        for _ in range(10):
            message, frames = await client.next()
            assert frames == [body]
            steps.append(message.step)
        assert sorted(steps) == list(range(10))
    await client.bus.close()


def test_limits_are_stated_in_one_place():
    assert LIMITS.window_bytes < LIMITS.queue_bytes
    assert LIMITS.early_bytes >= LIMITS.window_bytes
    assert LIMITS.early_packets >= LIMITS.window_packets
    assert sys.maxsize > LIMITS.queue_bytes


async def test_one_that_can_only_dial_meets_one_that_then_sends_first():
    client, server = Client(None), Client()
    server.bus._id = "server"
    await client.bus.start()
    await server.bus.start()
    where = PeerRef("server", 0, server.bus.me.addresses)
    with pytest.raises(MisuseError, match="no address and no link"):
        server.bus.send(client.bus.me, hop(1))
    await client.bus.meet(where, timeout_s=30)
    server.bus.send(client.bus.me, hop(1))
    assert (await client.next())[0] == hop(1)
    await client.bus.meet(PeerRef("server", server.bus.me.boot), timeout_s=1)
    with pytest.raises(UnreachableError, match="did not answer within"):
        await client.bus.meet(PeerRef("", 0, ["tcp://127.0.0.1:9"]), timeout_s=0.2)
    await client.bus.close()
    await server.bus.close()
