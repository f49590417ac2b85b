"""A relay of bytes before a server that is slow, or that lets a connection stand still after so many bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PIECE = 8 << 10


@dataclass
class SlowProxy:
    """`down_bytes_s`, `up_bytes_s`: rates of each connection, 0 for none. `freeze_down`, `freeze_up`: after so many
    bytes a connection stands still, as long as `frozen` connections are left to do so."""

    endpoint: str = ""
    down_bytes_s: float = 0.0
    up_bytes_s: float = 0.0
    freeze_down: int = 0
    freeze_up: int = 0
    frozen: int = 0
    connections: int = 0
    moved: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    async def serve(
        self, upstream: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection."""
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(*upstream)
        try:
            async with asyncio.TaskGroup() as group:
                up = group.create_task(self._relay("up", reader, far_writer))
                down = group.create_task(self._relay("down", far_reader, writer))
                await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
                up.cancel()
                down.cancel()
        finally:
            for one in (writer, far_writer):
                one.transport.abort()

    async def _relay(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        with suppress(ConnectionError):
            while data := await reader.read(PIECE):
                passed += len(data)
                limit = self.freeze_down if way == "down" else self.freeze_up
                if limit and passed > limit and self.frozen > 0:
                    self.frozen -= 1
                    await asyncio.sleep(3600)
                rate = self.down_bytes_s if way == "down" else self.up_bytes_s
                if rate:
                    await asyncio.sleep(len(data) / rate)
                self.moved[way] += len(data)
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def slow_proxy(upstream: str) -> AsyncIterator[SlowProxy]:
    """A relay before the server at the URL `upstream`."""
    parts = urlsplit(upstream)
    assert parts.hostname
    assert parts.port
    target = (parts.hostname, parts.port)
    proxy = SlowProxy()
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        running.add(task)
        try:
            with suppress(ConnectionError, asyncio.CancelledError):
                await proxy.serve(target, reader, writer)
        finally:
            running.discard(task)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)  # or an upload would vanish in the kernel
    server = await asyncio.start_server(accept, sock=listener, limit=PIECE)
    proxy.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
