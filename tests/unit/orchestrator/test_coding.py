"""Which edges are coded: what the file says, and what `auto` makes of link, round trip and compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from networks.codecs import CodedGroup
from networks.graph import Graph, NodeId
from networks.stages import cut_stages
from orchestrator import events
from orchestrator.coding import Traffic, choose, coded_groups
from orchestrator.placement import hand_placed, plan
from orchestrator.predict import forecast, wire_bytes
from orchestrator.rebalance import compare
from orchestrator.repair import place_again
from orchestrator.work import Machine, Work, work_of
from tests.unit.orchestrator.graphs import make_graph
from tests.unit.orchestrator.story import Story
from wire.messages import CodedEdges

MB = 1e6


def traffic(size: float, rate: float, round_trip_s: float = 0.0, compute_s: float = 0.1) -> Traffic:
    return Traffic({"none": size, "bf16": size / 2, "int8": size / 4}, rate, round_trip_s, compute_s)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (traffic(1 * MB, 1000 * MB), "none"),  # 1 ms beside 100: hidden
        (traffic(1 * MB, 20 * MB), "none"),  # 50 ms beside 100: just hidden
        (traffic(1 * MB, 12 * MB), "bf16"),  # 83 ms; 42 with bf16
        (traffic(1 * MB, 6 * MB), "int8"),  # 167 ms; 83 with bf16, 42 with int8
        (traffic(1 * MB, 1 * MB), "int8"),  # nothing hides it: the smallest
        (traffic(1 * MB, 12 * MB, round_trip_s=2.0), "none"),  # 42 ms of 2.1 s: not worth it
        (traffic(1 * MB, 1 * MB, round_trip_s=2.0), "int8"),
        (traffic(1 * MB, 4000 * MB, compute_s=1e-6), "none"),  # coding takes longer than sending
        (traffic(0, 1 * MB), "none"),
    ],
)
def test_auto_by_link_round_trip_and_compute(given: Traffic, expected: str) -> None:
    assert choose(given) == expected


def chain(codec: str) -> Work:
    graph = make_graph([64] * 6, [[-1], *([i] for i in range(5))], parameters=[1000] * 6, flops=[10**6] * 6)
    return work_of(graph, batch=16, microbatches=4, codec=codec)


def machines(rate: float, latency_s: float = 1e-4, speed: float = 1e9) -> list[Machine]:
    return [Machine(f"p{i}", speed, 10**9, rate, latency_s) for i in range(2)]


HALVES = {f"n{i}": f"p{i // 3}" for i in range(6)}


def test_a_forecast_takes_coded_bytes() -> None:
    sizes = {}
    for codec in ("none", "bf16", "int8"):
        work = chain(codec)
        found = forecast({NodeId(k): v for k, v in HALVES.items()}, work, machines(1 * MB))
        sizes[codec] = found.wire_bytes["p0", "p1"]
        assert found.wire_bytes["p1", "p0"] == sizes[codec]
        assert found.total_wire_bytes == wire_bytes({NodeId(k): v for k, v in HALVES.items()}, work)
        assert [group.codec for group in found.coded] == ([codec] if codec != "none" else [])
    assert sizes == {"none": 16 * 64 * 4, "bf16": 16 * 64 * 2, "int8": 16 * (64 + 4)}


def test_the_step_is_faster_with_less_on_a_slow_wire() -> None:
    times = [
        hand_placed(chain(codec), machines(0.002 * MB), HALVES).forecast.step_s for codec in ("none", "bf16", "int8")
    ]
    assert times[0] > 1.5 * times[1]
    assert times[1] > 1.5 * times[2]


def test_auto_chooses_by_measured_link_and_says_why() -> None:
    fast = hand_placed(chain("auto"), machines(10_000 * MB), HALVES)
    assert fast.forecast.coded == ()
    assert any("p0 <-> p1 goes without codec" in reason and "hidden" in reason for reason in fast.reasons)
    slow = hand_placed(chain("auto"), machines(0.002 * MB), HALVES)
    assert slow.forecast.coded == (CodedGroup("int8", (3,)),)
    assert any("p0 <-> p1 is coded by int8" in reason and "0.016 Mbit/s" in reason for reason in slow.reasons)
    assert any("rounded (int8 on 1 edge), so the run does not equal" in reason for reason in slow.reasons)


def test_the_planner_counts_on_codecs_when_it_searches() -> None:
    """With raw bytes one PNode is best; with coded ones two are."""
    graph = make_graph([4096] * 4, [[-1], [0], [1], [2]], parameters=[10] * 4, flops=[4 * 10**7] * 4)
    both = machines(0.1 * MB)  # a step of 7.7 s alone; on two 3.8 s each, and 5.2 s of wire raw, 1.3 s with int8

    def used(codec: str) -> int:
        work = work_of(graph, batch=16, microbatches=8, codec=codec)
        return len(set(plan(work, both).placement.values()))

    assert used("none") == 1
    assert used("int8") == 2
    assert used("auto") == 2


def test_edges_may_differ_from_the_recipe() -> None:
    work = chain("int8")
    graph: Graph = replace(
        work.graph,
        edges=tuple(replace(edge, codec="none" if edge.dst.node == "n3" else "") for edge in work.graph.edges),
    )
    work = work_of(graph, batch=16, microbatches=4, codec="int8")
    placement = {NodeId(k): v for k, v in {**HALVES, "n5": "p0"}.items()}
    groups, _ = coded_groups(work, placement, machines(MB))
    assert [(group.codec, [str(graph.edges[edge].dst.node) for edge in group.edges]) for group in groups] == [
        ("int8", ["n5"])
    ]


def test_a_run_keeps_its_groups_wherever_it_goes() -> None:
    work = replace(chain("auto"), coded=(CodedGroup("int8", (3,)),))
    moved, _ = place_again(work, machines(10_000 * MB)[:1], keep=HALVES)
    assert moved.forecast.coded == (CodedGroup("int8", (3,)),)
    assert moved.forecast.total_wire_bytes == 0
    assert all(not channel.codec for channel in cut_stages(work.graph, moved.placement, moved.forecast.coded).channels)


def test_a_comparison_sees_the_present_with_its_codecs() -> None:
    work = chain("int8")
    here = {f"n{i}": f"p{i // 3}" for i in range(6)}
    found = compare(work, machines(0.1 * MB), here, coded=())
    assert found.present.forecast.total_wire_bytes == 2 * 16 * 64 * 4


# ------------------------------------------------------------ in a session

PLACED = {"a": "p1", "loss": "p2"}
INT8, BF16 = CodedEdges("int8", [3]), CodedEdges("bf16", [3])


def placed(start_step: int, *codecs: CodedEdges) -> events.Placed:
    return events.Placed(PLACED, {"p1": 1, "p2": 4}, "p2", start_step, codecs=codecs)


def test_the_first_placement_decides_and_the_record_keeps_it() -> None:
    story = Story()
    story.act("start")
    story.feed(placed(0, INT8))
    assert story.session.record.codecs == [INT8]
    assert story.session.record.bit_exact == ""


@pytest.mark.parametrize(("step", "noted"), [(0, False), (7, True)])
def test_codecs_that_change_after_a_step_are_told(step: int, noted: bool) -> None:
    story = Story(codecs=[INT8], epoch=1)
    story.act("start", pnodes=2)
    story.feed(placed(step, BF16))
    assert story.session.record.codecs == [BF16]
    if noted:
        expected = (
            "not bit-exact: placed anew at step 7, codecs were chosen anew: int8 on 1 edge before, bf16 on 1 edge now"
        )
        assert story.session.record.bit_exact == expected
    else:
        assert story.session.record.bit_exact == ""


def test_the_same_codecs_after_a_recovery_are_no_news() -> None:
    story = Story(codecs=[INT8], epoch=1, state="paused")
    story.act("start")
    story.feed(placed(7, INT8))
    assert story.session.record.bit_exact == ""
