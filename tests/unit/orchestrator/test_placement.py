"""The planner against an independent brute force, its limits, its speed, and what it says."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from orchestrator.greedy import Greedy
from orchestrator.placement import (
    NothingFitsError,
    Plan,
    check_placement,
    hand_placed,
    plan,
    random_placement,
    round_robin,
)
from orchestrator.predict import forecast, wire_bytes
from orchestrator.rebalance import compare
from orchestrator.work import Machine, Work, work_of
from tests.unit.orchestrator.graphs import (
    equal_machines,
    make_graph,
    random_graph,
    random_machines,
    transformer_like,
)
from wire.errors import UsageError


def piece_cost(work: Work, start: int, end: int, machine: Machine, in_flight: int) -> tuple[float, int]:
    """Seconds and bytes in of the nodes [start, end) on `machine`, straight from the definition; inf if not allowed."""
    inside = range(start, end)
    need = 0
    seconds = 0.0
    for node in inside:
        if work.pins[node] not in (None, machine.id):
            return math.inf, 0
        need += work.static_bytes[node] + in_flight * work.stash_bytes[node]
        seconds += (work.forward[node] + work.backward[node] + work.update[node]) / machine.speed
        seconds += 2 * work.microbatches * work.calibration.node_s + work.tensors[node] * work.calibration.tensor_s
    into = out = hops = 0
    for value in work.values:
        if value.maker < start and any(start <= reader < end for reader in value.readers):
            into += value.step_bytes
            hops += value.step_hops
            need += value.held_bytes
        if start <= value.maker < end and any(reader >= end for reader in value.readers):
            out += value.step_bytes
            hops += value.step_hops
    if need > machine.memory_bytes:
        return math.inf, 0
    seconds += (into + out) / machine.link_bytes_s + hops * work.calibration.hop_busy_s
    seconds += 2 * work.microbatches * machine.latency_s if into else 0.0
    return seconds, into


def brute_force(work: Work, machines: list[Machine], exactly: int) -> tuple[float, int] | None:
    """The best (time, bytes) by trying all numbers, orders and cuts."""
    in_flight = min(work.microbatches, (exactly or len(machines)) + 1)
    table = {
        (start, end, machine.id): piece_cost(work, start, end, machine, in_flight)
        for start in range(work.size)
        for end in range(start + 1, work.size + 1)
        for machine in machines
    }
    all_found: list[tuple[float, int]] = []
    for count in [exactly] if exactly else range(1, len(machines) + 1):
        for order in itertools.permutations(machines, count):
            for inner in itertools.combinations(range(1, work.size), count - 1):
                ends = (0, *inner, work.size)
                costs = [table[ends[place], ends[place + 1], order[place].id] for place in range(count)]
                time_s = max(cost[0] for cost in costs) * (work.microbatches + count - 1) / work.microbatches
                if not math.isinf(time_s):
                    all_found.append((time_s, sum(cost[1] for cost in costs)))
    if not all_found:
        return None
    fastest = min(found[0] for found in all_found)
    return fastest, min(found[1] for found in all_found if found[0] <= fastest * (1 + 1e-9))


@pytest.mark.parametrize("block", range(12))
def test_equals_brute_force_on_240_random_cases(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        source = random.Random(seed)
        count = source.randint(1, 5)
        machines = random_machines(source, count, tight=source.random() < 0.3)
        if source.random() < 0.3:
            machines = equal_machines(count, speed=2e9)
        graph = random_graph(source, source.randint(2, 8), pnodes=[machine.id for machine in machines])
        work = work_of(graph, batch=source.choice([4, 16]), microbatches=source.choice([1, 2, 4, 16]))
        exactly = source.choice([0, 0, min(count, work.size)])
        expected = brute_force(work, machines, exactly)
        if expected is None:
            with_pins = any(pin is not None for pin in work.pins)
            try:
                assert not plan(work, machines, pnodes=exactly).exact, seed
                assert with_pins, seed
            except NothingFitsError:
                pass
            continue
        bound = Greedy(work, machines, 4).lower_bound_s(exactly)
        assert bound <= expected[0] * (1 + 1e-9), seed
        result = plan(work, machines, pnodes=exactly)
        rival = round_robin(work, machines, exactly)
        if wire_bytes(rival, work) < expected[1] and (not exactly or len(set(rival.values())) == exactly):
            assert wire_bytes(result.placement, work) <= wire_bytes(rival, work)
            continue
        assert result.exact, seed
        assert result.time_s == pytest.approx(expected[0], rel=1e-9), seed
        assert segment_bytes(work, result) == expected[1], seed
        if exactly:
            assert len(set(result.placement.values())) == exactly


def segment_bytes(work: Work, result: Plan) -> int:
    """Bytes in over all machines of a contiguous placement."""
    place = [result.placement[node] for node in work.nodes]
    return sum(
        value.step_bytes * len({place[reader] for reader in value.readers} - {place[value.maker]})
        for value in work.values
    )


def test_the_brute_force_notices_a_worse_plan() -> None:
    source = random.Random(3)
    machines = random_machines(source, 3)
    work = work_of(random_graph(source, 7), batch=8, microbatches=4)
    best = brute_force(work, machines, 0)
    assert best is not None
    one = sum(piece_cost(work, 0, 7, machines[0], 4)[:1])
    assert best[0] <= one


@pytest.mark.parametrize("seed", range(60))
def test_never_more_bytes_than_round_robin(seed: int) -> None:
    source = random.Random(1000 + seed)
    machines = random_machines(source, source.randint(2, 6))
    work = work_of(random_graph(source, source.randint(6, 24)), batch=8, microbatches=4)
    for exactly in (0, len(machines)):
        result = plan(work, machines, pnodes=exactly)
        assert wire_bytes(result.placement, work) <= wire_bytes(round_robin(work, machines, exactly), work)


def test_two_interleaved_chains_do_not_cost_more_than_round_robin() -> None:
    """Round-robin puts each chain on a machine of its own and sends nothing but the join."""
    reads = [[-1], [-1], *([i - 2] for i in range(2, 10)), [8, 9]]
    work = work_of(make_graph([64] * 11, reads, parameters=[1000] * 11), batch=8, microbatches=4)
    machines = equal_machines(2, speed=1e8)
    rival = wire_bytes(round_robin(work, machines), work)
    assert rival == 8 * 64 * 4 * 2
    for exactly in (0, 2):
        assert wire_bytes(plan(work, machines, pnodes=exactly).placement, work) <= rival


def test_ten_thousand_vnodes_on_a_hundred_pnodes_in_five_seconds() -> None:
    work = work_of(transformer_like(1250), batch=16, microbatches=64)
    assert work.size == 10_001
    machines = [Machine(f"p{i}", 1e10 * (1 + i % 5), 1 << 34, 1e8 * (1 + i % 3), 1e-3, f"h{i}") for i in range(100)]
    begin = time.process_time()
    result = plan(work, machines)
    took = time.process_time() - begin
    assert took < 5, took
    assert not result.exact
    assert len(result.placement) == work.size
    assert any("above the best possible" in reason for reason in result.reasons)
    assert result.gap < 1.0
    assert wire_bytes(result.placement, work) <= wire_bytes(round_robin(work, machines), work)


def test_ten_thousand_vnodes_on_eight_unequal_pnodes_stay_quick() -> None:
    work = work_of(transformer_like(1250), batch=16, microbatches=64)
    machines = random_machines(random.Random(5), 8)
    begin = time.process_time()
    result = plan(work, machines)
    assert time.process_time() - begin < 10
    assert any("above the best possible" in reason for reason in result.reasons)


def test_the_heuristic_is_close_to_the_exact_search() -> None:
    """Stated gaps hold: the heuristic's time is at most the stated share above the exact one."""
    for seed in range(12):
        source = random.Random(seed)
        machines = [Machine(f"p{i}", source.choice([1e10, 2e10, 4e10]), 1 << 34, 1e9, 1e-4, "h") for i in range(8)]
        work = work_of(transformer_like(12), batch=16, microbatches=16)
        exact = plan(work, machines)
        nine = plan(work_of(transformer_like(12), batch=16, microbatches=16), [*machines, *equal_machines(0)])
        guess = Greedy(work, machines, 9).run()
        assert guess is not None
        bound = Greedy(work, machines, 9).lower_bound_s()
        assert bound <= exact.time_s * (1 + 1e-9)
        assert exact.time_s <= guess[0] * (1 + 1e-6)
        assert guess[0] <= exact.time_s * 1.35
        assert nine.time_s == exact.time_s


