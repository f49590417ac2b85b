"""The simulated world: it repeats itself exactly, its calm runs are the truth's, and each kind of fault is survived."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.sim.checker import check
from tests.sim.client import Interruption
from tests.sim.drawing import alone, draw
from tests.sim.history import Computed, Delivered, Fault, History, Process, Told
from tests.sim.nets import SHAPES
from tests.sim.network import Loss
from tests.sim.plan import KINDS, Plan, Planned, calm
from tests.sim.world import run
from wire.messages import all_messages
from wire.sim import Hints

SEEDS = 3
"""Of each kind of fault."""
BASE = int(os.environ.get("DCNR_SIM_BASE", "0"))
"""Another one gives other schedules."""


def judged(plan: Plan, seed: int) -> History:
    """The history of a plan, which must be without fault."""
    history = run(seed, plan=plan)
    breaches = check(history)
    assert not breaches, f"seed {seed}\n{plan.text()}\n" + "\n".join(map(str, breaches[:3]))
    assert not history.errors
    return history


# ------------------------------------------------------------------------------------------------ the world itself


def test_equal_seeds_give_equal_histories_in_any_process() -> None:
    """Whatever Python's own hashes are."""
    program = (
        "from tests.sim.world import run; from tests.sim.record import digest_of_history\n"
        "for seed in range(6): print(seed, digest_of_history(run(seed)))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": number}, check=True,
            capture_output=True, text=True, timeout=120,
        ).stdout
        for number in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len({line.split()[1] for line in found[0].splitlines()}) == 6


@pytest.mark.parametrize("network", sorted(SHAPES))
@pytest.mark.parametrize("seed", range(3))
def test_a_calm_run_is_the_truth(network: str, seed: int) -> None:
    history = judged(calm(seed, network), seed)
    assert history.end_s < 60
    applied = Counter(vnode for e in history.events if isinstance(e, Computed) for vnode in e.weights)
    assert set(applied.values()) == {history.steps}
    assert not any(isinstance(e, Fault) for e in history.events)


def test_a_run_that_is_paused_and_stopped_is_the_truth() -> None:
    interruptions = (Interruption(2, "pause", 3.0), Interruption(4, "stop", 2.0), Interruption(6, "pause", 0.1))
    history = judged(replace(calm(1, "tied"), interruptions=interruptions), 1)
    states = [e.state for e in history.events if isinstance(e, Told) and e.what == "state"]
    assert "stopped" in states
    assert states[-1] == "finished"


def test_the_killed_do_nothing_any_more() -> None:
    plan = alone("kill_pnode", 1, "chain")
    history = run(1, plan=plan)
    over: dict[tuple[str, int], float] = {}
    seen = 0
    for event in history.events:
        match event:
            case Process(t, who, boot, "kill"):
                over[who, boot] = t
            case Delivered(dst=who, dst_boot=boot) | Computed(pnode=who, boot=boot):
                assert (who, boot) not in over
                seen += 1
    assert over
    assert seen > 100


def test_drawn_plans_hold_every_kind_of_fault() -> None:
    kinds = Counter(fault.kind for seed in range(300) for fault in draw(seed).faults)
    assert set(kinds) == set(KINDS)
    assert sum(kinds.values()) > 300 * 6


# ------------------------------------------------------------------------------------------------ each fault


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_of_fault_is_survived(kind: str, seed: int) -> None:
    judged(alone(kind, seed), seed)


# ------------------------------------------------------------------------------------------------ B28

NEVER = {
    "infer_input", "infer_hop", "infer_output", "infer_failed", "infer_end", "ask_cluster", "list_networks",
    "list_sessions", "plan_network", "ask_deployment", "inspect_session", "remove_network", "collect_garbage",
    "shut_down", "rebalance",
}  # fmt: skip
"""Messages that no run of the world sends: questions of people, and inference."""
OF_TROUBLE = {
    "inspect_run": "InspectRun", "refused": "Refused", "report_now": "ReportNow", "run_failed": "RunFailed",
}  # fmt: skip
"""Those that a run sends only where something else goes wrong, or is looked into, and their classes."""


def everything(seed: int, loss: Loss) -> Plan:
    """A run in which every other message is sent: a tied network, a pause, a PNode that ends, one that is killed."""
    plan = alone("kill_pnode", seed, "tied")
    stop = alone("stop_pnode", seed, "tied").faults[:1]
    placement = {"tok": "p1", "norm": "p2", "up": "p2", "act": "p1", "down": "p3", "head": "p3", "loss": "p2"}
    return replace(
        plan, pnodes=3, spares=0, members=0, placement=placement, faults=(plan.faults[0], *stop), losses=(loss,),
        interruptions=(Interruption(2, "pause", 1.0),), slowness=(1.0, 1.0, 1.0), healed_s=60.0,
    )  # fmt: skip


