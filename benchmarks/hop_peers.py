"""The transports that a user would pick instead: a blocking TCP socket with a length prefix, and a gRPC stream.

Each has a server (a process of its own: `python -m benchmarks.hop_peers socket|grpc`, prints its port) that echoes a
message whose first byte (gRPC) or flag (socket) asks for it, and a client with `hop` and `flood`.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import struct
import sys
import time
from typing import Any

FLOOD_BYTES = 256 << 20
PREFIX = struct.Struct("!QB")


def hop_count(size: int) -> int:
    """Round trips per measurement."""
    return max(10, min(500, (64 << 20) // size))


def flood_count(size: int) -> int:
    """Messages per flood."""
    return max(8, min(5000, FLOOD_BYTES // size))


def fill(connection: socket.socket, target: memoryview) -> None:
    """Receive exactly as much as `target` holds. Raises `EOFError`."""
    while target:
        count = connection.recv_into(target)
        if count == 0:
            raise EOFError
        target = target[count:]


def serve_socket() -> None:
    """Echo on one connection after another, into one buffer that is used again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        prefix, body = memoryview(bytearray(PREFIX.size)), memoryview(bytearray(1))
        while True:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    while True:
                        fill(connection, prefix)
                        size, echo = PREFIX.unpack(prefix)
                        if len(body) != size:
                            body = memoryview(bytearray(size))
                        fill(connection, body)
                        if echo:
                            connection.sendall(body)
                except EOFError:
                    pass


class SocketClient:
    """The floor: what the machine can do."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, body: bytes, echo: int) -> None:
        self._connection.sendall(PREFIX.pack(len(body), echo))
        self._connection.sendall(body)

    async def hop(self, size: int) -> float:
        """Half the median round trip, in seconds."""
        body, answer, times = bytes(size), memoryview(bytearray(size)), []
        for _ in range(hop_count(size)):
            start = time.perf_counter()
            self._send(body, 1)
            fill(self._connection, answer)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / 2

    async def flood(self, size: int) -> float:
        """Bytes per second one way, one answer at the end."""
        body, answer, count = bytes(size), memoryview(bytearray(size)), flood_count(size)
        start = time.perf_counter()
        for _ in range(count):
            self._send(body, 0)
        self._send(body, 1)
        fill(self._connection, answer)
        return count * size / (time.perf_counter() - start)

    async def close(self) -> None:
        """Hang up."""
        self._connection.close()


OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


async def serve_grpc() -> None:
    """A bidirectional stream that echoes messages beginning with 1."""
    import grpc

    async def hop(requests: Any, context: Any) -> Any:
        async for message in requests:
            if message[0]:
                yield message

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(hop)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", {"hop": handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


class GrpcClient:
    """A bidirectional stream of grpc.aio."""

    def __init__(self, port: int) -> None:
        import grpc

        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        self._stream = self._channel.stream_stream("/peer/hop")()

    async def hop(self, size: int) -> float:
        """Half the median round trip, in seconds."""
        body, times = b"\1" + bytes(size - 1), []
        for _ in range(hop_count(size)):
            start = time.perf_counter()
            await self._stream.write(body)
            await self._stream.read()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / 2

    async def flood(self, size: int) -> float:
        """Bytes per second one way, one answer at the end."""
        echoed, silent, count = b"\1" + bytes(size - 1), bytes(size), flood_count(size)
        start = time.perf_counter()
        for _ in range(count):
            await self._stream.write(silent)
        await self._stream.write(echoed)
        await self._stream.read()
        return count * size / (time.perf_counter() - start)

    async def close(self) -> None:
        """Hang up."""
        self._stream.cancel()
        await self._channel.close()


if __name__ == "__main__":
    if sys.argv[1] == "socket":
        serve_socket()
    else:
        asyncio.run(serve_grpc())
