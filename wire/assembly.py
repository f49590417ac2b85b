"""Large messages: cut into chunks to travel, put together again in recycled, aligned memory.

A message above `WHOLE_BYTES` travels as a Data packet without frames and one Chunk packet per piece. As a lane is
ordered, its chunks come one after another and only one message per lane is being put together at a time.

Fresh memory costs a page fault per 4 KiB, about as much as the copy itself. So buffers are kept in a pool and used
again once nobody else holds them; a received frame stays valid for as long as somebody does.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wire.codec import FrameError, Payload
from wire.limits import CHUNK_BYTES, MIB
from wire.messages import Message
from wire.packets import Chunk

ALIGNMENT = 64
POOL_BYTES = 512 * MIB
"""Free memory that is kept for the next large message."""

_IN_POOL = 3
"""References to a buffer that only the pool holds: its list, the loop variable, `getrefcount`'s argument."""


def aligned_view(buffer: bytearray, size: int) -> memoryview:
    """The first `size` bytes of `buffer` from its first address that is a multiple of 64."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    offset = -address % ALIGNMENT
    return memoryview(buffer)[offset : offset + size]


class BufferPool:
    """Hands out aligned buffers and takes them back by itself: a buffer is free when only the pool refers to it."""

    def __init__(self, keep_bytes: int = POOL_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._buffers: list[bytearray] = []
        self._bytes = 0

    def take(self, size: int) -> memoryview:
        """A writable, 64-byte-aligned view of `size` bytes with arbitrary content."""
        best: bytearray | None = None
        for buffer in self._buffers:
            if sys.getrefcount(buffer) <= _IN_POOL + (buffer is best) and size + ALIGNMENT <= len(buffer):
                if len(buffer) > 2 * (size + ALIGNMENT):
                    continue
                if best is None or len(buffer) < len(best):
                    best = buffer
        if best is None:
            best = bytearray(size + ALIGNMENT)
            self._keep(best)
        return aligned_view(best, size)

    def _keep(self, buffer: bytearray) -> None:
        if len(buffer) > self._keep_bytes:
            return
        while self._bytes + len(buffer) > self._keep_bytes and self._buffers:
            self._bytes -= len(self._buffers.pop(0))
        self._buffers.append(buffer)
        self._bytes += len(buffer)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that the pool knows, in use or not."""
        return self._bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of one frame, before it has a number."""

    frame: int
    offset: int
    payload: memoryview


def cut(frames: Sequence[Payload]) -> Iterator[Piece]:
    """The pieces of a large message's frames, in order. An empty frame has none."""
    for index, frame in enumerate(frames):
        view = memoryview(frame)
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        for offset in range(0, len(view), CHUNK_BYTES):
            yield Piece(index, offset, view[offset : offset + CHUNK_BYTES])


class Assembly:
    """A message whose frames are still coming. `message` None: it was refused, and its chunks are only counted."""

    def __init__(self, message: Message | None, sizes: Sequence[int], chunks: int, pool: BufferPool) -> None:
        self.message = message
        self.chunks = chunks
        self._frame = 0
        self._offset = 0
        self.frames: list[memoryview] = [] if message is None else [pool.take(size) for size in sizes]
        if message is not None and chunks != sum(-(-size // CHUNK_BYTES) for size in sizes):
            raise FrameError(f"{chunks} chunks announced for frames of {list(sizes)[:8]} bytes")

    def add(self, chunk: Chunk, payload: Payload) -> bool:
        """Put the next piece in its place; True if it was the last. Raises `FrameError` if it isn't the next."""
        self.chunks -= 1
        if self.message is not None:
            while self._frame < len(self.frames) and self._offset == len(self.frames[self._frame]):
                self._frame, self._offset = self._frame + 1, 0
            expected = (self._frame, self._offset)
            if self._frame == len(self.frames) or (chunk.frame, chunk.offset) != expected:
                raise FrameError(f"chunk at {(chunk.frame, chunk.offset)}, expected {expected}")
            target = self.frames[self._frame]
            if len(payload) != min(CHUNK_BYTES, len(target) - self._offset):
                raise FrameError(f"chunk of {len(payload)} bytes at {self._offset} of a frame of {len(target)}")
            target[self._offset : self._offset + len(payload)] = payload
            self._offset += len(payload)
        return self.chunks <= 0