def trouble(seed: int, *losses: Loss) -> Plan:
    """A run in which those of trouble are sent several times: connections close, compute threads die, one is killed."""
    faults = (
        Planned("false_hint", 3.0, "p1", amount=1.0),
        Planned("false_hint", 4.5, "p3", amount=1.0),
        Planned("compute_death", 5.0, "p3", seconds=3.0, amount=1.0),
        Planned("compute_death", 12.0, "p1", seconds=3.0, amount=1.0),
        Planned("kill_pnode", 18.0, "p2", seconds=2.0),
        Planned("false_hint", 24.0, "p3", amount=1.0),
    )
    return replace(
        everything(seed, Loss("none")), faults=faults, losses=losses, interruptions=(), hints=Hints(1.0, 0.05),
        compute_s=0.3,
    )  # fmt: skip


def survives(history: History, loss: Loss) -> None:
    """One message was lost, and that is all that can be seen of it."""
    lost = [e for e in history.events if isinstance(e, Fault) and e.kind.endswith(f"_{loss.kind}")]
    assert len(lost) == (loss.kind not in NEVER)
    breaches = [b for b in check(history) if not (loss.deep and b.invariant == "the run finishes")]
    assert not breaches, "\n".join(map(str, breaches[:3]))
    assert history.ended == "finished"
    assert history.end_s < 60 + (2 * 900 if loss.deep else 60)


@pytest.mark.parametrize("deep", [False, True], ids=["line", "receiver"])
@pytest.mark.parametrize("tag", sorted(set(all_messages()) - set(OF_TROUBLE)))
def test_any_one_message_may_be_lost(tag: str, deep: bool) -> None:
    """Lost on the line it is sent again at once; lost behind the link, it is asked again or its wait ends."""
    loss = Loss(tag, deep=deep)
    survives(run(3, plan=everything(3, loss)), loss)


@cache
def seen_in_trouble(seed: int) -> Counter[str]:
    """How often each message is handed over if none is lost."""
    history = judged(trouble(seed), seed)
    return Counter(e.kind for e in history.events if isinstance(e, Delivered))


@pytest.mark.parametrize("deep", [False, True], ids=["line", "receiver"])
@pytest.mark.parametrize("tag", OF_TROUBLE)
def test_any_one_message_of_trouble_may_be_lost(tag: str, deep: bool) -> None:
    """The first of its kind, or a later one: each in a run of its own."""
    seed = 3 + BASE
    count = seen_in_trouble(seed)[OF_TROUBLE[tag]]
    print(f"DCNR_SIM_BASE={BASE}: {count} {OF_TROUBLE[tag]}")
    assert count > 1
    for earlier in range(count):
        loss = Loss(tag, skip=earlier, deep=deep)
        survives(run(seed, plan=trouble(seed, loss)), loss)


# ------------------------------------------------------------------------------------------------ hints


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_connections_that_only_close_cost_no_pnode(seed: int) -> None:
    """Whoever is suspected answers: nobody is lost, and no step is made again."""
    hints = tuple(Planned("false_hint", at, where, amount=1.0) for at, where in ((2.0, "p1"), (2.5, "p2"), (5.0, "p1")))
    plan = replace(calm(BASE + seed), faults=hints, interruptions=(), until=0, compute_s=0.3, healed_s=60.0)
    history = judged(plan, BASE + seed)
    assert "member alive>suspect" in history.visited
    assert not [move for move in history.visited if move.startswith("member ") and move.endswith((">lost", ">gone"))]
    assert "session running>recovering" not in history.visited


def test_a_closed_connection_shows_a_death_long_before_the_lease_is_over() -> None:
    """And without the hint it takes the lease."""
    found = {}
    for hints in (Hints(), Hints(1.0, 0.05)):
        kill = Planned("kill_pnode", 3.0, "p2", seconds=40.0)
        plan = replace(everything(3, Loss("none")), faults=(kill,), losses=(), interruptions=(), hints=hints)
        history = judged(plan, 3)
        killed = next(e.t for e in history.events if isinstance(e, Process) and e.what == "kill")
        prepared = next(
            e.t for e in history.events if isinstance(e, Delivered) and e.kind == "Prepare" and e.t > killed
        )
        found[hints.chance] = prepared - killed
    assert 10.0 < found[0.0] < 15.0
    assert found[1.0] < 5.0
