"""What an endpoint believes and what it drops, packet by packet."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from wire.codec import digest_of, write_header, write_message
from wire.commands import Command, Deliver, Lost, Release, Transmit
from wire.directory import check_address
from wire.endpoint import Endpoint, Source
from wire.errors import MisuseError
from wire.messages import BACKWARD, CONTROL, FORWARD, AskCluster, Hop, Ok, PeerRef, Refused, TensorMeta
from wire.packets import Kind

A = PeerRef("a", 5, ["tcp://a:1"])
B = PeerRef("b", 6, ["tcp://b:1"])
FROM_A = Source("a", 5, FORWARD)


def hop(size: int, step: int = 0) -> Hop:
    return Hop("run", 1, 0, step, 0, 0, 0, step, "a", 0, [TensorMeta("uint8", [size])])


class Pair:
    """Two endpoints whose packets pass at once, and are kept for replay."""

    def __init__(self) -> None:
        self.a, self.b = Endpoint(A), Endpoint(B)
        self.delivered: list[Deliver] = []
        self.lost: list[Lost] = []
        self.to_b: list[Transmit] = []
        self.to_a: list[Transmit] = []
        self.send(Ok("first"))
        assert [command.message for command in self.delivered] == [Ok("first")]
        self.delivered.clear()

    def send(self, message: Any, frames: Any = (), now: float = 0.0) -> None:
        out: list[Command] = []
        self.a.send(B, message, frames, None, now, out)
        self.carry(self.a, out, now)

    def carry(self, src: Endpoint, out: list[Command], now: float = 0.0) -> None:
        for command in out:
            if isinstance(command, Transmit):
                target, kept = (self.b, self.to_b) if src is self.a else (self.a, self.to_a)
                kept.append(command)
                answer: list[Command] = []
                source = Source(src.me.id, src.me.boot, command.lane)
                target.on_frames(source, command.parts[0], command.parts[1:], now, answer)
                target.flush(now, answer)
                self.carry(target, answer, now)
            elif isinstance(command, Deliver):
                self.delivered.append(command)
            elif isinstance(command, Lost):
                self.lost.append(command)

    def give_b(self, header: bytes, frames: Any = (), source: Source = FROM_A) -> list[Command]:
        out: list[Command] = []
        self.b.on_frames(source, header, frames, 0.0, out)
        self.b.flush(0.0, out)
        return out


@pytest.fixture
def pair() -> Pair:
    return Pair()


def data(message: Any = None, frames: Any = (b"xyz",), **changed: Any) -> bytes:
    raw = msgspec.Raw(write_message(hop(3)) if message is None else msgspec.msgpack.encode(message))
    described = [(len(frame), digest_of(frame)) for frame in frames]
    fields = {
        "src": "a", "src_boot": 5, "dst": "b", "dst_boot": 6, "stream": 1, "yours": 1, "acks": (0, 0, 0),
        "lane": FORWARD, "seq": 0, "frames": described, "chunks": 0, "message": raw,
    }  # fmt: skip
    return write_header(Kind.DATA, *{**fields, **changed}.values())


def delivered(commands: list[Command]) -> list[Any]:
    return [command.message for command in commands if isinstance(command, Deliver)]


def test_a_sound_packet_is_delivered_once(pair):
    assert delivered(pair.give_b(data(), [b"xyz"])) == [hop(3)]
    assert delivered(pair.give_b(data(), [b"xyz"])) == []
    assert pair.b.counters["duplicates"] == 1


@pytest.mark.parametrize(
    ("changed", "source", "counter"),
    [
        ({"src": "c"}, FROM_A, "refused_sources"),
        ({"src_boot": 4}, FROM_A, "refused_sources"),
        ({}, Source("c", 5, FORWARD), "refused_sources"),
        ({}, Source("a", 4, FORWARD), "refused_sources"),
        ({"src": "../a"}, Source("../a", 5, FORWARD), "refused_sources"),
        ({"src_boot": 0}, Source("a", 0, FORWARD), "refused_sources"),
        ({"dst": "c"}, FROM_A, "refused_destinations"),
        ({"dst_boot": 7}, FROM_A, "refused_destinations"),
        ({"stream": 2}, FROM_A, "refused_streams"),
        ({"src": "z"}, Source("z", 5, FORWARD), "refused_streams"),
    ],
)
def test_what_is_not_from_or_for_the_right_boot_is_dropped(pair, changed, source, counter):
    assert delivered(pair.give_b(data(**changed), [b"xyz"], source)) == []
    assert pair.b.counters[counter] == 1
    assert delivered(pair.give_b(data(), [b"xyz"])) == [hop(3)]  # nothing was changed by it


@pytest.mark.parametrize("frames", [[], [b"xyz", b""], [b"xy"], [b"xyzz"], [b"xyz", b"xyz", b"xyz"]])
def test_wrong_frame_counts_and_sizes_are_refused_whole(pair, frames):
    assert delivered(pair.give_b(data(), frames)) == []
    assert pair.b.counters["refused_frames"] == 1
    assert delivered(pair.give_b(data(), [b"xyz"])) == [hop(3)]


def test_damaged_frames_are_dropped_and_asked_for_again(pair):
    [answer] = [command for command in pair.give_b(data(), [b"xyA"]) if isinstance(command, Transmit)]
    assert answer.kind is Kind.ACK
    assert pair.b.counters["damaged"] == 1
    assert msgspec.msgpack.decode(answer.parts[0][:-8])[-1] == [0]  # the number that arrived damaged
    assert delivered(pair.give_b(data(), [b"xyz"])) == [hop(3)]


def test_packets_above_their_limit_are_refused(pair):
    frames = [bytes(3 << 20), bytes(3 << 20)]
    claim = Hop("run", 1, 0, 0, 0, 0, 0, 0, "a", 0, [TensorMeta("uint8", [3 << 20])] * 2)
    assert delivered(pair.give_b(data(claim, frames), frames)) == []
    assert pair.b.counters["refused_frames"] == 1


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (["future_message", "r-1", 5], "r-1"),
        (["create_session", "r-2", 5], "r-2"),
        (["hop", "run"], "run"),
        (["refused", "r-3"], None),
        ([7], None),
    ],
)
def test_unreadable_messages_are_acknowledged_refused_and_answered(pair, message, asked):
    out = pair.give_b(data(message, frames=()), [])
    assert delivered(out) == []
    assert pair.b.counters["refused_messages"] == 1
    pair.carry(pair.b, out)
    answers = [command.message for command in pair.delivered]
    assert [type(answer) for answer in answers] == ([Refused] if asked else [])
    if asked:
        assert (answers[0].request_id, answers[0].code) == (asked, "unreadable")
    assert delivered(pair.give_b(data(seq=1), [b"xyz"])) == [hop(3)]  # the lane goes on


def test_tensors_that_do_not_fit_their_frames_are_refused_before_anything_is_allocated(pair):
    claim = Hop("run", 1, 0, 0, 0, 0, 0, 0, "a", 0, [TensorMeta("float32", [1 << 30])])
    out = pair.give_b(data(claim), [b"xyz"])
    assert delivered(out) == []
    raw = msgspec.Raw(write_message(claim))
    large = write_header(Kind.DATA, "a", 5, "b", 6, 1, 1, (0, 0, 0), FORWARD, 1, [(1 << 20, 0)], 4, raw)
    pair.give_b(large, [])
    assert pair.b.counters["refused_messages"] == 2
    assert pair.b._pool.kept_bytes == 0


def test_handshake_packets_carry_no_frames(pair):
    hello = write_header(Kind.HELLO, "a", 5, "b", 6, A, 1, (0, 0, 0))
    assert pair.give_b(hello, [b"x"]) == []
    assert pair.b.counters["refused_frames"] == 1


def test_a_hello_for_another_boot_is_told_who_is_here(pair):
    [answer] = pair.give_b(write_header(Kind.HELLO, "a", 5, "b", 4, A, 9, (0, 0, 0)))
    assert isinstance(answer, Transmit)
    assert answer.kind is Kind.GONE


def test_a_hello_of_an_older_life_of_the_link_changes_nothing(pair):
    newer = write_header(Kind.HELLO, "a", 5, "b", 6, A, 3, (0, 0, 0))
    older = write_header(Kind.HELLO, "a", 5, "b", 6, A, 1, (0, 0, 0))
    pair.give_b(newer)
    [answer] = pair.give_b(older)
    assert isinstance(answer, Transmit)
    assert answer.kind is Kind.GONE  # that stream; of no effect where it is left already
    assert delivered(pair.give_b(data(stream=3), [b"xyz"])) == [hop(3)]


@pytest.mark.parametrize(
    "me",
    [
        PeerRef("c", 5, []),
        PeerRef("a", 4, []),
        PeerRef("a", 5, ["ipc:///tmp/x"]),
        PeerRef("a", 5, ["inproc://x"]),
        PeerRef("a", 5, ["tcp://a:1"] * 9),
        PeerRef("a", 5, ["tcp://a:99999"]),
    ],
)
def test_a_hello_that_introduces_somebody_else_or_cannot_be_dialled_is_refused(pair, me):
    assert pair.give_b(write_header(Kind.HELLO, "a", 5, "b", 6, me, 9, (0, 0, 0))) == []
    assert pair.b.counters["refused_handshakes"] == 1


def test_a_new_boot_at_the_address_ends_the_old_one_and_the_dead_stay_dead(pair):
    new = PeerRef("a", 8, A.addresses)
    out = pair.give_b(write_header(Kind.HELLO, "a", 8, "b", 6, new, 1, (0, 0, 0)), source=Source("a", 8, CONTROL))
    [lost] = [command for command in out if isinstance(command, Lost)]
    assert (lost.peer.id, lost.peer.boot) == ("a", 5)
    assert "has taken its address" in lost.reason
    assert pair.give_b(write_header(Kind.HELLO, "a", 5, "b", 6, A, 9, (0, 0, 0))) == []
    assert pair.b.counters["refused_dead"] == 1


def test_nobody_ends_anothers_link_by_claiming_its_address(pair):
    thief = PeerRef("c", 8, A.addresses)
    out = pair.give_b(write_header(Kind.HELLO, "c", 8, "b", 6, thief, 1, (0, 0, 0)), source=Source("c", 8, CONTROL))
    assert not [command for command in out if isinstance(command, Lost)]
    assert delivered(pair.give_b(data(), [b"xyz"])) == [hop(3)]


def test_links_without_traffic_are_dropped_and_their_sockets_released(pair):
    limits = pair.b.limits
    out: list[Command] = []
    pair.b.on_tick(0.1, out)  # acknowledges the first message
    pair.carry(pair.b, out, 0.1)
    out = []
    late = 2 * limits.idle_s
    hello = write_header(Kind.HELLO, "c", 8, "b", 6, PeerRef("c", 8, ["tcp://c:1"]), 1, (0, 0, 0))
    pair.b.on_frames(Source("c", 8, CONTROL), hello, (), late, out)
    assert [command.route.id for command in out if isinstance(command, Release)] == ["a"]
    assert set(pair.b.snapshot()["peers"]) == {"c/8"}
    # The other side was idle too, but goes on: nothing is lost, and nothing comes twice.
    pair.send(hop(3), [b"xyz"], now=late)
    ticks = [late + 0.3 * number for number in range(1, 6)]
    for now in ticks:
        out = []
        pair.a.on_tick(now, out)
        pair.carry(pair.a, out, now)
    assert [command.message for command in pair.delivered] == [hop(3)]


def test_two_processes_of_one_id_at_different_addresses_are_two_peers(pair):
    """Who may hold an id is for membership to say (B03); the wire keeps both apart."""
    twin = PeerRef("a", 8, ["tcp://elsewhere:1"])
    out = pair.give_b(write_header(Kind.HELLO, "a", 8, "b", 6, twin, 1, (0, 0, 0)), source=Source("a", 8, CONTROL))
    assert not [command for command in out if isinstance(command, Lost)]
    assert delivered(pair.give_b(data(), [b"xyz"])) == [hop(3)]


def test_large_messages_need_their_chunks_in_place(pair):
    pair.send(hop(5 << 20), [bytes(5 << 20)])
    assert delivered(pair.delivered) == [hop(5 << 20)]
    chunk = write_header(Kind.CHUNK, "a", 5, "b", 6, 1, 1, (0, 0, 0), BACKWARD, 0, 0, 0, 3, digest_of(b"xyz"))
    assert delivered(pair.give_b(chunk, [b"xyz"], Source("a", 5, BACKWARD))) == []
    assert pair.b.counters["refused_chunks"] == 1


def test_delivered_frames_are_aligned_writable_and_independent(pair):
    import ctypes

    for size in (1, 100, 70_000, 300_000, 5 << 20):
        pair.delivered.clear()
        body = bytes([7]) * size
        pair.send(hop(size), [body])
        [frame] = pair.delivered[0].frames
        assert bytes(frame) == body
        assert ctypes.addressof(ctypes.c_char.from_buffer(frame)) % 64 == 0
        frame[0] = 1
        assert body[0] == 7


def test_buffers_are_used_again_only_when_nobody_holds_them(pair):
    size = 5 << 20
    pair.send(hop(size), [b"\1" * size])
    held = pair.delivered.pop().frames[0][10:20]
    pair.send(hop(size, 1), [b"\2" * size])
    assert bytes(held) == b"\1" * 10
    pair.delivered.clear()
    known = pair.b._pool.kept_bytes
    for step in range(5):
        pair.send(hop(size, step), [b"\3" * size])
        pair.delivered.clear()
    assert pair.b._pool.kept_bytes == known
    assert bytes(held) == b"\1" * 10


def test_a_process_may_send_to_itself():
    endpoint = Endpoint(A)
    out: list[Command] = []
    endpoint.send(A, AskCluster("r"), (), None, 0.0, out)
    assert delivered(out) == [AskCluster("r")]


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://a", "tcp://a:", "tcp://:1", "tcp://a:x", "tcp://a:0", "tcp://a:65536", "ipc:///x",
     "tcp://a b:1", "tcp://a:1;b", "tcp://é:1", "tcp://a:１", "tcp://" + "a" * 300 + ":1", "udp://a:1", "tcp://a\n:1"],
)  # fmt: skip
def test_addresses_that_are_none(address):
    with pytest.raises(MisuseError, match="is not an address"):
        check_address(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7700", "tcp://[::1]:7700", "tcp://host.local:1"])
def test_addresses(address):
    check_address(address)


def test_misuse_is_told_at_once():
    endpoint = Endpoint(A)
    with pytest.raises(MisuseError, match="boot number"):
        Endpoint(PeerRef("a", 0))
    with pytest.raises(MisuseError, match="not allowed"):
        Endpoint(PeerRef("../a", 1))
    with pytest.raises(MisuseError, match="no address"):
        endpoint.send(PeerRef("b", 6), Ok("r"), (), None, 0.0, [])
    with pytest.raises(MisuseError, match="contiguous"):
        endpoint.send(B, hop(3), [memoryview(bytes(6))[::2]], None, 0.0, [])
