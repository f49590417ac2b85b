"""What a proxy can learn from bytes on their way to a ZeroMQ socket: who sends them, and which packet passes.

ZMTP 3 (rfc.zeromq.org/spec/23): a greeting of 64 bytes, a READY command that names the sender's identity, then frames
of flags, size and body. Our identities are `id/boot/lane/number`, so a connection tells whose it is by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
KEEP_BYTES = 64 << 10
"""Bodies up to this size are kept: every header is."""


class Reader:
    """Frames out of a stream of bytes; bodies above `KEEP_BYTES` are passed over."""

    def __init__(self) -> None:
        self.source = ""
        """The id of the process that dialled, once its READY has passed."""
        self._greeting = GREETING_BYTES
        self._buffer = bytearray()
        self._skip = 0
        self._first = True
        self._skipped_more = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The first frame of each message (its header) that these bytes complete."""
        if self._greeting:
            used = min(self._greeting, len(data))
            self._greeting -= used
            data = data[used:]
        if self._skip:
            used = min(self._skip, len(data))
            self._skip -= used
            data = data[used:]
            if self._skip:
                return
        self._buffer += data
        while (frame := self._frame()) is not None:
            flags, body = frame
            if flags & COMMAND:
                self.source = self.source or source_of(body)
                continue
            first, self._first = self._first, not flags & MORE
            if first:
                yield body

    def _frame(self) -> tuple[int, bytes] | None:
        """The next frame, whole or (body b"") passed over; None if it isn't here yet."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        flags, head = buffer[0], 2
        size = buffer[1]
        if flags & LONG:
            head = 9
            if len(buffer) < head:
                return None
            size = int.from_bytes(buffer[1:9], "big")
        have = len(buffer) - head
        if size > KEEP_BYTES:
            self._skip = max(0, size - have)
            del buffer[: head + min(size, have)]
            return flags, b""
        if have < size:
            return None
        body = bytes(buffer[head : head + size])
        del buffer[: head + size]
        return flags, body


def source_of(command: bytes) -> str:
    """The id in the Identity of a READY command; "" if there is none."""
    name, rest = command[1 : 1 + command[0]] if command else b"", command[1 + command[0] :] if command else b""
    if name != b"READY":
        return ""
    while rest:
        key, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        size = int.from_bytes(rest[:4], "big")
        value, rest = rest[4 : 4 + size], rest[4 + size :]
        if key.lower() == b"identity":
            return value.decode("ascii", "replace").partition("/")[0]
    return ""
