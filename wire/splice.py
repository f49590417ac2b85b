"""Relayed connections: TCP streams passed on as they are.

`RelayServer` runs at a process that can be dialled. `Stub` runs at the one that wants to reach another: a port on
loopback that its bus dials instead; each connection there becomes one through the relay. The other end is told by a
`RelayTicket` and calls `answer`, which joins the relay's connection with its own bus's bound socket. CURVE goes from
end to end through all of it, so nobody on the way can read, change or repeat anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from wire.directory import check_address
from wire.errors import DCNRError
from wire.ids import new_request_id
from wire.messages import PeerRef, Refused, RelayOpen, RelayTicket
from wire.relay import TICKET_CHARS, TICKET_S, Desk, RelayLimits, Stream
from wire.zmq_bus import ZmqBus

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

PIECE_BYTES = 64 << 10
DIAL_S = 10.0
AGAIN_S = 1.0


class RelayServer:
    """Joins others' streams. `bind`: where, such as tcp://0.0.0.0:0; `seen_at`: the host to dial, if another."""

    def __init__(self, bus: ZmqBus, bind: str, *, seen_at: str = "", limits: RelayLimits | None = None) -> None:
        self._bus = bus
        self._bind = bind
        self._seen_at = seen_at
        self.address = ""
        self.desk = Desk(limits)
        self.carried_bytes = 0
        self._server: asyncio.Server | None = None
        self._waiting = 0
        self._numbers = 0
        self._ends: dict[int, Streams] = {}
        self._whole: dict[int, asyncio.Event] = {}  # by the stream's identity: both ends are here

    async def start(self) -> None:
        """Listen. Raises OSError."""
        host, port = _split(self._bind)
        self._server = await asyncio.start_server(self._came, host, port, limit=self._half())
        self.address = f"tcp://{shown(self._seen_at or host)}:{self._server.sockets[0].getsockname()[1]}"
        check_address(self.address)

    async def close(self) -> None:
        """End all streams."""
        if self._server is not None:
            self._server.close()
        for _, writer in list(self._ends.values()):
            writer.close()

    def _half(self) -> int:
        return self.desk.limits.buffer_bytes // 2

    def take(self, sender: PeerRef, message: RelayOpen) -> None:
        """Somebody asks for a stream."""
        now = asyncio.get_running_loop().time()
        problem = self.desk.problem(sender.id, message.to, now)
        if problem:
            self._bus.send(sender, Refused(message.request_id, "relay", problem))
            return
        theirs, others = self.desk.open(sender.id, message.to, now)
        try:
            self._bus.send(PeerRef(message.to), RelayTicket("", sender.id, self.address, others))
        except DCNRError:
            text = f"{message.to} has no link to this relay"
            self._bus.send(sender, Refused(message.request_id, "relay", text))
            return
        self._bus.send(sender, RelayTicket(message.request_id, message.to, self.address, theirs))

    def expel(self, admitted: Callable[[str], bool]) -> None:
        """Somebody is let in no longer: his streams end."""
        for stream in self.desk.expel(admitted):
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        for number in stream.here.values():
            if number in self._ends:
                self._ends[number][1].close()

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            stream, number = await self._ticket(reader, writer)
            if stream is not None:
                await self._joined(stream, number)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            await _end(writer)

    async def _ticket(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Stream | None, int]:
        if self._waiting >= self.desk.limits.waiting:
            return None, 0
        self._waiting += 1
        try:
            async with asyncio.timeout(self.desk.limits.ticket_wait_s):
                shown = await reader.readexactly(TICKET_CHARS)
        finally:
            self._waiting -= 1
        self._numbers += 1
        now = asyncio.get_running_loop().time()
        stream = self.desk.present(shown.decode("ascii", "replace"), self._numbers, now)
        if stream is not None:
            self._ends[self._numbers] = (reader, writer)
        return stream, self._numbers

    async def _joined(self, stream: Stream, number: int) -> None:
        """The second end carries both directions; the first waits until that is over."""
        over = self._whole.setdefault(id(stream), asyncio.Event())
        try:
            if len(stream.here) == 2:
                one, other = (self._ends[stream.here[end]] for end in (0, 1))
                await join(one, other, idle_s=self.desk.limits.idle_s, half=self._half(), count=self._count)
            else:
                async with asyncio.timeout(TICKET_S):
                    while len(stream.here) < 2:
                        await asyncio.sleep(0.05)
                        if self._ends[number][0].at_eof():
                            return
                await over.wait()
        finally:
            over.set()
            self._whole.pop(id(stream), None)
            self._ends.pop(number, None)
            self.desk.close(stream)

    def _count(self, size: int) -> None:
        self.carried_bytes += size


