"""What the codec lets through, and what it refuses, how fast and with how little memory (B15)."""

from __future__ import annotations

import functools
import struct
import time
import tracemalloc
import types
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import (
    FrameError,
    HeaderError,
    MessageError,
    check_digests,
    check_frames,
    check_outgoing,
    digest_of,
    read_body,
    read_header,
    read_message,
    seal_header,
    tensor_problem,
    write_body,
    write_header,
    write_message,
)
from wire.errors import MisuseError
from wire.limits import FRAMES, HEADER_BYTES, HEADER_DEPTH
from wire.messages import Hop, Ok, Refused, StepReport, TensorMeta, all_messages
from wire.packets import KINDS, Chunk, Data, Hello, Kind

HOP = Hop("run", 3, 0, 100, 2, 7, 0, 123456, "p1", 768, [TensorMeta("float32", [12, 64, 128])])
SIZE = 12 * 64 * 128 * 4


def fields_of(**changed: Any) -> list[Any]:
    """A sound Data packet as a list, to be made unsound."""
    packet: dict[str, Any] = {
        "version": 2, "kind": 6, "src": "p1", "src_boot": 5, "dst": "p2", "dst_boot": 6, "stream": 1, "yours": 2,
        "acks": [0, 0, 0], "lane": 2, "seq": 9, "frames": [[SIZE, 1]], "chunks": 0,
        "message": msgpack.unpackb(msgspec.msgpack.encode(HOP)),
    }  # fmt: skip
    return list({**packet, **changed}.values())


def header(**changed: Any) -> bytes:
    return msgpack.packb(fields_of(**changed))


def test_a_hop_comes_back_as_it_was():
    written = write_header(
        Kind.DATA, "p1", 5, "p2", 6, 1, 2, (3, 4, 5), 2, 9, [(SIZE, 77)], 0, msgspec.Raw(write_message(HOP))
    )
    packet = read_header(written)
    assert isinstance(packet, Data)
    assert (packet.src, packet.seq, packet.acks, packet.frames) == ("p1", 9, (3, 4, 5), [(SIZE, 77)])
    assert read_message(packet.message) == HOP


def test_any_msgpack_implementation_can_speak_to_us():
    packet = read_header(seal_header(header()))
    assert isinstance(packet, Data)
    assert read_message(packet.message) == HOP


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


