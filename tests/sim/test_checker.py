"""The checker on histories made by hand: a good one passes, and each promise has at least one that breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.broken import BAD, without
from tests.sim.checker import check
from tests.sim.checks.clients import ASKED, FOLLOWS, reachable
from tests.sim.handmade import good
from tests.sim.history import Computed, History, Wrote

HERE = Path(__file__).parent
FILES = [HERE / "checker.py", *sorted((HERE / "checks").glob("*.py"))]
MAY_IMPORT = {"__future__", "collections", "dataclasses", "hashlib", "json", "re", "struct", "typing"}
OWN = ("tests.sim.checks", "tests.sim.history", "tests.sim.checker")


def broken(history: History) -> set[str]:
    """Which promises are broken."""
    return {breach.invariant for breach in check(history)}


def test_a_good_history_passes() -> None:
    """With a kill, a replay, a recovery and a take-over."""
    history = good().finish()
    assert [str(breach) for breach in check(history)] == []
    assert sum(isinstance(event, Computed) for event in history.events) == 10


@pytest.mark.parametrize(("invariant", "make"), BAD, ids=[make.__name__ for _, make in BAD])
def test_a_bad_history_is_found(invariant: str, make: Callable[[], History]) -> None:
    """The promise that it breaks is named, with the time and what shows it."""
    found = [breach for breach in check(make()) if breach.invariant == invariant]
    assert found
    assert found[0].text
    assert found[0].t > 0


def test_every_invariant_has_a_bad_history() -> None:
    """No invariant is written down that no test breaks."""
    named = set()
    for path in FILES:
        named |= set(re.findall(r'breach\(\s*"([^"]+)"', path.read_text()))
    assert named == {invariant for invariant, _ in BAD}


REPLAYED = (2, 3)
"""Updates of a step that was lost and made again: nobody would miss the first time."""


@pytest.mark.parametrize("place", [place for place in range(10) if place not in REPLAYED])
def test_no_update_can_be_missing(place: int) -> None:
    """Whichever update is taken out of a good history, it is missed."""
    assert broken(without(good().finish(), Computed, place))


WRITES = [event.key for event in good().finish().events if isinstance(event, Wrote)]
LASTING = [place for place, key in enumerate(WRITES) if "/sessions/run-1/" in key or key == "registry/term.json"]


@pytest.mark.parametrize("place", LASTING)
def test_no_write_can_be_missing(place: int) -> None:
    """Whichever part, manifest, head or term is taken out of a good history, it is missed."""
    assert broken(without(good().finish(), Wrote, place))


def test_a_breach_says_who_when_and_what() -> None:
    """Time, processes, step and records are in its text."""
    (make,) = [make for _, make in BAD if make.__name__ == "two_processes_apply_a_vnode"]
    found = next(breach for breach in check(make()) if breach.invariant == "one owner")
    assert found.step == 4
    assert found.processes == ("p1#11", "p1#99")
    assert len(found.records) == 2
    assert "one owner" in str(found)
    assert f"{found.t:.3f}" in str(found)


def test_what_a_client_may_see() -> None:
    """The table is closed, nothing follows the end, and what needs somebody to act is not seen without."""
    states = set(FOLLOWS)
    assert all(after <= states for table in (FOLLOWS, ASKED) for after in table.values())
    assert reachable("finished", acted=True) == {"finished"}
    assert "created" not in reachable("starting", acted=True)
    assert "starting" not in reachable("failed", acted=False)
    assert "starting" in reachable("failed", acted=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_checker_shares_no_code_with_the_product(path: Path) -> None:
    """It imports itself, the history's records, and a few modules of the standard library."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            assert name.startswith(OWN) or name.partition(".")[0] in MAY_IMPORT, f"{path.name} imports {name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("__import__", "exec", "eval")
