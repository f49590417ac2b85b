"""What surrounds the simulator: worker pool, kept results, coverage, shrinking, and the planting of bugs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sim import campaign
from tests.sim.campaign import Campaign, bound, verdict
from tests.sim.coverage import NO_FAULT_LEADS_THERE, coverage, tables
from tests.sim.planted.edit import Edit, MovedError, planted
from tests.sim.pool import Pool, ranges
from tests.sim.results import APART, PRODUCT, ROOT, StateFile, Totals, code_digest, code_files
from tests.sim.shrink import shrink
from tests.sim.worker import failure

FAKE = [sys.executable, "-m", "tests.sim.fake_worker"]


def clean(seed: int) -> dict[str, object]:
    return {**failure(seed, "", ""), "breaches": [], "steps": 8, "faults": {"drop": 1}, "visited": ["core a>b"]}


# ------------------------------------------------------------------------------------------------ the pool


def test_a_worker_that_dies_or_hangs_costs_its_seed_alone() -> None:
    """All other seeds of its range are done by another worker, and each seed gives one result."""
    pool = Pool(2, hang_s=3.0, command=FAKE)
    results = {found["seed"]: found for found in pool.results([(10, 4), (14, 6)]) if found is not None}
    assert sorted(results) == list(range(10, 20))
    assert "died with 3; this is the end" in results[13]["breaches"][0]["text"]
    assert "hangs" in results[14]["breaches"][0]["text"]
    assert results[15]["breaches"][0]["invariant"] == "a promise"
    assert all(not results[seed]["breaches"] for seed in (10, 11, 12, 16, 17, 18, 19))


def test_no_worker_is_left_when_the_caller_stops() -> None:
    """Closing the results ends every process."""
    pool = Pool(2, command=FAKE)
    results = pool.results(ranges(range(100), 5))
    while next(results) is None:
        pass
    workers = [worker.process for worker in pool._workers]
    results.close()  # type: ignore[attr-defined]
    assert workers
    assert all(process.poll() is not None for process in workers)


def test_ranges() -> None:
    """Neighbours stay together, gaps part them, and no range is too long."""
    assert list(ranges([1, 2, 3, 4, 5, 9, 10, 20], 3)) == [(1, 3), (4, 2), (9, 2), (20, 1)]
    assert list(ranges([], 3)) == []


# ------------------------------------------------------------------------------------------------ results


def kept(path: Path, code: str) -> StateFile:
    """What a file holds for this code."""
    state = StateFile(path, code)
    state.close()
    return state


def test_results_accumulate_and_nothing_is_run_twice(tmp_path: Path) -> None:
    """A second campaign over the same seeds runs only what is missing, and counts all."""
    state = tmp_path / "state.jsonl"
    first = Campaign(range(0, 6), jobs=1, state=state, live=False, quiet=True, command=FAKE)
    first.run()
    second = Campaign(range(4, 10), jobs=2, state=state, live=False, quiet=True, command=FAKE)
    second.run()
    assert (first.fresh.runs, second.fresh.runs, second.totals.runs) == (6, 4, 10)
    assert second.totals.steps == 80
    assert second.totals.faults == {"drop": 20}
    again = kept(state, code_digest())
    assert again.done == set(range(10))
    assert again.totals.visited == {"session created>starting"}
    assert len(state.read_text().splitlines()) == 10


def test_whatever_a_run_loads_counts() -> None:
    """A change of any file that a run uses makes old results those of other code."""
    program = (
        "import sys; from tests.sim.worker import judged\n"
        "for seed in range(5): judged(seed)\n"
        "print(*(getattr(module, '__file__', '') for module in list(sys.modules.values())), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    packages = (*PRODUCT, "tests/sim")
    loaded = {Path(line) for line in done.stdout.splitlines() if line.startswith(str(ROOT))}
    loaded = {path for path in loaded if path.relative_to(ROOT).as_posix().startswith(packages)}
    assert len(loaded) > 100
    uncounted = loaded - set(code_files())
    assert {path for path in uncounted if not set(path.parts) & set(APART)} == set()
    assert code_digest() == code_digest()


def test_a_line_that_was_cut_short_costs_its_seed(tmp_path: Path) -> None:
    """A file of a campaign that was killed in the middle of a line can be gone on with."""
    path = tmp_path / "state.jsonl"
    state = StateFile(path, "code")
    state.add(clean(1))
    state.add(clean(2))
    state.close()
    path.write_bytes(path.read_bytes()[:-20])
    state = StateFile(path, "code")
    assert state.done == {1}
    state.add(clean(2))
    state.close()
    assert kept(path, "code").done == {1, 2}


def test_results_of_other_code_do_not_count(tmp_path: Path) -> None:
    """They stay in the file and are named."""
    path = tmp_path / "state.jsonl"
    state = StateFile(path, "old")
    state.add(clean(1))
    state.close()
    state = kept(path, "new")
    assert (state.done, state.other, state.totals.runs) == (set(), 1, 0)


def test_a_campaign_says_what_it_found() -> None:
    """Figures, breaches with a command to see them again, and what the rate means."""
    run = Campaign(range(10, 20), jobs=2, state=None, live=False, quiet=True, hang_s=3.0, command=FAKE)
    run.run()
    text = "\n".join(run.lines())
    assert "python -m tests.sim --replay 15 --trace" in text
    assert "3 in 10 runs broke a promise" in text
    assert "never: " in text
    assert json.loads(json.dumps(run.as_json()))["all"]["breached"] == 3


def test_what_none_in_n_means() -> None:
    """About 3/N: the chance to see nothing at that rate is 5 %."""
    totals = Totals(runs=1000)
    limit = bound(totals)
    assert limit == pytest.approx(3 / 1000, rel=0.01)
    assert limit is not None
    assert (1 - limit) ** 1000 == pytest.approx(0.05)
    assert verdict(totals).startswith("0 in 1000: the true rate is below 2.99e-03 (about 3/1000)")
    assert bound(Totals(runs=10, breached=1)) is None


def test_campaign_has_its_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal: plain lines, flushed, with the time that is left."""
    monkeypatch.setattr(campaign, "PLAIN_EVERY_S", 0.0)
    Campaign(range(20, 24), jobs=1, state=None, live=False, command=FAKE).run()
    out = capsys.readouterr().out
    assert "4 seeds to run" in out
    assert "s left" in out
    assert "\x1b" not in out