HOSTILE = {
    "array of two thousand million": bytes.fromhex("dd7fffffff"),
    "map of two thousand million": bytes.fromhex("df7fffffff"),
    "100,000 nested arrays": nested(100_000),
    "60,000 nested arrays": nested(60_000),
    "8 MB of empty maps": b"\xdd" + struct.pack("!I", 8 << 20) + b"\x80" * (8 << 20),
    "a duplicate key": bytes.fromhex("82a16101a16102"),
    "a duplicate key in a message": header(message=0)[:-1] + b"\x92\xa3hop" + bytes.fromhex("82a16101a16102"),
    "trailing bytes": header() + b"\x00",
    "a string longer than the header": b"\xdb\x7f\xff\xff\xff",
    "bytes longer than the header": b"\xc6\x7f\xff\xff\xff",
    "an extension": b"\x9e\x02\x06\xc7\x04\x05abcd",
    "nothing": b"",
    "half a header": header()[:40],
    "a map": b"\x80",
    "invalid UTF-8": b"\x96\x02\x06\xa1\xff\x01\xa1a\x01",
    "pickle": b"cos\nsystem\n(S'touch /tmp/x'\ntR.",
    "another version": header(version=3),
    "a version that is true": header(version=True),
    "an unknown kind": header(kind=99),
    "a kind that is text": header(kind="6"),
    "NaN as sequence number": header(seq=float("nan")),
    "a float as sequence number": header(seq=9.0),
    "a negative sequence number": header(seq=-1),
    "true as sequence number": header(seq=True),
    "text as sequence number": header(seq="9"),
    "nil as boot": header(src_boot=None),
    "a lane that does not exist": header(lane=3),
    "an id that is too long": header(src="p" * 64),
    "too many frames": header(frames=[[0, 0]] * (FRAMES + 1)),
    "a frame size that is negative": header(frames=[[-1, 0]]),
    "a frame size that is huge": header(frames=[[1 << 62, 0]]),
    "a field too many": msgpack.packb([*fields_of(), 1]),
    "a field too few": msgpack.packb(fields_of()[:-1]),
    "a message that is a map": header(message={"hop": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_fast_and_small(name):
    data = seal_header(HOSTILE[name])  # a hostile sender knows how to make a digest
    with pytest.raises(HeaderError):
        read_header(data)
    best_s = min(_seconds(data) for _ in range(3))
    assert best_s < 0.010
    tracemalloc.start()
    try:
        with pytest.raises(HeaderError):
            read_header(data)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def _seconds(data: bytes) -> float:
    start = time.perf_counter()
    with pytest.raises(HeaderError):
        read_header(data)
    return time.perf_counter() - start


BAD_MESSAGES = {
    "unknown tag": ["rm_rf", "x"],
    "no tag": [],
    "tag that is a number": [1, 2],
    "NaN as step": ["hop", "run", 1, 0, float("nan"), 0, 0, 0, 1, "p1", 0, []],
    "inf as step": ["hop", "run", 1, 0, float("inf"), 0, 0, 0, 1, "p1", 0, []],
    "a float as step": ["hop", "run", 1, 0, 3.0, 0, 0, 0, 1, "p1", 0, []],
    "true as step": ["hop", "run", 1, 0, True, 0, 0, 0, 1, "p1", 0, []],
    "text as step": ["hop", "run", 1, 0, "3", 0, 0, 0, 1, "p1", 0, []],
    "nil as session": ["hop", None, 1, 0, 3, 0, 0, 0, 1, "p1", 0, []],
    "bytes as session": ["hop", b"run", 1, 0, 3, 0, 0, 0, 1, "p1", 0, []],
    "a field too many": ["hop", "run", 1, 0, 3, 0, 0, 0, 1, "p1", 0, [], 5],
    "a field too few": ["hop", "run", 1, 0, 3],
    "nested where text belongs": ["ok", functools.reduce(lambda inside, _: [inside], range(20), "deep")],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages_are_refused_apart_from_their_packet(name):
    packet = read_header(seal_header(header(message=BAD_MESSAGES[name])))
    assert isinstance(packet, Data)
    with pytest.raises(MessageError):
        read_message(packet.message)


@given(st.binary(max_size=300))
def test_noise_is_refused_and_never_crashes(data):
    for noise in (data, seal_header(data)):
        with pytest.raises(HeaderError):
            read_header(noise)


@given(st.integers(0, 400), st.integers(0, 7))
def test_a_header_with_one_flipped_bit_is_refused(position, bit):
    data = bytearray(seal_header(header()))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(HeaderError):
        read_header(bytes(data))


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_under_a_right_digest_never_crashes(position, value):
    data = bytearray(header())
    data[position % len(data)] = value
    try:
        packet = read_header(seal_header(bytes(data)))
        if isinstance(packet, Data):
            read_message(packet.message)
    except (HeaderError, MessageError):
        pass


def test_a_new_field_at_the_end_is_optional_for_the_reader():
    """Fields are only appended with a default: an older peer's shorter message still reads."""
    assert read_message(["refused", "r", "code", "text"]) == Refused("r", "code", "text", "")


def _depth(kind: Any) -> int:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return 1 + max((_depth(field.type) for field in msgspec.structs.fields(kind)), default=0)
    if isinstance(kind, types.GenericAlias) or typing.get_origin(kind) is not None:
        inner = [_depth(argument) for argument in typing.get_args(kind) if not isinstance(argument, msgspec.Meta)]
        return max(inner, default=0) + (typing.get_origin(kind) in (list, tuple, dict))
    return 0


def test_no_type_nests_deeper_than_the_limit():
    for kind in (*all_messages().values(), *KINDS.values()):
        assert _depth(kind) <= HEADER_DEPTH - 2, kind


def test_messages_above_half_a_header_are_a_misuse():
    with pytest.raises(MisuseError, match="send what is large as a frame"):
        write_message(Ok("x" * HEADER_BYTES))


def test_integers_beyond_64_bits_are_a_misuse():
    with pytest.raises(MisuseError, match="can't be encoded"):
        write_message(Hop("run", 1 << 70, 0, 0, 0, 0, 0, 0, "p1", 0, []))


def test_tensors_and_frames_must_agree():
    assert tensor_problem(HOP, [SIZE]) == ""
    assert "1 tensors described, 2 frames" in tensor_problem(HOP, [SIZE, 1])
    assert f"expected {SIZE} bytes, got 5" in tensor_problem(HOP, [5])
    assert tensor_problem(Ok("r"), [1, 2, 3]) == ""


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        (TensorMeta("float33", [1]), "known are float64"),
        (TensorMeta("float32", [-1, -4]), "extent -4"),
        (TensorMeta("float32", [1 << 41]), "extent"),
        (TensorMeta("float32", [1] * 17), "17 dimensions"),
        (TensorMeta("float32", [1 << 40, 1 << 40]), "expected"),
    ],
)
def test_shapes_that_can_not_be(meta, problem):
    hop = Hop("run", 1, 0, 0, 0, 0, 0, 0, "p1", 0, [meta])
    assert problem in tensor_problem(hop, [4])
    with pytest.raises(MisuseError):
        check_outgoing(hop, [b"1234"], 2)


def test_scalars_and_empty_tensors():
    hop = Hop("run", 1, 0, 0, 0, 0, 0, 0, "p1", 0, [TensorMeta("float32", []), TensorMeta("int64", [0, 5])])
    assert tensor_problem(hop, [4, 0]) == ""


def test_lane_and_frame_limits_of_what_is_sent():
    with pytest.raises(MisuseError, match="lane 7"):
        check_outgoing(Ok("r"), [], 7)
    with pytest.raises(MisuseError, match="frames"):
        check_outgoing(Ok("r"), [b""] * (FRAMES + 1), 0)


def test_frames_are_checked_by_count_size_and_digest():
    frames = [b"abc", b""]
    described = [(3, digest_of(b"abc")), (0, digest_of(b""))]
    check_frames(described, frames)
    assert check_digests(described, frames)
    assert not check_digests(described, [b"abd", b""])
    with pytest.raises(FrameError):
        check_frames(described, frames[:1])
    with pytest.raises(FrameError):
        check_frames(described, [b"ab", b""])


def test_the_digest_is_the_published_one():
    assert digest_of(b"") == 0x2D06800538D394C2  # XXH3_64bits of nothing, seed 0 (xxHash's own test vectors)


def test_bodies_are_typed_too():
    report = StepReport(1, float("inf"), 2, 0.5, 1e-3, 0.1, 4, "")
    assert read_body(write_body([report]), list[StepReport]) == [report]
    with pytest.raises(MessageError):
        read_body(write_body([1, 2]), list[StepReport])
    with pytest.raises(MessageError):
        read_body(write_body([report]) + b"\x00", list[StepReport])
    with pytest.raises(MessageError):
        read_body(b"\x91" * 200_000, list[StepReport])
    with pytest.raises(MessageError):
        read_body(bytes(100), StepReport, limit_bytes=50)


def test_handshakes_and_chunks_are_typed():
    hello = read_header(write_header(Kind.HELLO, "a", 1, "", 0, ("a", 1, ["tcp://a:1"]), 1, (0, 0, 0)))
    assert isinstance(hello, Hello)
    assert hello.me.addresses == ["tcp://a:1"]
    chunk = read_header(
        write_header(Kind.CHUNK, "a", 1, "b", 2, 1, 1, (0, 0, 0), 2, 5, 0, 1 << 20, 4096, (1 << 64) - 1)
    )
    assert isinstance(chunk, Chunk)
    with pytest.raises(HeaderError):
        read_header(write_header(Kind.HELLO, "a", 1, "", 0, ("a", 1, "tcp://a:1"), 1, (0, 0, 0)))


def test_a_hop_header_takes_microseconds():
    def once() -> None:
        raw = msgspec.Raw(write_message(HOP))
        data = write_header(Kind.DATA, "p1", 5, "p2", 6, 1, 2, (3, 4, 5), 2, 9, [(SIZE, 77)], 0, raw)
        packet = read_header(data)
        assert isinstance(packet, Data)
        read_message(packet.message)

    def lap() -> float:
        start = time.thread_time()
        for _ in range(500):
            once()
        return (time.thread_time() - start) / 500

    assert min(lap() for _ in range(10)) < 60e-6  # some 5 µs; room for slow machines
