"""Strangers' connections: how many, how fast, how much."""

from __future__ import annotations

from wire.door import BAN_S, BANNED, HANDSHAKE_BYTES, PROVED_BYTES, Door, Doorway


class Lines:
    """What went over each connection."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int]] = {}

    def __call__(self, descriptor: int) -> tuple[int, int] | None:
        return self.found.get(descriptor, (0, 0))


def test_one_that_is_answered_as_only_admitted_ones_are_is_no_stranger_any_more():
    door, lines = Door(), Lines()
    for number in range(3):
        assert door.accepted(number, "1.1.1.1", 0.0, lines) == []
    lines.found = {0: (600, PROVED_BYTES), 1: (10_000_000, PROVED_BYTES + 1), 2: (HANDSHAKE_BYTES, 0)}
    assert door.sweep(lines) == []
    assert list(door.strangers) == [0, 2]
    lines.found[2] = (HANDSHAKE_BYTES + 1, PROVED_BYTES)
    assert door.sweep(lines) == [2]
    assert list(door.strangers) == [0]
    assert door.closed(0) == "1.1.1.1"
    assert door.closed(0) == ""


def test_beyond_the_limit_the_newest_of_the_address_with_most_are_ended():
    door, lines = Door(Doorway(strangers=4)), Lines()
    assert door.accepted(1, "good", 0.0, lines) == []
    for number in (2, 3, 4):
        assert door.accepted(number, "bad", 0.0, lines) == []
    assert door.accepted(5, "good", 0.0, lines) == [4]
    assert door.accepted(6, "bad", 0.0, lines) == [6]
    lines.found = {2: (600, 400), 3: (600, 400)}
    assert door.accepted(7, "bad", 0.0, lines) == []  # 2 and 3 have proved themselves meanwhile
    assert sorted(door.strangers) == [1, 5, 7]


def test_an_address_that_is_too_fast_is_shut_out_for_a_while():
    door, lines = Door(Doorway(rate=10.0, burst=5.0, strangers=100)), Lines()
    assert [door.accepted(number, "a", 0.0, lines) for number in range(5)] == [[]] * 5
    assert door.banned(0.0) == ()
    assert door.accepted(5, "a", 0.0, lines) == [5]
    assert door.accepted(6, "b", 0.0, lines) == []
    assert door.banned(0.0) == ("a",)
    assert door.accepted(7, "a", 0.1, lines) == []  # one more is allowed after a tenth of a second
    assert door.accepted(8, "a", 0.1, lines) == [8]
    assert door.banned(0.1 + BAN_S - 0.01) == ("a",)
    assert door.banned(0.1 + BAN_S) == ()


def test_memory_is_bounded_whatever_the_addresses():
    door, lines = Door(Doorway(burst=0.0)), Lines()
    for number in range(20_000):
        door.accepted(number, f"address {number}", 0.0, lines)
    assert len(door.banned(0.0)) == BANNED
    assert len(door._tokens) <= 4096
    assert not door.strangers
