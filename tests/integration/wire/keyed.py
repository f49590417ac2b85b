"""Buses with keys for the tests, and a TCP proxy that records and repeats."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from wire.admission import Admission
from wire.keys import KeyPair
from wire.messages import Admitted, Message, PeerRef
from wire.roles import PNODE
from wire.zmq_bus import ZmqBus


class Keyed:
    """A bus with a key of its own that keeps what comes."""

    def __init__(
        self,
        name: str,
        role: str = PNODE,
        *,
        bind: str | None = "tcp://127.0.0.1:0",
        pair: KeyPair | None = None,
        reachable: bool = True,
    ) -> None:
        self.pair = pair or KeyPair.new()
        self.entry = Admitted(self.pair.public, name, role)
        self.admission = Admission()
        self.bus = ZmqBus(name, bind=bind, keys=self.pair, admission=self.admission, reachable=reachable)
        self.got: list[tuple[PeerRef, Message, list[bytes]]] = []
        self.lost: list[tuple[PeerRef, str]] = []
        self.bus.on_message(self._took)
        self.bus.on_loss(lambda peer, reason: self.lost.append((peer, reason)))

    def _took(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        self.got.append((sender, message, [bytes(frame) for frame in frames]))

    @property
    def anyone(self) -> PeerRef:
        """Where it is, for one who has not met it."""
        return PeerRef(self.entry.id, 0, self.bus.me.addresses, self.pair.public)

    def admit(self, *others: Keyed) -> None:
        """The list of now: these, and nobody else."""
        self.admission.replace(self.admission.version + 1, [other.entry for other in others])

    @property
    def refused(self) -> int:
        """How many connections and packets were refused."""
        assert self.bus._guard is not None
        return self.bus._guard.refusals.refused


@asynccontextmanager
async def running(*peers: Keyed, strangers: Sequence[Keyed] = ()) -> AsyncIterator[None]:
    """Started, and each admitting the others; strangers admit all, and are admitted by none."""
    try:
        for peer in (*peers, *strangers):
            peer.admit(*(other for other in peers if other is not peer))
            await peer.bus.start()
        yield
    finally:
        for peer in (*peers, *strangers):
            await peer.bus.close()


async def until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait for it to hold."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110, the bus has no event for it
            await asyncio.sleep(0.005)


class Recorder:
    """A TCP proxy in front of an address that keeps, per connection, what the dialler sent and what came back."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.sent: list[bytearray] = []
        self.back: list[bytearray] = []
        self.upstream: list[asyncio.StreamWriter] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of one's own to what is behind it."""
        host, _, port = self._target.removeprefix("tcp://").rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await self.dial()
        sent, answers = bytearray(), bytearray()
        self.sent.append(sent)
        self.back.append(answers)
        self.upstream.append(back)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    kept += data
                    target.write(data)
                    await target.drain()
            target.close()

        self._writers += [back, writer]
        await asyncio.gather(pump(reader, back, sent), pump(there, writer, answers))

    async def __aenter__(self) -> Recorder:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *problem: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await asyncio.sleep(0.05)
