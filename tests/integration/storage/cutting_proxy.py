"""A line between a client and a storage service: slow, counted in bytes, and cut when told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE = 16 << 10


class CuttingProxy:
    """`bytes_s`: the rate of the line, each way. `down`: bytes that came from the service, delivered or not."""

    def __init__(self, host: str, port: int, bytes_s: float) -> None:
        self._far = (host, port)
        self._bytes_s = bytes_s
        self._free = {"up": 0.0, "down": 0.0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead = False
        self.moved = {"up": 0, "down": 0}
        self.cuts = 0
        self.address = ""

    async def cut(self, seconds: float) -> None:
        """All connections break, and for so long none comes about."""
        self.cuts += 1
        self._dead = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(seconds)
        self._dead = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer = None
        try:
            if self._dead:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)  # or what is under way vanishes in the kernel
            far.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(far, self._far)
            except BaseException:
                far.close()
                raise
            far_reader, far_writer = await asyncio.open_connection(sock=far, limit=PIECE)
            await asyncio.gather(self._relay("up", reader, far_writer), self._relay("down", far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, far_writer):
                if one is not None:
                    one.transport.abort()

    async def _relay(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        while data := await reader.read(PIECE):
            self.moved[way] += len(data)
            if self._bytes_s:
                self._free[way] = max(self._free[way], now()) + len(data) / self._bytes_s
                await asyncio.sleep(self._free[way] - now())
            writer.write(data)
            await writer.drain()
        raise ConnectionError


@asynccontextmanager
async def cutting_proxy(address: str, bytes_s: float = 0.0) -> AsyncIterator[CuttingProxy]:
    """A line to the service at `tcp://host:port`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    proxy = CuttingProxy(host, int(port), bytes_s)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, limit=PIECE)
    proxy.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(proxy._tasks):
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await server.wait_closed()