def test_forces_the_number_of_machines() -> None:
    work = work_of(transformer_like(4), batch=12, microbatches=4)
    machines = equal_machines(5)
    for count in (1, 2, 3, 5):
        assert len(set(plan(work, machines, pnodes=count).placement.values())) == count


def test_one_microbatch_gains_nothing_from_a_pipeline() -> None:
    work = work_of(transformer_like(4), batch=12, microbatches=1)
    assert len(set(plan(work, equal_machines(3)).placement.values())) == 1


def test_a_slow_link_leaves_machines_idle() -> None:
    work = work_of(transformer_like(4), batch=12, microbatches=4)
    machines = [Machine(f"p{i}", 2e10, 1 << 34, 1e4, 0.05, f"h{i}") for i in range(3)]
    result = plan(work, machines)
    assert len(set(result.placement.values())) == 1
    assert any("stay idle" in reason for reason in result.reasons)


def test_keeps_pins() -> None:
    graph = make_graph([64] * 8, [[-1], *([i] for i in range(7))], parameters=[5000] * 8, pins={7: "p0", 6: "p0"})
    work = work_of(graph, batch=8, microbatches=8)
    result = plan(work, equal_machines(3, speed=1e8), pnodes=3)
    assert result.exact
    assert result.placement["n7"] == result.placement["n6"] == "p0"


