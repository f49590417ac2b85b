from __future__ import annotations

from pnode.uncommitted import Uncommitted


def test_both_limits_count_and_the_one_that_is_reached_is_named() -> None:
    cuts = Uncommitted(3, 2)
    cuts.made(10)
    assert cuts.room()
    assert cuts.awaited() == ""
    cuts.made(20)
    assert cuts.awaited() == "store: cut of step 10"
    assert cuts.stored(10)
    assert cuts.room()
    cuts.made(30)
    assert cuts.awaited() == "store: cut of step 20"
    assert cuts.stored(20)
    assert cuts.stored(30)
    assert cuts.awaited() == "orchestrator: commit of step 10"
    cuts.committed(20)
    assert cuts.room()
    assert cuts.saved == [30]
    assert len(cuts) == 1


def test_the_oldest_cut_that_is_not_stored_is_named_before_a_later_commit() -> None:
    cuts = Uncommitted(2, 9)
    cuts.made(10)
    cuts.made(20)
    assert cuts.stored(20)
    assert cuts.awaited() == "store: cut of step 10"


def test_a_cut_is_stored_once() -> None:
    cuts = Uncommitted(9, 9)
    cuts.made(10)
    assert cuts.stored(10)
    assert not cuts.stored(10)
    assert not cuts.stored(11)


def test_a_commit_before_the_stores_answer_counts() -> None:
    cuts = Uncommitted(1, 1)
    cuts.made(10)
    cuts.committed(10)
    assert cuts.stored(10)
    assert cuts.saved == []


def test_a_limit_below_one_still_lets_one_be_made() -> None:
    assert Uncommitted(0, 0).room()
