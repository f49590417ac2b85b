"""Headers to bytes and back, and the checks that come before anything in a message is believed.

Reading goes in steps, each on what the one before let through: size cap; msgpack with all its limits set, duplicate
keys and trailing bytes refused; `msgspec.convert` (strict) to the typed packet; the message, to the struct its tag
names; the tensors' shapes and types against the sizes of their frames. No untyped value gets past this module, and
nothing is allocated for a frame before its size is known to fit its description.

A packet can be sound while its message is not (an unknown tag of a newer version, say): then the link still counts it
as arrived, and its sender is told. So `read_header` and `read_message` are two functions with two errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import xxhash

from wire.coded import CODECS, coded_bytes
from wire.errors import MisuseError, RemoteError
from wire.limits import (
    BODY_BYTES,
    FRAME_BYTES,
    FRAMES,
    HEADER_ARRAY,
    HEADER_BYTES,
    HEADER_MAP,
    MESSAGE_BYTES,
    PROTOCOL_VERSION,
    TENSOR_DIMS,
    TENSOR_EXTENT,
)
from wire.messages import LANES, Message, TensorMeta, all_messages
from wire.packets import KINDS, Packet

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

CODED_DTYPES = ("float64", "float32", "float16", "bfloat16")

Payload = bytes | bytearray | memoryview

DIGEST_BYTES = 8

_encode = msgspec.msgpack.Encoder().encode
_digest = xxhash.xxh3_64_intdigest
_messages: dict[str, type[Message]] = {}


class HeaderError(RemoteError):
    """A packet that can't be read: nothing in it is believed, it is dropped whole."""


class MessageError(RemoteError):
    """A sound packet with a message that can't be read: acknowledged, refused, not handed over."""


class FrameError(RemoteError):
    """The frames are not those that the header describes: dropped whole, to be sent again."""


def digest_of(payload: Payload) -> int:
    """xxh3-64 of a frame."""
    return _digest(payload)


# ---------------------------------------------------------------- writing


def write_message(message: Message) -> bytes:
    """The message's part of a header, at most 64 KiB with room for the rest. Raises `MisuseError`."""
    try:
        data = _encode(message)
    except (TypeError, OverflowError, ValueError) as error:
        raise MisuseError(f"{type(message).__name__} can't be encoded: {error}") from error
    if len(data) > HEADER_BYTES // 2:
        raise MisuseError(
            f"{type(message).__name__} takes {len(data)} bytes; a message may take {HEADER_BYTES // 2}",
            hint="send what is large as a frame",
        )
    return data


def write_header(*fields: Any) -> bytes:
    """A packet's header from its fields after the version, in the order of its struct, and its digest behind it."""
    return seal_header(_encode((PROTOCOL_VERSION, *fields)))


def seal_header(fields: bytes) -> bytes:
    """A header's msgpack with its xxh3-64 digest behind it: TCP's own sum misses one damaged packet in 65,536."""
    return fields + _digest(fields).to_bytes(DIGEST_BYTES, "big")


def check_outgoing(message: Message, frames: Sequence[Payload], lane: int) -> list[int]:
    """Sizes of the frames in bytes. Raises `MisuseError` if they break a limit or don't fit the message's tensors."""
    if lane not in LANES:
        raise MisuseError(f"lane {lane} does not exist", hint=f"lanes are {LANES}")
    sizes = list(map(len, frames))
    if sizes:
        if len(sizes) > FRAMES:
            raise MisuseError(f"{type(message).__name__} has {len(sizes)} frames; {FRAMES} are allowed")
        if max(sizes) > FRAME_BYTES or sum(sizes) > MESSAGE_BYTES:
            raise MisuseError(f"{type(message).__name__} has {sum(sizes)} bytes of frames; {MESSAGE_BYTES} are allowed")
    problem = tensor_problem(message, sizes)
    if problem:
        raise MisuseError(f"{type(message).__name__}: {problem}")
    return sizes


# ---------------------------------------------------------------- reading


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if not pairs:
        return {}
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKey("a key appears twice")
    return found


def _unpack(data: Payload) -> Any:
    return msgpack.unpackb(
        data,
        raw=False,
        use_list=True,
        strict_map_key=True,
        object_pairs_hook=_unique,
        max_str_len=HEADER_BYTES,
        max_bin_len=HEADER_BYTES,
        max_array_len=HEADER_ARRAY,
        max_map_len=HEADER_MAP,
        max_ext_len=0,
    )