def test_pins_at_both_ends_are_kept_though_no_contiguous_placement_can() -> None:
    graph = make_graph(
        [64] * 8, [[-1], *([i] for i in range(7))], parameters=[5000] * 8, pins={0: "p0", 4: "p1", 7: "p0"}
    )
    work = work_of(graph, batch=8, microbatches=8)
    result = plan(work, equal_machines(3, speed=1e8))
    assert (result.placement["n0"], result.placement["n4"], result.placement["n7"]) == ("p0", "p1", "p0")
    assert any("pin" in reason for reason in result.reasons)


def test_a_pin_to_a_machine_that_is_not_there() -> None:
    graph = make_graph([4] * 2, [[-1], [0]], pins={1: "gpu-box"})
    with pytest.raises(UsageError, match="'n1' is pinned to 'gpu-box', which is not alive"):
        plan(work_of(graph, batch=4, microbatches=1), equal_machines(2))


def test_memory_is_a_hard_limit_and_says_who_lacks_what() -> None:
    graph = make_graph([4] * 3, [[-1], [0], [1]], parameters=[1000, 1_000_000, 1000])
    work = work_of(graph, batch=4, microbatches=1)
    small = [Machine(f"p{i}", 1e9, 2_000_000, 1e9, 0.0) for i in range(3)]
    with pytest.raises(NothingFitsError, match=r"'n1' needs 16\.0 MB, and p0, the largest PNode, has 2\.0 MB"):
        plan(work, small)
    one_large = [*small, Machine("big", 1e6, 20_000_000, 1e9, 0.0)]
    result = plan(work, one_large)
    assert result.placement["n1"] == "big"
    with pytest.raises(NothingFitsError, match=r"p1 lacks 14\.0 MB"):
        hand_placed(work, small, {"n0": "p0", "n1": "p1"})


def test_memory_in_all_is_too_small() -> None:
    graph = make_graph([4] * 4, [[-1], [0], [1], [2]], parameters=[100_000] * 4)
    work = work_of(graph, batch=4, microbatches=1)
    with pytest.raises(NothingFitsError, match=r"needs 6\.4 MB in all .* are lacking"):
        plan(work, [Machine(f"p{i}", 1e9, 1_700_000, 1e9, 0.0) for i in range(2)])


def test_no_machine_and_too_many() -> None:
    work = work_of(make_graph([4] * 2, [[-1], [0]]), batch=4, microbatches=1)
    with pytest.raises(UsageError, match="no living PNode"):
        plan(work, [])
    with pytest.raises(UsageError, match="3 PNodes were asked for, but 2 are alive"):
        plan(work, equal_machines(2), pnodes=3)
    with pytest.raises(UsageError, match="has only 2 VNodes"):
        plan(work, equal_machines(4), pnodes=3)


def test_placements_by_hand_are_checked_and_completed() -> None:
    work = work_of(make_graph([4] * 4, [[-1], [0], [1], [2]]), batch=4, microbatches=1)
    machines = equal_machines(2)
    whole = check_placement(work, machines, {"n0": "p0", "n2": "p1"})
    assert list(whole.values()) == ["p0", "p0", "p1", "p1"]
    with pytest.raises(UsageError, match="names the VNode 'nope'"):
        check_placement(work, machines, {"nope": "p0"})
    with pytest.raises(UsageError, match="puts 'n0' on 'p9'"):
        check_placement(work, machines, {"n0": "p9"})