class Stub:
    """A port on loopback that leads to `to` through a relay: the first of several that can."""

    def __init__(self, bus: ZmqBus, relays: Sequence[PeerRef], to: str) -> None:
        self._bus = bus
        self.relays = list(relays)
        self._to = to
        self._server: asyncio.Server | None = None
        self.address = ""
        self.problem = ""
        """Why the last try failed, "" if it did not."""

    async def start(self) -> None:
        """Listen; `address` is then what to dial."""
        self._server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Listen no longer; connections that stand go on."""
        if self._server is not None:
            self._server.close()

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for relay in list(self.relays):
                if await self._by(relay, (reader, writer)):
                    return
                if relay in self.relays:  # the others come first from now on
                    self.relays.remove(relay)
                    self.relays.append(relay)
            await asyncio.sleep(AGAIN_S)  # the bus dials again at once
        finally:
            await _end(writer)

    async def _by(self, relay: PeerRef, near: Streams) -> bool:
        """Lead a connection through one relay, until it ends; False if it did not begin."""
        begun = False

        async def begin() -> Streams:
            nonlocal begun
            begun = True
            return near

        try:
            answer, _ = await self._bus.ask(relay, RelayOpen(str(new_request_id()), self._to), timeout_s=DIAL_S)
            if isinstance(answer, RelayTicket):
                self.problem = ""
                await through(answer, begin)
        except (DCNRError, OSError, TimeoutError) as error:
            self.problem = str(error)
        return begun


async def answer(bus: ZmqBus, ticket: RelayTicket) -> None:
    """The end that was not asked: join the relay's connection with this process's own bound socket. Ends with it."""
    host, port = _split(bus.inner)
    with contextlib.suppress(OSError, TimeoutError, DCNRError):
        await through(ticket, lambda: asyncio.open_connection(host, port))


async def through(ticket: RelayTicket, near: Callable[[], Awaitable[Streams]]) -> None:
    """Dial the relay, show the ticket, and join it with what is near. Raises OSError, TimeoutError, DCNRError."""
    check_address(ticket.address)
    host, port = _split(ticket.address)
    async with asyncio.timeout(DIAL_S):
        far = await asyncio.open_connection(host, port)
    try:
        far[1].write(ticket.ticket.encode())
        here = await near()
        try:
            await join(far, here)
        finally:
            await _end(here[1])
    finally:
        await _end(far[1])


async def join(
    one: Streams, other: Streams, *, idle_s: float = 0.0, half: int = 128 << 10,
    count: Callable[[int], None] = lambda size: None,
) -> None:  # fmt: skip
    """Pass bytes on, both ways, until either side ends or both were idle for `idle_s` (0: for ever)."""
    loop = asyncio.get_running_loop()
    moved = loop.time()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal moved
        writer.transport.set_write_buffer_limits(high=half)
        while data := await reader.read(PIECE_BYTES):
            moved = loop.time()
            count(len(data))
            writer.write(data)
            await writer.drain()

    async def watch() -> None:
        while True:
            left = moved + idle_s - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(left)

    tasks = [asyncio.ensure_future(pump(one[0], other[1])), asyncio.ensure_future(pump(other[0], one[1]))]
    if idle_s:
        tasks.append(asyncio.ensure_future(watch()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, writer in (one, other):
            writer.close()


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.wait_closed()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def host_of(address: str) -> str:
    """The host of an address, without brackets."""
    return _split(address)[0]


def shown(host: str) -> str:
    """The host as it stands in an address."""
    return f"[{host}]" if ":" in host else host
