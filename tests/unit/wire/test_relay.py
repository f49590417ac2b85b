"""Tickets and limits of a relay."""

from __future__ import annotations

import itertools

import pytest

from wire.relay import TICKET_CHARS, TICKET_S, Desk, RelayLimits


def desk(**limits: int) -> Desk:
    numbers = itertools.count(1)
    return Desk(RelayLimits(**limits), lambda: f"{next(numbers):032d}")


def test_both_tickets_bring_two_connections_together_once():
    here = desk()
    one, other = here.open("a", "b", 0.0)
    assert one != other
    first = here.present(one, 7, 1.0)
    assert first is not None
    assert first.here == {0: 7}
    assert here.present(one, 8, 1.0) is None, "a ticket is used once"
    assert here.present(other, 9, TICKET_S - 0.1) is first
    assert first.here == {0: 7, 1: 9}
    assert here.present(other, 10, TICKET_S - 0.1) is None
    assert here.expire(1e9) == [], "a stream that stands has no end"
    here.close(first)
    assert len(here) == 0


@pytest.mark.parametrize("ticket", ["", "x", "0" * 32, "é" * 32, "0" * 31 + "3"])
def test_no_other_ticket_is_taken(ticket):
    here = desk()
    here.open("a", "b", 0.0)
    assert here.present(ticket, 1, 0.0) is None


def test_a_ticket_ends():
    here = desk()
    one, other = here.open("a", "b", 0.0)
    stream = here.present(one, 1, 0.0)
    assert here.present(other, 2, TICKET_S) is None
    assert here.expire(TICKET_S - 0.1) == []
    assert here.expire(TICKET_S) == [stream]
    assert here.present(other, 2, 0.0) is None


def test_limits_at_the_limit_and_beyond():
    here = desk(streams=3, streams_per_peer=2)
    assert "different" in here.problem("a", "a", 0.0)
    for _ in range(2):
        assert here.problem("a", "b", 0.0) == ""
        here.open("a", "b", 0.0)
    assert "2 streams of a" in here.problem("a", "c", 0.0)
    assert "2 streams of b" in here.problem("c", "b", 0.0)
    assert here.problem("c", "d", 0.0) == ""
    here.open("c", "d", 0.0)
    assert "3 streams" in here.problem("e", "f", 0.0)
    assert here.problem("e", "f", TICKET_S) == "", "what never came together counts no longer"


def test_streams_of_one_who_is_let_in_no_longer_end():
    here = desk()
    here.open("a", "b", 0.0)
    one, _ = here.open("c", "b", 0.0)
    [gone] = here.expel(lambda name: name != "a")
    assert gone.ends == ("a", "b")
    assert here.present(one, 1, 0.0)


def test_tickets_are_drawn_from_the_systems_random_numbers():
    here = Desk()
    drawn = {ticket for _ in range(50) for ticket in here.open("a", "b", 0.0)}
    assert len(drawn) == 100
    assert {len(ticket) for ticket in drawn} == {TICKET_CHARS}
