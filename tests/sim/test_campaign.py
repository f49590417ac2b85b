"""A short campaign, the bugs that are found quickly, and can both be trusted: seeds repeat, bugs are planted."""

from __future__ import annotations

import os
import sys

import pytest

from tests.sim.campaign import Campaign, breach_line, replay_command
from tests.sim.planted import BUGS, MASKED
from tests.sim.planted.edit import planted
from tests.sim.planted.table import hunt
from tests.sim.record import digest_of_history
from tests.sim.world import run

SEEDS = 200
BASE = int(os.environ.get("DCNR_SIM_BASE", "0"))
"""The first seed; another one may be given."""

JOBS = 2

QUICK = {"data-off-by-one": 20, "optimizer-not-restored": 20}
"""Planted bugs that are found within so many seeds."""


@pytest.mark.timeout(600)
def test_seeds_break_no_promise() -> None:
    """Two hundred runs with faults of every kind, two at a time."""
    print(f"seeds {BASE} to {BASE + SEEDS - 1}")
    campaign = Campaign(range(BASE, BASE + SEEDS), jobs=JOBS, state=None, live=False, quiet=True)
    campaign.run()
    print("\n".join(campaign.lines()))
    totals = campaign.fresh
    broken = [f"{breach_line(b['seed'], b)}\n  {replay_command(b['seed'])}" for b in totals.breaches]
    assert not broken, "\n".join(broken)
    assert totals.runs == SEEDS
    assert totals.faults.total() > SEEDS
    assert totals.recoveries > SEEDS // 4


@pytest.mark.parametrize("bug", [*BUGS, *MASKED], ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: object) -> None:
    """What it changes is where it was."""
    with planted(bug.edits()):  # type: ignore[attr-defined]
        pass


def test_there_are_twenty() -> None:
    """Each says what it breaks."""
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20
    assert all(len(bug.breaks) > 20 for bug in BUGS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str) -> None:
    """By a promise that it breaks, in a run that breaks none without it."""
    (bug,) = [bug for bug in BUGS if bug.name == name]
    catch = hunt(bug, start=BASE, limit=QUICK[name], jobs=JOBS)
    assert catch.seeds, f"{name} was not found in {QUICK[name]} seeds from {BASE}"
    print(f"{name}: after {catch.seeds} seeds by {catch.invariants}", file=sys.stderr)


@pytest.mark.parametrize("seed", [BASE, BASE + 1, BASE + 2])
def test_a_seed_repeats(seed: int) -> None:
    """The same events in the same order, so that a breach can be seen again."""
    assert digest_of_history(run(seed)) == digest_of_history(run(seed))
