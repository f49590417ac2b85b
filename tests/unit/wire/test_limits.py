"""Limits of what comes over the wire: one below, at, one above; and nothing large is made for a false claim."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import msgspec
import pytest

from tests.fuzz.samples import messages
from wire.assembly import BufferPool
from wire.codec import (
    DIGEST_BYTES,
    HeaderError,
    MessageError,
    check_outgoing,
    read_body,
    read_header,
    read_message,
    seal_header,
    tensor_bytes,
    write_header,
    write_message,
)
from wire.commands import Command, Deliver, Transmit
from wire.directory import introduces, is_address
from wire.endpoint import Endpoint, Source
from wire.errors import MisuseError
from wire.ids import is_id
from wire.limits import (
    ACK_RANGES,
    ADDRESS_CHARS,
    ADDRESSES,
    FRAME_BYTES,
    FRAMES,
    HEADER_ARRAY,
    HEADER_BYTES,
    HEADER_DEPTH,
    HEADER_MAP,
    ID_CHARS,
    MESSAGE_BYTES,
    NUMBER,
    PACKET_BYTES,
    TENSOR_DIMS,
    TENSOR_EXTENT,
    Limits,
)
from wire.link import Arrival, ReceiveLane
from wire.messages import FORWARD, Hop, Ok, PeerRef, TensorMeta
from wire.packets import Data, Kind


def around(limit: int) -> list[tuple[int, bool]]:
    """(size, whether it is allowed)."""
    return [(limit - 1, True), (limit, True), (limit + 1, False)]


def header(message: Any = ("ok", "r"), frames: Any = (), chunks: int = 0, **changed: Any) -> bytes:
    """A Data packet from a to b."""
    fields = {
        "version": 2, "kind": 6, "src": "a", "src_boot": 5, "dst": "b", "dst_boot": 6, "stream": 1, "yours": 1,
        "acks": [0, 0, 0], "lane": 2, "seq": 0, "frames": frames, "chunks": chunks, "message": message,
    }  # fmt: skip
    return seal_header(msgpack.packb(list({**fields, **changed}.values())))


def reads(data: bytes) -> bool:
    try:
        packet = read_header(data)
        assert isinstance(packet, Data)
        read_message(packet.message)
    except (HeaderError, MessageError):
        return False
    return True


@pytest.mark.parametrize(("size", "allowed"), around(HEADER_BYTES))
def test_the_size_of_a_header(size, allowed):
    short = header(["ok", "x" * 40_000])
    data = header(["ok", "x" * (40_000 + size - len(short))])
    assert len(data) == size
    assert reads(data) == allowed


@pytest.mark.parametrize(("count", "allowed"), around(HEADER_ARRAY))
def test_the_length_of_an_array(count, allowed):
    infer = ["infer_end", [0] * count, "s"]
    if allowed:
        assert isinstance(read_header(header(infer)), Data)
    else:
        with pytest.raises(HeaderError, match=f"exceeds max_array_len\\({HEADER_ARRAY}\\)"):
            read_header(header(infer))


@pytest.mark.parametrize(("count", "allowed"), around(HEADER_MAP))
def test_the_length_of_a_map(count, allowed):
    ok = ["ok", {f"{key:x}": 0 for key in range(count)}]
    if allowed:
        assert isinstance(read_header(header(ok)), Data)
    else:
        with pytest.raises(HeaderError, match=f"exceeds max_map_len\\({HEADER_MAP}\\)"):
            read_header(header(ok))


@pytest.mark.parametrize("depth", [HEADER_DEPTH - 1, HEADER_DEPTH, HEADER_DEPTH + 1, 510, 511, 512, 513, 5000])
def test_depth_ends_where_the_types_end(depth):
    """No type is as deep as the limit, so the typed structs refuse what is; a reader's stack ends msgpack at 512."""
    value: Any = 0
    for _ in range(min(depth, 500)):
        value = [value]
    raw = msgpack.packb(value)
    raw = b"\x91" * (depth - 500) + raw if depth > 500 else raw
    packed = msgpack.packb(header.__name__)  # any value that can be replaced by bytes
    fields = header(["ok", header.__name__])[:-DIGEST_BYTES]
    data = seal_header(fields.replace(packed, raw))
    assert not reads(data)
    assert reads(header(["ok", "r"]))


@pytest.mark.parametrize(("count", "allowed"), around(FRAMES))
def test_the_number_of_frames_and_of_tensors(count, allowed):
    meta = ["uint8", [0]]
    hop = ["hop", "run", 1, 0, 0, 0, 0, 0, 0, "a", 0, [meta] * count]
    assert reads(header(hop, [[0, 0]] * count)) == allowed
    sent = Hop("run", 1, 0, 0, 0, 0, 0, 0, "a", 0, [TensorMeta("uint8", [0])] * count)
    if allowed:
        assert check_outgoing(sent, [b""] * count, FORWARD) == [0] * count
    else:
        with pytest.raises(MisuseError, match="frames"):
            check_outgoing(sent, [b""] * count, FORWARD)


