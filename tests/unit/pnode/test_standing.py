from __future__ import annotations

import pytest

from pnode.standing import SPEAKERS, Admission, Standing
from storage.terms import TermRecord
from wire.messages import HeartbeatAck, Registered

OLD, NEW = 71, 72


def answer(term: int, *, incarnation: int = 1, cluster: str = "c", every_s: float = 2.0) -> Registered:
    return Registered("r", incarnation, term, 10.0, every_s, "", cluster)


def member(term: int = 5) -> Standing:
    standing = Standing(0.0)
    assert standing.registered(answer(term), 0.0) is Admission.TAKEN
    return standing


def test_an_answer_of_a_term_that_is_over_is_not_taken() -> None:
    standing = member(5)
    assert standing.registered(answer(4, incarnation=9), 1.0) is Admission.OVER
    assert (standing.incarnation, standing.term) == (1, 5)
    assert standing.registered(answer(6, incarnation=9), 1.0) is Admission.TAKEN
    assert (standing.incarnation, standing.term) == (9, 6)


def test_another_cluster_begins_anew_whatever_its_term() -> None:
    standing = member(5)
    assert standing.registered(answer(1, cluster="d"), 1.0) is Admission.MOVED
    assert (standing.term, standing.cluster) == (1, "d")
    assert standing.registered(answer(1, cluster="d"), 1.0) is Admission.TAKEN


def test_only_an_acknowledgement_of_the_present_term_counts_as_a_sign() -> None:
    standing = member(5)
    assert not standing.acknowledged(HeartbeatAck(1, 4, True), OLD, 100.0)
    assert standing.silent(100.0) == 100.0
    assert not standing.acknowledged(HeartbeatAck(1, 5, True), NEW, 100.0)
    assert standing.silent(100.0) == 0.0


@pytest.mark.parametrize(
    ("ack", "again"),
    [
        (HeartbeatAck(1, 5, True), False),
        (HeartbeatAck(1, 5, False), True),
        (HeartbeatAck(2, 5, False), False),  # about another incarnation of this id
        (HeartbeatAck(1, 6, True), True),  # there is a new orchestrator
        (HeartbeatAck(1, 4, False), False),  # an old one that never knew us
    ],
)
def test_when_to_register_again(ack: HeartbeatAck, again: bool) -> None:
    assert member(5).acknowledged(ack, NEW, 1.0) is again


def test_a_command_of_a_term_that_is_over_is_not_obeyed_and_a_higher_one_counts() -> None:
    standing = member(5)
    assert not standing.obeys(OLD, 4)
    assert standing.obeys(NEW, 7)
    assert standing.term == 7
    assert not standing.obeys(OLD, 5)


def test_a_process_that_spoke_only_in_old_terms_is_outdated() -> None:
    standing = member(5)
    standing.acknowledged(HeartbeatAck(1, 5, True), OLD, 1.0)
    assert not standing.outdated(OLD)
    assert not standing.outdated(99)  # never heard of: its term is not known
    standing.registered(answer(6), 2.0)
    assert standing.outdated(OLD)
    standing.acknowledged(HeartbeatAck(1, 6, True), NEW, 3.0)
    assert not standing.outdated(NEW)


def test_silence_is_ten_seconds_or_five_reports() -> None:
    standing = member(5)
    assert standing.silent(10.0) == 0.0
    assert standing.silent(10.1) == pytest.approx(10.1)
    standing.registered(answer(5, every_s=60.0), 0.0)
    assert standing.silent(299.0) == 0.0
    assert standing.silent(301.0) > 0


@pytest.mark.parametrize(
    ("record", "follows"),
    [
        (TermRecord("c", 6, ["tcp://1.2.3.4:5"]), True),
        (TermRecord("c", 6, []), False),
        (TermRecord("c", 5, ["tcp://1.2.3.4:5"]), False),
        (TermRecord("d", 6, ["tcp://1.2.3.4:5"]), False),
    ],
)
def test_the_stores_record_is_followed_only_upwards_and_within_the_cluster(record: TermRecord, follows: bool) -> None:
    assert member(5).follows(record) is follows


def test_who_was_never_a_member_follows_any_record_with_addresses() -> None:
    assert Standing(0.0).follows(TermRecord("x", 1, ["tcp://1.2.3.4:5"]))


def test_what_is_remembered_of_processes_is_bounded() -> None:
    standing = member(5)
    for boot in range(1000):
        standing.speaks(boot, 5)
    assert len(standing._speakers) == SPEAKERS
