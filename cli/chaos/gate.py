"""A TCP proxy before one process: all who dial that process dial the gate, and the gate can hurt what passes.

A process advertises its gate's address (`--advertise`), so peers learn it like any other. Peers are told by address
only, so there can't be a port for each pair; instead each connection is known by who dialled it, which its ZMTP
handshake says (`zmtp`). DCNR's connections carry data in one direction, from who dialled; so a rule for the source A at
the gate of B is a rule for the line from A to B. Until a connection has said whose it is, it passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cli.chaos.zmtp import Reader

QUEUE_BYTES = 1 << 20
PIECE_BYTES = 16 << 10
DIAL_S = 5.0

Peek = Callable[[str, str, bytes], None]
"""Called with source, target and the header of each packet that is about to pass."""


@dataclass(slots=True)
class Rule:
    """What happens to a line while the rule stands."""

    delay_s: float = 0.0
    bytes_s: float = 0.0
    cut_in: bool = False
    """Towards the target."""
    cut_out: bool = False
    """From the target."""
    flips: int = 0
    """So many of the next pieces towards the target lose the value of one bit."""


class Gate:
    """The gate of `target`. `plain`: what passes is not ZMTP, so no source is known (each counts as "")."""

    def __init__(self, target: str, *, draw: random.Random, plain: bool = False, peek: Peek | None = None) -> None:
        self.target = target
        self.plain = plain
        self.peek = peek
        self.draw = draw
        self.port = 0
        self.flipped = 0
        self.links: set[Link] = set()
        self._rules: dict[str, Rule] = {}
        self._aim = ("127.0.0.1", 0)
        self._server: asyncio.Server | None = None
        self._dials: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """What the target advertises."""
        return f"tcp://127.0.0.1:{self.port}"

    def aim(self, host: str, port: int) -> None:
        """Where the target really listens."""
        self._aim = (host, port)

    async def open(self) -> None:
        """Listen on a free port of this machine."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Link(self).near, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Drop all and listen no more."""
        if self._server is not None:
            self._server.close()
        for task in list(self._dials):
            task.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        self.drop()
        await asyncio.sleep(0)

    def rule(self, source: str) -> Rule | None:
        """What stands for a source."""
        return self._rules.get(source)

    def set(self, source: str, rule: Rule | None) -> None:
        """Set or (None) lift the rule of a source."""
        if rule is None:
            self._rules.pop(source, None)
        else:
            self._rules[source] = rule
        for link in self.of(source):
            link.obey()

    def of(self, source: str) -> list[Link]:
        """The connections that a source has."""
        return [link for link in self.links if link.source == source]

    def sources(self) -> list[str]:
        """Who is connected, by name."""
        return sorted({link.source for link in self.links if link.source is not None})

    def drop(self, source: str | None = None) -> int:
        """Reset the connections of a source, or all; how many."""
        gone = [link for link in self.links if source is None or link.source == source]
        for link in gone:
            link.abort()
        return len(gone)

    def dial(self, link: Link) -> None:
        """Connect a new connection to the target; if nobody is there, it is reset."""
        task = asyncio.ensure_future(self._dial(link))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, link: Link) -> None:
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().create_connection(lambda: link.far, *self._aim)
        except (OSError, TimeoutError):
            link.abort()


class Link:
    """One connection through a gate: `near` is the side of who dialled, `far` that of the target."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.source: str | None = "" if gate.plain else None
        self.reader = None if gate.plain else Reader()
        self.near = Side(self)
        self.far = Side(self)
        self.near.to, self.far.to = self.far, self.near

    def begun(self, side: Side) -> None:
        """A side is connected."""
        if side is self.near:
            self.gate.links.add(self)
            self.obey()
            self.gate.dial(self)

    def look(self, data: bytes) -> None:
        """Learn from what passes towards the target."""
        if self.reader is None:
            return
        for header in self.reader.feed(data):
            if self.gate.peek is not None:
                self.gate.peek(self.reader.source, self.gate.target, header)
        if self.source is None and self.reader.source:
            self.source = self.reader.source
            if self.gate.peek is None:
                self.reader = None
            self.obey()

    def obey(self) -> None:
        """Do as the rule says."""
        rule = self.gate.rule(self.source) if self.source is not None else None
        self.near.hold("cut", rule is not None and rule.cut_in)
        self.far.hold("cut", rule is not None and rule.cut_out)

    def abort(self) -> None:
        """Reset both sides."""
        self.gate.links.discard(self)
        self.near.abort()
        self.far.abort()


class Side(asyncio.Protocol):
    """One end of a connection; what it receives goes out at its other end."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.to: Side = self
        self.transport: asyncio.Transport | None = None
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.waiting_bytes = 0
        self.ended = False
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._holds: set[str] = set()

    # ------------------------------------------------------------ asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._holds:
            transport.pause_reading()
        self.link.begun(self)
        self.to.push()

    def data_received(self, data: bytes) -> None:
        link = self.link
        inward = self is link.near
        if inward:
            link.look(data)
        rule = link.gate.rule(link.source) if link.source is not None else None
        if rule is None and not self.waiting and self.to.transport is not None:
            self.to.transport.write(data)
            return
        if rule is not None and rule.flips and inward:
            rule.flips -= 1
            data = self._flipped(data)
        self._keep(data, rule)
        self.push()

    def eof_received(self) -> bool:
        self.ended = True
        self.push()
        return True

    def connection_lost(self, problem: Exception | None) -> None:
        self.link.abort()

    def pause_writing(self) -> None:
        self.to.hold("full", True)

    def resume_writing(self) -> None:
        self.to.hold("full", False)

    # ------------------------------------------------------------ ours

    def hold(self, why: str, on: bool) -> None:
        """Read no more from this end, or again."""
        before = bool(self._holds)
        (self._holds.add if on else self._holds.discard)(why)
        if self.transport is None or self.transport.is_closing() or before == bool(self._holds):
            return
        if self._holds:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def push(self) -> None:
        """Pass on what is due."""
        out = self.to.transport
        if out is None or out.is_closing():
            return
        now = asyncio.get_running_loop().time()
        while self.waiting and self.waiting[0][0] <= now:
            _, data = self.waiting.popleft()
            self.waiting_bytes -= len(data)
            out.write(data)
        self.hold("queue", self.waiting_bytes > QUEUE_BYTES)
        if self.waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self.waiting[0][0], self._again)
        elif not self.waiting and self.ended:
            with contextlib.suppress(OSError):
                out.write_eof()

    def abort(self) -> None:
        """Reset."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.waiting.clear()
        if self.transport is not None:
            self.transport.abort()

    def _again(self) -> None:
        self._timer = None
        self.push()

    def _keep(self, data: bytes, rule: Rule | None) -> None:
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now + (rule.delay_s if rule is not None else 0.0))
        pace = rule.bytes_s if rule is not None else 0.0
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            if pace:
                self._due += len(piece) / pace
            self.waiting.append((self._due, piece))
            self.waiting_bytes += len(piece)
        self.hold("queue", self.waiting_bytes > QUEUE_BYTES)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        place = self.link.gate.draw.randrange(len(changed) * 8)
        changed[place // 8] ^= 1 << place % 8
        self.link.gate.flipped += 1
        return bytes(changed)
