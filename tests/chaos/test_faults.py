"""The schedule: a function of the seed alone, and in it what was asked for."""

from __future__ import annotations

import pytest

from cli.chaos.faults import EVERYWHERE, ODDS, Kind, Schedule, odds_of
from wire.errors import UsageError

EVEN = dict.fromkeys(Kind, 1.0)


def faults(seed: int, count: int = 400, **extra: float) -> list[object]:
    schedule = Schedule(seed, EVEN, lease_s=extra.get("lease_s", 1.0), gap_s=extra.get("gap_s", 1.0))
    return [schedule.fault(number) for number in range(count)]


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    assert faults(1) == faults(1)
    assert faults(1) != faults(2)
    schedule = Schedule(1, EVEN, lease_s=1.0, gap_s=1.0)
    assert schedule.fault(17) == faults(1)[17], "the n-th fault needs none of those before it"


def test_every_kind_comes_by_its_odds_and_no_other() -> None:
    schedule = Schedule(3, {Kind.KILL: 3.0, Kind.PAUSE: 1.0, Kind.FLIP: 0.0}, lease_s=1.0, gap_s=1.0)
    kinds = [schedule.fault(number).kind for number in range(2000)]
    assert set(kinds) == {Kind.KILL, Kind.PAUSE}
    assert 0.70 < kinds.count(Kind.KILL) / 2000 < 0.80
    assert {fault.kind for fault in faults(5)} == set(Kind)  # type: ignore[attr-defined]


def test_an_order_comes_first() -> None:
    order = (Kind.CLI, Kind.DISK, Kind.CLI)
    schedule = Schedule(1, {Kind.KILL: 1.0}, lease_s=1.0, gap_s=1.0, order=order)
    assert [schedule.fault(number).kind for number in range(5)] == [*order, Kind.KILL, Kind.KILL]


def test_a_third_of_the_pauses_outlasts_the_lease() -> None:
    schedule = Schedule(7, {Kind.PAUSE: 1.0}, lease_s=10.0, gap_s=1.0)
    seconds = [schedule.fault(number).seconds for number in range(3000)]
    assert 0.30 < sum(length > 10.0 for length in seconds) / 3000 < 0.37
    assert all(length <= 8.0 or length >= 12.0 for length in seconds), (
        "none is so close to the lease that chance decides"
    )


def test_numbers_choose_among_whatever_there_is() -> None:
    fault = Schedule(1, EVEN, lease_s=1.0, gap_s=0.0).fault(0)
    assert fault.wait_s == 0.0
    assert fault.choose(["a"]) == "a"
    assert fault.choose(["a", "b", "c"], 0.0) == "a"
    assert fault.choose(["a", "b", "c"], 0.999) == "c"
    assert fault.choose(["a", "b", "c"], 1.0) in ("a", "b", "c")


def test_odds_as_a_person_writes_them() -> None:
    assert odds_of("kill, pause=2.5", EVERYWHERE) == {Kind.KILL: ODDS[Kind.KILL], Kind.PAUSE: 2.5}
    assert set(odds_of("", EVERYWHERE)) == set(EVERYWHERE)
    for wrong in ("explode", "kill=x", "kill=-1", "kill=nan", "store"):
        with pytest.raises(UsageError):
            odds_of(wrong, EVERYWHERE)
    with pytest.raises(UsageError):
        Schedule(1, {}, lease_s=1.0, gap_s=1.0)
