"""A proxy in front of a real S3 server that loses replies, breaks bodies off, damages bytes, or answers itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

Fault = Callable[["Exchange"], "bytes | None"]


@dataclass
class Exchange:
    """One request and its reply. `number` counts the exchanges of the same method, `total` all of them."""

    method: str
    path: str
    headers: dict[str, str]
    number: int
    total: int = 0
    reply_head: bytes = b""
    reply_body: bytes = b""


@dataclass
class BreakingProxy:
    """`before(exchange)` may answer instead of the server; `after(exchange)` may change the reply.

    Each gives the bytes to send before the connection is closed (b"": close at once), or None to pass on. `sending`
    may change the body of a request.
    """

    endpoint: str = ""
    before: Fault = lambda exchange: None
    after: Fault = lambda exchange: None
    sending: Callable[[Exchange, bytes], bytes] = lambda exchange, body: body
    counts: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    open_connections: int = 0
    total: int = 0

    async def serve(
        self, upstream: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One client connection."""
        self.open_connections += 1
        try:
            while await self._exchange(upstream, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_connections -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(
        self, upstream: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, headers = _parse(head)
        method, path, _ = line.split(" ", 2)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.counts[method] = self.counts.get(method, 0) + 1
        self.total += 1
        exchange = Exchange(method, path, headers, self.counts[method], self.total)
        self.log.append(f"{method} {path}")
        answer = self.before(exchange)
        if answer is None:
            await self._ask(upstream, exchange, head, self.sending(exchange, body))
            answer = self.after(exchange)
            if answer is None:
                writer.write(exchange.reply_head + exchange.reply_body)
                await writer.drain()
                return True
        writer.write(answer)
        await writer.drain()
        return False

    async def _ask(self, upstream: tuple[str, int], exchange: Exchange, head: bytes, body: bytes) -> None:
        reader, writer = await asyncio.open_connection(*upstream)
        try:
            writer.write(head + body)
            while True:
                reply = await reader.readuntil(b"\r\n\r\n")
                line, headers = _parse(reply)
                if not line.split(" ")[1].startswith("1"):
                    break
            if exchange.method != "HEAD" and headers.get("transfer-encoding") == "chunked":
                chunks = b""
                while True:
                    size = await reader.readuntil(b"\r\n")
                    chunk = await reader.readexactly(int(size, 16) + 2)
                    chunks += size + chunk
                    if int(size, 16) == 0:
                        break
                exchange.reply_head, exchange.reply_body = reply, chunks
                return
            length = 0 if exchange.method == "HEAD" else int(headers.get("content-length", 0))
            exchange.reply_head, exchange.reply_body = reply, await reader.readexactly(length)
        finally:
            writer.close()


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    line, *rest = head.decode("latin-1").strip().split("\r\n")
    return line, {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in rest)}


def canned(status: int, code: str = "", *, headers: str = "", body: bytes | None = None) -> bytes:
    """A reply with an S3 error document, or with `body`."""
    if body is None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
    lead = f"HTTP/1.1 {status} X\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n{headers}"
    return f"{lead}Connection: close\r\n\r\n".encode() + body


@asynccontextmanager
async def breaking_proxy(upstream: str) -> AsyncIterator[BreakingProxy]:
    """A proxy before the server at the URL `upstream`."""
    parts = urlsplit(upstream)
    assert parts.hostname
    assert parts.port
    target = (parts.hostname, parts.port)
    proxy = BreakingProxy()
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        running.add(task)
        try:
            await proxy.serve(target, reader, writer)
        finally:
            running.discard(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 20)
    proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