@pytest.mark.parametrize(("size", "allowed"), around(FRAME_BYTES))
def test_the_size_of_a_frame(size, allowed):
    assert reads(header(frames=[[size, 0]])) == allowed


@pytest.mark.parametrize("name", ["src_boot", "dst_boot", "stream", "yours", "seq"])
@pytest.mark.parametrize(("number", "allowed"), around(NUMBER))
def test_the_numbers_of_a_packet(name, number, allowed):
    assert reads(header(**{name: number})) == allowed


@pytest.mark.parametrize(("size", "allowed"), around(ID_CHARS))
def test_the_length_of_ids(size, allowed):
    assert is_id("p" * size) == allowed
    assert reads(header(src="p" * size)) == allowed


@pytest.mark.parametrize(("size", "allowed"), around(ADDRESS_CHARS))
def test_the_length_of_addresses(size, allowed):
    assert is_address("tcp://" + "h" * (size - len("tcp://:1")) + ":1") == allowed


@pytest.mark.parametrize(("count", "allowed"), around(ADDRESSES))
def test_the_number_of_addresses(count, allowed):
    assert introduces(PeerRef("a", 5, ["tcp://a:1"] * count), ("a", 5)) == allowed


@pytest.mark.parametrize(("dims", "allowed"), around(TENSOR_DIMS))
def test_the_dimensions_of_a_tensor(dims, allowed):
    meta = TensorMeta("uint8", [1] * dims)
    if allowed:
        assert tensor_bytes(meta) == 1
    else:
        with pytest.raises(MessageError, match="17 dimensions"):
            tensor_bytes(meta)


@pytest.mark.parametrize(("extent", "allowed"), around(TENSOR_EXTENT))
@pytest.mark.parametrize("others", [[], [1], [0]])
def test_the_extents_of_a_tensor(extent, allowed, others):
    meta = TensorMeta("uint8", [extent, *others])
    if allowed:
        assert tensor_bytes(meta) == (0 if others == [0] else extent)
    else:
        with pytest.raises(MessageError, match="extent"):
            tensor_bytes(meta)


def test_an_empty_tensor_hides_no_extents():
    """Its strides are made of them: torch would raise what nobody expects."""
    assert tensor_bytes(TensorMeta("uint8", [0, 1 << 20, 1 << 20])) == 0
    for shape in ([0, 1 << 20, (1 << 20) + 1], [1 << 40, 2, 0], [1 << 40] * 15 + [0]):
        with pytest.raises(MessageError, match="strides"):
            tensor_bytes(TensorMeta("uint8", shape))


@pytest.mark.parametrize(("size", "allowed"), around(1000))
def test_the_size_of_a_body(size, allowed):
    body = msgspec.msgpack.encode("x" * (size - 3))
    assert len(body) == size
    if allowed:
        assert read_body(body, str, limit_bytes=1000)
    else:
        with pytest.raises(MessageError, match="at most 1000"):
            read_body(body, str, limit_bytes=1000)


@pytest.mark.parametrize("data", [b"\x91" * 200_000, b"\x81\xa1x" * 100_000, b"\x91\xa1\xff", b"\xc1", b""])
def test_bodies_that_are_none(data):
    for kind in (list[str], dict[str, Any], Any, PeerRef):
        with pytest.raises(MessageError):
            read_body(data, kind)


@pytest.mark.parametrize(("packets", "allowed"), around(64))
def test_the_packets_that_wait_for_an_earlier_one(packets, allowed):
    lane: ReceiveLane[int] = ReceiveLane(Limits(early_packets=64, early_bytes=1 << 20))
    taken = [lane.arrival(seq, 1) is Arrival.NEW and lane.store(seq, 1, seq, 0.0) for seq in range(1, packets + 1)]
    assert (taken[-1] is not False) == allowed
    assert len(lane.early) <= 64


@pytest.mark.parametrize(("size", "allowed"), around(1000))
def test_the_bytes_in_flight_that_wait_for_an_earlier_packet(size, allowed):
    lane: ReceiveLane[int] = ReceiveLane(Limits(early_bytes=1000))
    lane.store(5, 400, 5, 0.0)
    assert (lane.arrival(6, size - 400) is Arrival.NEW) == allowed


# ---------------------------------------------------------------- an endpoint and what it keeps

ME = PeerRef("b", 6, ["tcp://b:1"])
FROM_A = Source("a", 5, FORWARD)