# ------------------------------------------------------------------------------------------------ coverage


def test_coverage_names_what_never_happened() -> None:
    """And what happened though no table has it."""
    (found,) = coverage({"core a>b", "core b>a", "other x>y"}, {"core": {"a": {"b"}, "b": {"c"}, "c": set()}})
    assert (found.states_seen, found.states) == (2, 3)
    assert (found.transitions_seen, found.transitions) == (1, 2)
    assert found.never == ("b>c", "state c")
    assert found.strange == ("b>a",)


def test_the_products_tables_are_found() -> None:
    """Each state machine that the world observes has one, and each transition that is barred is in it."""
    barred = {move for found in coverage(set()) for move in found.barred}
    assert {text.partition(" ")[2] for text in NO_FAULT_LEADS_THERE} == barred
    assert set(tables()) == {"session", "stage", "member", "core"}
    assert all(len(table) >= 4 for table in tables().values())


# ------------------------------------------------------------------------------------------------ shrinking


@pytest.mark.parametrize("needed", [{0}, {6}, {2, 5}, {0, 3, 6}, set(range(7))])
def test_the_smallest_schedule_is_found(needed: set[int]) -> None:
    """Faults that the breach doesn't need are left out; another breach does not count."""

    def broken(places: Sequence[int]) -> set[str]:
        return {"wanted"} if needed <= set(places) else {"other"} if len(places) == 1 else set()

    found = shrink(7, broken)
    assert set(found.places) == needed
    assert found.invariants == {"wanted"}


def test_nothing_is_shrunk_if_nothing_breaks() -> None:
    """One run tells."""
    assert shrink(5, lambda places: set()).runs == 1


# ------------------------------------------------------------------------------------------------ planting


class Shelf:
    """Something to plant bugs into."""

    def __init__(self, size: int) -> None:
        self.size = size

    def twice(self) -> int:
        """Twice the size."""
        return self.size * 2

    @property
    def half(self) -> float:
        """Half the size."""
        return self.size / 2

    async def later(self) -> int:
        """The size."""
        return self.size

    def __repr__(self) -> str:
        return super().__repr__() + " of size " + str(self.size)


def test_an_edit_lasts_as_long_as_it_is_planted() -> None:
    """Whoever holds the function runs the changed code; afterwards all is as it was."""
    held = Shelf.twice
    with planted([Edit(Shelf.twice, "* 2", "* 3"), Edit(Shelf.half, "/ 2", "/ 4"), Edit(Shelf.__repr__, "of", "for")]):
        assert held(Shelf(5)) == 15
        assert Shelf(8).half == 2.0
        assert repr(Shelf(5)).endswith("for size 5")
    assert held(Shelf(5)) == 10
    assert Shelf(8).half == 4.0
    assert repr(Shelf(5)).endswith("of size 5")


def test_two_edits_of_one_function() -> None:
    """Both are made."""
    with planted([Edit(Shelf.twice, "* 2", "* 3"), Edit(Shelf.twice, "self.size *", "(self.size + 1) *")]):
        assert Shelf(5).twice() == 18


async def test_coroutines_can_be_edited() -> None:
    """They are functions too."""
    with planted([Edit(Shelf.later, "self.size", "self.size + 1")]):
        assert await Shelf(1).later() == 2


@pytest.mark.parametrize("old", ["* 5", "self", "twice the size"])
def test_words_that_have_moved_are_an_error(old: str) -> None:
    """Not there, or not once: nothing is planted, loudly."""
    with pytest.raises(MovedError, match="expected once"), planted([Edit(Shelf.twice, old, "")]):
        pass
