"""Where VNodes go after a loss: survivors keep theirs, and what was asked for is kept as far as it can be had."""

from __future__ import annotations

import pytest

from orchestrator.placement import plan
from orchestrator.repair import place_again
from orchestrator.work import Machine, work_of
from tests.unit.orchestrator.graphs import equal_machines, make_graph, transformer_like

CHAIN = make_graph([64] * 8, [[-1], *([i] for i in range(7))], parameters=[5000] * 8)


def chain() -> object:
    return work_of(CHAIN, batch=8, microbatches=8)


def kept_on(placement: dict[str, str], result: dict[str, str]) -> bool:
    """Whether each VNode is where it was."""
    return all(result[node] == pnode for node, pnode in placement.items())


def test_a_spare_takes_what_was_lost() -> None:
    work = work_of(CHAIN, batch=8, microbatches=8)
    before = {f"n{i}": ("p0", "p1", "p9")[min(i // 3, 2)] for i in range(8)}
    survivors = {node: pnode for node, pnode in before.items() if pnode != "p9"}
    found, notes = place_again(work, equal_machines(3, speed=1e8), pnodes=3, keep=before)
    assert kept_on(survivors, found.placement)  # type: ignore[arg-type]
    assert {found.placement["n6"], found.placement["n7"]} == {"p2"}  # type: ignore[index]
    assert notes == []


@pytest.mark.parametrize("lost", range(8))
def test_the_number_that_was_asked_for_is_kept_though_fewer_would_send_less(lost: int) -> None:
    """One small VNode was lost, and there is a PNode for it: a neighbour would do as well, but three were asked for."""
    work = work_of(CHAIN, batch=8, microbatches=8)
    machines = [Machine(f"p{i}", 1e11 if i < 2 else 1e8, 1 << 34, 1e6, 0.01, f"h{i}") for i in range(3)]
    keep = {f"n{i}": "p0" if i < 4 else "p1" for i in range(8) if i != lost}
    found, notes = place_again(work, machines, pnodes=3, keep={**keep, f"n{lost}": "p9"})
    assert len(set(found.placement.values())) == 3
    if kept_on(keep, found.placement):  # type: ignore[arg-type]
        assert notes == []
    else:
        assert "can't stay there" in notes[0]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("lost", [("p0",), ("p1",), ("p3",), ("p0", "p2"), ("p1", "p2", "p3")])
def test_as_many_as_were_asked_for_if_there_are_so_many(count: int, lost: tuple[str, ...]) -> None:
    work = work_of(transformer_like(2), batch=12, microbatches=4)
    before = plan(work, equal_machines(count), pnodes=count).placement
    for size in (3, 8, 12):  # an exact search, its limit, and beyond it
        machines = [machine for machine in equal_machines(size + len(lost)) if machine.id not in lost]
        found, _ = place_again(work, machines, pnodes=count, keep=before)  # type: ignore[arg-type]
        assert len(set(found.placement.values())) == min(count, len(machines)), (size, found.reasons)
        assert set(found.placement.values()) <= {machine.id for machine in machines}


def test_fewer_are_a_shortfall_that_is_said() -> None:
    work = work_of(CHAIN, batch=8, microbatches=8)
    found, notes = place_again(work, equal_machines(2, speed=1e8), pnodes=3)
    assert len(set(found.placement.values())) == 2
    assert notes == ["3 PNodes were asked for, but 2 can be had: it goes on with 2"]


def test_a_placement_by_hand_is_kept_while_all_of_it_live() -> None:
    work = work_of(CHAIN, batch=8, microbatches=8)
    wanted = {f"n{i}": f"p{i % 2}" for i in range(8)}
    found, notes = place_again(work, equal_machines(3, speed=1e8), wanted=wanted)
    assert found.placement == wanted
    assert notes == []
    left = [machine for machine in equal_machines(3, speed=1e8) if machine.id != "p1"]
    found, notes = place_again(work, left, wanted=wanted)
    assert kept_on({node: pnode for node, pnode in wanted.items() if pnode == "p0"}, found.placement)  # type: ignore[arg-type]
    assert "placed by hand on p1 too, which can't be had" in notes[0]


def test_survivors_without_room_for_what_was_lost_give_theirs_up() -> None:
    """Each alone is too small for all of it, and the gap does not fit beside what one of them holds."""
    work = work_of(CHAIN, batch=8, microbatches=8)
    roomy = plan(work, equal_machines(1)).forecast.memory_bytes["p0"]
    machines = [Machine("p0", 1e9, int(roomy * 0.45), 1e9, 1e-4, "h"), Machine("p1", 1e9, roomy * 2, 1e9, 1e-4, "h")]
    keep = {**{f"n{i}": "p0" for i in range(3)}, **{f"n{i}": "p9" for i in range(3, 8)}}
    found, notes = place_again(work, machines, keep=keep)
    assert set(found.placement.values()) <= {"p0", "p1"}
    assert notes in ([], ["what is on p0 can't stay there: all VNodes are placed anew"])