class Receiver:
    """An endpoint that a has greeted."""

    def __init__(self, bases: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.endpoint = Endpoint(ME)
        self.out: list[Command] = []
        self.give(write_header(Kind.HELLO, "a", 5, "b", 6, ("a", 5, ["tcp://a:1"]), 1, bases))

    def give(self, data: bytes, frames: Any = ()) -> None:
        self.endpoint.on_frames(FROM_A, data, frames, 0.0, self.out)
        self.endpoint.flush(0.0, self.out)

    @property
    def delivered(self) -> int:
        return sum(isinstance(command, Deliver) for command in self.out)

    def welcomes_others(self) -> bool:
        """Whether it still does what is due for others."""
        answers: list[Command] = []
        hello = write_header(Kind.HELLO, "c", 7, "b", 6, ("c", 7, ["tcp://c:1"]), 1, (0, 0, 0))
        self.endpoint.on_frames(Source("c", 7, 0), hello, (), 9.0, answers)
        self.endpoint.flush(9.0, answers)
        self.endpoint.on_tick(9.0, answers)
        return any(isinstance(answer, Transmit) and answer.kind is Kind.WELCOME for answer in answers)


@pytest.mark.parametrize("last", [NUMBER - 1, NUMBER, NUMBER + 1, (1 << 64) - 1])
def test_numbers_at_their_end_stop_no_link_but_their_own(last):
    """What is counted up from the last one would not fit into a header, and no one would be answered any more."""
    receiver = Receiver((0, 0, min(last, NUMBER)) if last <= NUMBER else (0, 0, 0))
    receiver.give(header(seq=last))
    receiver.give(header(seq=last + 1) if last < (1 << 64) - 1 else header(seq=last))
    assert receiver.welcomes_others()


def test_a_greeting_with_the_last_of_all_numbers_is_refused():
    receiver = Receiver()
    top = (1 << 64) - 1
    receiver.give(write_header(Kind.HELLO, "a", 5, "b", 6, ("a", 5, ["tcp://a:1"]), 2, (top, top, top)))
    receiver.give(header(stream=2, seq=top))
    assert receiver.welcomes_others()
    assert receiver.endpoint.counters["refused_headers"] == 2


@pytest.mark.parametrize(("size", "allowed"), around(MESSAGE_BYTES))
def test_the_size_of_a_message_in_chunks(size, allowed, monkeypatch):
    """Frames that are all allowed may be too much together. Memory for them is claimed, but none is touched."""
    asked: list[int] = []
    monkeypatch.setattr(BufferPool, "take", lambda self, size: asked.append(size) or memoryview(bytearray(1)))
    sizes = [FRAME_BYTES, size - FRAME_BYTES] if size - FRAME_BYTES <= FRAME_BYTES else [FRAME_BYTES, FRAME_BYTES, 1]
    receiver = Receiver()
    receiver.give(header(["ok", "r"], [[size, 0] for size in sizes], chunks=9))
    assert asked == (sizes if allowed else [])
    assert receiver.endpoint.counters["refused_messages"] == (0 if allowed else 1)
    assert receiver.welcomes_others()


@pytest.mark.parametrize(("size", "allowed"), around(PACKET_BYTES))
def test_the_size_of_a_packet(size, allowed):
    from wire.codec import digest_of

    receiver = Receiver()
    frame = bytes(size)
    receiver.give(header(["ok", "r"], [[size, digest_of(frame)]]), [frame])
    assert receiver.delivered == allowed


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_memory_that_can_not_be_had_refuses_the_message(monkeypatch, error):
    """A machine that promises no more than it has says so by an OSError of mmap."""

    def take(self: BufferPool, size: int) -> memoryview:
        raise error

    monkeypatch.setattr(BufferPool, "take", take)
    receiver = Receiver()
    receiver.give(header(["ok", "r"], [[FRAME_BYTES, 0]], chunks=4096))
    assert receiver.endpoint.counters["refused_messages"] == 1
    assert receiver.welcomes_others()


def test_a_claim_of_a_terabyte_makes_nothing_large():
    tracemalloc.start()
    try:
        for claim in (1 << 40, FRAME_BYTES):
            receiver = Receiver()
            receiver.give(header(["ok", "r"], [[claim, 0]] * FRAMES, chunks=1 << 20))
            receiver.give(header(["hop", "s", 1, 0, 0, 0, 0, 0, 0, "a", 0, [["uint8", [claim]]]], [[claim, 0]]))
            assert receiver.welcomes_others()
        for start in (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ):
            with pytest.raises(HeaderError):
                read_header(seal_header(start + bytes(1000)))
            with pytest.raises(MessageError):
                read_body(start + bytes(1000), list[str])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_no_more_damage_is_told_than_the_other_side_reads():
    """One acknowledgement that is too long would be refused as a whole, with all that it acknowledges."""
    receiver = Receiver()
    for seq in range(2 * ACK_RANGES):
        receiver.endpoint.on_frames(FROM_A, header(["ok", "r"], [[3, 1]], seq=seq), [b"abc"], 0.0, receiver.out)
    receiver.endpoint.flush(0.0, receiver.out)
    acks = [command for command in receiver.out if isinstance(command, Transmit) and command.kind is Kind.ACK]
    assert acks
    for ack in acks:
        read_header(ack.parts[0])


@pytest.mark.parametrize("message", messages(), ids=lambda message: type(message).__name__)
def test_every_message_takes_at_most_half_a_header(message):
    assert read_message(msgspec.msgpack.decode(write_message(message))) == message
    assert isinstance(message, Ok) or len(write_message(message)) < HEADER_BYTES // 2
