"""The body of a gradient report: squared norms by parameter, as the frame beside the message. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wire.codec import MessageError, read_body

Norms = tuple[tuple[int, float], ...]


def pack_norms(norms: Norms) -> memoryview:
    """Msgpack of [(index of the parameter in network order, sum of squares), …]."""
    return memoryview(msgspec.msgpack.encode(norms))


def read_norms(frames: Sequence[memoryview]) -> Norms | None:
    """The norms of a received report; None if the frame is missing or holds something else."""
    if len(frames) != 1:
        return None
    try:
        norms: Norms = read_body(frames[0], Norms)
    except MessageError:
        return None
    return norms
