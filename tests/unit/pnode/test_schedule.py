from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from networks.stages import cut_stages
from pnode.flow import gradient_flow
from pnode.schedule import (
    Action,
    Kind,
    ScheduleError,
    format_grid,
    format_schedule,
    forward_only,
    in_flight,
    make_schedules,
    one_forward_one_backward,
    parse_schedule,
    prove,
    window,
)
from tests.unit.pnode.cluster import graph_of, liveness_of


def test_a_schedule_prints_as_data_and_reads_back() -> None:
    schedule = one_forward_one_backward(3, 2)
    assert format_schedule(schedule) == "F0 F1 B0 F2 B1 B2 U"
    assert parse_schedule("F0 F1 B0 F2 B1 B2 U") == schedule
    assert format_schedule(forward_only(2)) == "F0 F1 U"
    assert format_schedule(one_forward_one_backward(2, 1)) == "F0 B0 F1 B1 U"


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_schedule_reads_back_and_keeps_its_window(microbatches: int, wanted: int) -> None:
    size = min(microbatches, wanted)
    schedule = one_forward_one_backward(microbatches, size)
    assert parse_schedule(format_schedule(schedule)) == schedule
    assert in_flight(schedule) == size
    assert len(schedule) == 2 * microbatches + 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("F0 B0", "ends with U"),
        ("F0 B1 U", "entry 2: expected B0, got B1"),
        ("B0 F0 U", "entry 1: B0 comes before F0"),
        ("F0 F1 B0 U", "2 forwards but 1 backwards"),
        ("F0 U B0", "comes after U"),
        ("F0 X3 U", "entry 2 'X3'"),
        ("F01 U", "entry 1 'F01'"),
        ("", "ends with U"),
    ],
)
def test_a_bad_schedule_is_refused_where_it_is_bad(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        parse_schedule(text)


def test_windows_keep_one_more_in_flight_than_there_are_levels() -> None:
    assert [window(level, 3, 8) for level in range(3)] == [4, 3, 1]
    assert [window(level, 3, 2) for level in range(3)] == [2, 2, 1]
    assert window(0, 1, 8) == 1


def test_a_chain_over_three_pnodes_overlaps() -> None:
    graph = graph_of([("a", "b"), ("b", "c")], loss="c", trainable={"a", "b"})
    plan = cut_stages(graph, {"a": "p1", "b": "p2", "c": "p3"})  # type: ignore[dict-item]
    flow = gradient_flow(plan, *liveness_of(graph))
    grid = prove(plan, flow, make_schedules(plan, flow, 4))
    assert grid[0][:5] == ["F0", "F1", "F2", "F3", ""]
    assert grid[2][2:4] == ["F0", "B0"]
    assert "stage   1 | " in format_grid(grid)


def test_the_checker_shows_a_deadlock_with_its_grid() -> None:
    graph = graph_of([("a", "b")], loss="b", trainable={"a"})
    plan = cut_stages(graph, {"a": "p1", "b": "p2"})  # type: ignore[dict-item]
    flow = gradient_flow(plan, *liveness_of(graph))
    narrow = {0: one_forward_one_backward(3, 1), 1: one_forward_one_backward(3, 2)}
    with pytest.raises(ScheduleError, match=r"stage 0 on p1: B0 waits for B0 of stage 1\n.*stage 1 on p2: F1 waits"):
        prove(plan, flow, narrow)


def test_frozen_parts_and_unused_branches_run_forward_only() -> None:
    edges = [("frozen", "mid"), ("mid", "loss"), ("mid", "side")]
    graph = graph_of(edges, loss="loss", trainable={"mid", "side"})
    plan = cut_stages(graph, {"frozen": "p1", "mid": "p2", "loss": "p3", "side": "p4"})  # type: ignore[dict-item]
    flow = gradient_flow(plan, *liveness_of(graph))
    schedules = make_schedules(plan, flow, 2)
    names = {stage.nodes[0]: stage.index for stage in plan.stages}
    assert format_schedule(schedules[names["frozen"]]) == "F0 F1 U"  # type: ignore[index]
    assert format_schedule(schedules[names["side"]]) == "F0 F1 U"  # type: ignore[index]
    assert Action(Kind.BACKWARD, 0) in schedules[names["mid"]]  # type: ignore[index]
    assert {plan.channels[c].port.node for c in flow.channels} == {"mid"}
    prove(plan, flow, schedules)


@given(st.integers(0, 10_000))
def test_random_graphs_and_placements_never_deadlock(seed: int) -> None:
    pick = random.Random(seed)
    count, pnodes = pick.randint(2, 12), pick.randint(1, 5)
    names = [f"n{i}" for i in range(count)]
    edges = [(names[pick.randrange(i)], names[i]) for i in range(1, count) for _ in range(pick.randint(1, 3))]
    graph = graph_of(edges, loss=names[-1], trainable={n for n in names if pick.random() < 0.6}, order=names)
    plan = cut_stages(graph, {node.id: f"p{pick.randrange(pnodes)}" for node in graph.nodes})
    flow = gradient_flow(plan, *liveness_of(graph))
    microbatches = pick.randint(1, 6)
    prove(plan, flow, make_schedules(plan, flow, microbatches))
    sizes = [window(stage.level, plan.levels, microbatches) for stage in plan.stages]
    assert all(sizes[channel.src] >= sizes[channel.dst] for channel in plan.channels)