def read_header(data: Payload) -> Packet:
    """The typed packet of a header. Raises `HeaderError`: what is wrong, without the offending bytes."""
    if len(data) > HEADER_BYTES:
        raise HeaderError(f"header of {len(data)} bytes; at most {HEADER_BYTES} are allowed")
    view = memoryview(data)
    packed, digest = view[:-DIGEST_BYTES], view[-DIGEST_BYTES:]
    if len(data) <= DIGEST_BYTES or _digest(packed) != int.from_bytes(digest, "big"):
        raise HeaderError("header does not have the digest that follows it")
    try:
        fields = _unpack(packed)
    except Exception as error:
        raise HeaderError(f"header is not acceptable msgpack: {type(error).__name__} {str(error)[:80]}") from None
    if type(fields) is not list or len(fields) < 6:
        raise HeaderError("header is not an array of at least 6 fields")
    version, kind_number = fields[0], fields[1]
    if type(version) is not int or version != PROTOCOL_VERSION:
        shown = version if type(version) is int else type(version).__name__
        raise HeaderError(f"protocol version {shown}; this side speaks {PROTOCOL_VERSION}")
    kind = KINDS.get(kind_number) if type(kind_number) is int else None
    if kind is None:
        shown = kind_number if type(kind_number) is int else type(kind_number).__name__
        raise HeaderError(f"unknown kind of packet: {shown}")
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise HeaderError(f"{kind.__name__} packet: {error}") from None


def read_message(fields: list[Any]) -> Message:
    """The typed message of a Data packet's `message` field. Raises `MessageError`."""
    if not _messages:
        _messages.update(all_messages())
    tag = fields[0] if fields else None
    kind = _messages.get(tag) if type(tag) is str else None
    if kind is None:
        raise MessageError(f"unknown message {str(tag)[:40]!r}", hint="is the other side a newer version?")
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise MessageError(f"message {tag!r}: {error}") from None


def read_body(data: Payload, kind: Any, *, limit_bytes: int = BODY_BYTES) -> Any:
    """A body that travels as a frame (msgpack of `kind`), checked as strictly as a header but for its size.

    Raises `MessageError`.
    """
    if len(data) > limit_bytes:
        raise MessageError(f"body of {len(data)} bytes; at most {limit_bytes} are allowed")
    try:
        return msgspec.msgpack.decode(data, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"body is not a {getattr(kind, '__name__', kind)}: {error}") from None


def write_body(value: Any) -> bytes:
    """A value (struct, list of structs, …) as the bytes of a frame."""
    return _encode(value)


def tensor_bytes(meta: TensorMeta) -> int:
    """Bytes that a tensor's frame must have. Raises `MessageError` for what can't be a tensor."""
    size, shape = DTYPE_BYTES.get(meta.dtype), meta.shape
    if size is None:
        raise MessageError(f"tensor type {meta.dtype[:40]!r}; known are {', '.join(DTYPE_BYTES)}")
    if len(shape) > TENSOR_DIMS:
        raise MessageError(f"tensor of {len(shape)} dimensions; at most {TENSOR_DIMS} are allowed")
    if shape and (min(shape) < 0 or max(shape) > TENSOR_EXTENT):
        raise MessageError(f"tensor extent {min(shape) if min(shape) < 0 else max(shape)}")
    if meta.codec and meta.codec not in CODECS:
        raise MessageError(f"codec {meta.codec[:20]!r}; known are {', '.join(CODECS)}")
    if meta.codec and meta.dtype not in CODED_DTYPES:
        raise MessageError(f"{meta.dtype} can't be coded by {meta.codec!r}")
    total = coded_bytes(meta.codec, shape, size)
    if not total and math.prod(filter(None, shape)) > TENSOR_EXTENT:  # strides are made of what an extent of 0 hides
        raise MessageError(f"tensor of the shape {shape}, whose strides would be above {TENSOR_EXTENT}")
    return total


def tensor_problem(message: Message, sizes: list[int]) -> str:
    """What is wrong between a message's `tensors` and its frames' sizes; "" if nothing, or if it has none."""
    tensors: list[TensorMeta] | None = getattr(message, "tensors", None)
    if tensors is None:
        return ""
    try:
        expected = [tensor_bytes(meta) for meta in tensors]
    except MessageError as error:
        return str(error)
    if expected == sizes:
        return ""
    if len(expected) != len(sizes):
        return f"{len(expected)} tensors described, {len(sizes)} frames"
    index = next(index for index, size in enumerate(sizes) if size != expected[index])
    meta = tensors[index]
    how = f" as {meta.codec}" if meta.codec else ""
    return f"tensor {index} is {meta.dtype}{meta.shape}{how}: expected {expected[index]} bytes, got {sizes[index]}"


def check_frames(described: Sequence[tuple[int, int]], frames: Sequence[Payload]) -> None:
    """Raises `FrameError` unless count and sizes are as described; digests are checked by `check_digests`."""
    if list(map(len, frames)) != [size for size, _ in described]:
        got, expected = list(map(len, frames))[:9], [size for size, _ in described][:9]
        raise FrameError(f"frames of {got} bytes, described are {expected}")


def check_digests(described: Sequence[tuple[int, int]], frames: Sequence[Payload]) -> bool:
    """Whether each frame has the digest described for it."""
    return list(map(_digest, frames)) == [digest for _, digest in described]