def test_the_reasons_can_follow_the_word_because() -> None:
    work = work_of(transformer_like(4), batch=12, microbatches=4)
    machines = [Machine(f"p{i}", 2e10, 1 << 34, 1e4, 0.05, f"h{i}") for i in range(2)]
    best = plan(work, machines)
    assert best.reasons[0] == "no contiguous placement on these PNodes is faster (the search was exact)"
    (used,) = set(best.placement.values())
    (idle,) = {"p0", "p1"} - {used}
    assert f"{idle} stays idle: with it a step would not be faster" in best.reasons
    spread = {str(node): f"p{place % 2}" for place, node in enumerate(work.nodes)}
    by_hand = hand_placed(work, machines, spread)
    assert by_hand.reasons[0] == "it was placed by hand"
    assert any("go over the wire per step" in reason for reason in by_hand.reasons)
    compared = compare(work, machines, spread)
    assert compared.present.reasons[0] == "the VNodes are there now"
    assert compared.best.reasons == best.reasons


def test_random_placements_use_every_machine_and_depend_on_the_seed_alone() -> None:
    work = work_of(transformer_like(3), batch=4, microbatches=2)
    machines = equal_machines(5)
    drawn = [random_placement(work, machines, seed) for seed in range(20)]
    assert all(set(one.values()) == {machine.id for machine in machines} for one in drawn)
    assert drawn[4] == random_placement(work, machines, 4)
    assert len({tuple(one.values()) for one in drawn}) == 20


class TestForecast:
    """The played-through step against what arithmetic says."""

    def work(self, microbatches: int, nodes: int = 4) -> Work:
        graph = make_graph([1] * nodes, [[-1], *([i] for i in range(nodes - 1))], parameters=[1] * nodes,
                           flops=[1_000_000] * nodes)  # fmt: skip
        return work_of(graph, batch=microbatches, microbatches=microbatches)

    def test_one_machine_is_the_sum(self) -> None:
        work = self.work(4)
        result = forecast(dict.fromkeys(work.nodes, "p0"), work, equal_machines(1, speed=1e9))
        assert result.makespan_s == pytest.approx(4 * 4 * 3e-3, rel=0.1)
        assert result.wire_bytes == {}

    @pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
    def test_equal_stages_take_m_plus_p_minus_1(self, microbatches: int) -> None:
        work = self.work(microbatches)
        machines = [Machine(f"p{i}", 1e9, 1 << 34, 1e12, 0.0, f"h{i}") for i in range(4)]
        placement = {node: f"p{i}" for i, node in enumerate(work.nodes)}
        result = forecast(placement, work, machines)
        assert result.makespan_s == pytest.approx((microbatches + 3) * 3e-3, rel=0.25)
        assert result.levels == 4

    def test_a_slow_wire_bounds_the_step(self) -> None:
        work = self.work(8, nodes=2)
        fast = [Machine(f"p{i}", 1e9, 1 << 34, 1e12, 0.0, f"h{i}") for i in range(2)]
        slow = [Machine(f"p{i}", 1e9, 1 << 34, 400.0, 0.0, f"h{i}") for i in range(2)]
        placement = {"n0": "p0", "n1": "p1"}
        quick = forecast(placement, work, fast).step_s
        late = forecast(placement, work, slow).step_s
        assert late > 8 * 4 / 400.0 > 2 * quick

    def test_two_pnodes_on_one_core_take_turns(self) -> None:
        work = self.work(8)
        machines = equal_machines(2, speed=1e9)
        placement = {node: f"p{i // 2}" for i, node in enumerate(work.nodes)}
        free = forecast(placement, work, machines).makespan_s
        shared = forecast(placement, work, machines, cores={"h": 1}).makespan_s
        assert shared == pytest.approx(8 * 4 * 3e-3, rel=0.1)
        assert free < 0.65 * shared

    def test_any_placement_can_be_played(self) -> None:
        work = work_of(transformer_like(3), batch=12, microbatches=4)
        machines = equal_machines(3)
        for seed in range(10):
            placement = random_placement(work, machines, seed)
            result = forecast(placement, work, machines)
            assert result.step_s > 0
            assert result.total_wire_bytes == wire_bytes(placement, work)

    def test_a_tie_across_machines_costs_its_gradient_and_version(self) -> None:
        graph = make_graph([4] * 2, [[-1], [0]], parameters=[1000, 0], ties={1: 0})
        work = work_of(graph, batch=4, microbatches=2)
        result = forecast({"n0": "p0", "n1": "p1"}, work, equal_machines(2))
        assert result.wire_bytes["p1", "p0"] == 4000 + 4 * 4 * 4
        assert result.wire_bytes["p0", "p1"] == 4000 + 4 * 4 * 4
        assert result.memory_bytes["p1"] > 8000
