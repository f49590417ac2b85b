"""Large messages: cut into chunks to travel, put together again in recycled, aligned memory.

A message above `WHOLE_BYTES` travels as a Data packet without frames and one Chunk packet per piece. As a lane is
ordered, its chunks come one after another and only one message per lane is being put together at a time.

Fresh memory costs a page fault per 4 KiB, about as much as the copy itself. So buffers are kept in a pool and used
again once nobody else holds them; a received frame stays valid for as long as somebody does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wire.codec import FrameError, Payload
from wire.limits import CHUNK_BYTES, MIB
from wire.messages import Message
from wire.packets import Chunk

POOL_BYTES = 512 * MIB
"""Free memory that is kept for the next large message."""

POOL_BUFFERS = 64
POOL_FROM_BYTES = 256 * 1024
"""Smaller frames are cheaper to allocate than to look for."""

_IN_POOL = 3
"""References to a buffer that only the pool holds: its list, the loop variable, `getrefcount`'s argument."""


ALIGNMENT = 64
"""What torch gives its own tensors; matrix products may sum in another order from unaligned memory."""

HUGE_PAGE_BYTES = 2 * MIB


def fresh_buffer(size: int) -> mmap.mmap:
    """Zeroed memory that is aligned to a page, and costs nothing before it is touched."""
    buffer = mmap.mmap(-1, max(size, 1))
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def aligned_copy(payload: Payload) -> memoryview:
    """A writable copy that begins at a multiple of 64 bytes."""
    size = len(payload)
    buffer = bytearray(size + ALIGNMENT)
    offset = -_address(_from_buffer(buffer)) % ALIGNMENT
    view = memoryview(buffer)[offset : offset + size]
    view[:] = payload
    return view


_address = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer


class BufferPool:
    """Hands out aligned buffers and takes them back by itself: a buffer is free when only the pool refers to it."""

    def __init__(self, keep_bytes: int = POOL_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._buffers: list[mmap.mmap] = []
        self._bytes = 0

    def take(self, size: int) -> memoryview:
        """A writable view of `size` bytes, aligned to a page, with arbitrary content."""
        best: mmap.mmap | None = None
        for buffer in self._buffers:
            free = sys.getrefcount(buffer) <= _IN_POOL
            if free and size <= len(buffer) <= 2 * size and (best is None or len(buffer) < len(best)):
                best = buffer
        if best is None:
            best = fresh_buffer(size)
            self._keep(best)
        return memoryview(best)[:size]

    def copy(self, payload: Payload) -> memoryview:
        """A writable, aligned copy."""
        if len(payload) < POOL_FROM_BYTES:
            return aligned_copy(payload)
        view = self.take(len(payload))
        view[:] = payload
        return view

    def _keep(self, buffer: mmap.mmap) -> None:
        if len(buffer) > self._keep_bytes:
            return
        while self._buffers and (self._bytes + len(buffer) > self._keep_bytes or len(self._buffers) >= POOL_BUFFERS):
            self._bytes -= len(self._buffers.pop(0))
        self._buffers.append(buffer)
        self._bytes += len(buffer)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that the pool knows, in use or not."""
        return self._bytes


class Piece(NamedTuple):
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
        self.frames: list[memoryview] = [] if message is None else [pool.take(size) for size in sizes]
        self._frame = 0
        self._offset = 0

    def add(self, chunk: Chunk, payload: Payload) -> bool:
        """Put the next piece in its place; True if it was the last. Raises `FrameError` if it doesn't fit there."""
        self.chunks -= 1
        if self.message is not None:
            self._next_frame()
            expected = (self._frame, self._offset)
            if self._frame == len(self.frames) or (chunk.frame, chunk.offset) != expected:
                raise FrameError(f"chunk at {(chunk.frame, chunk.offset)}, expected {expected}")
            target, end = self.frames[self._frame], self._offset + len(payload)
            if end > len(target):
                raise FrameError(f"chunk of {len(payload)} bytes at {self._offset} of a frame of {len(target)}")
            target[self._offset : end] = payload
            self._offset = end
            if self.chunks <= 0:
                self._next_frame()
                if self._frame < len(self.frames):
                    raise FrameError(f"the last chunk has come, but frame {self._frame} is not complete")
        return self.chunks <= 0

    def _next_frame(self) -> None:
        while self._frame < len(self.frames) and self._offset == len(self.frames[self._frame]):
            self._frame, self._offset = self._frame + 1, 0
