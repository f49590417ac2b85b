"""The simulated world: it repeats itself exactly, its calm runs are the truth's, and each kind of fault is survived."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from tests.sim.checker import check
from tests.sim.client import Interruption
from tests.sim.drawing import alone, draw
from tests.sim.history import Computed, Delivered, Fault, History, Process, Told
from tests.sim.nets import SHAPES
from tests.sim.network import Loss
from tests.sim.plan import KINDS, Plan, calm
from tests.sim.world import run
from wire.messages import all_messages

SEEDS = 3
"""Of each kind of fault."""


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
    "list_sessions", "plan_network", "ask_deployment", "inspect_session", "inspect_run", "remove_network",
    "collect_garbage", "shut_down", "rebalance",
}  # fmt: skip
"""Messages that no run of the world sends: questions of people, and inference."""
RARE = {"inspect_run", "refused", "report_now", "run_failed"}
"""Those that a run sends only where something else goes wrong, or is looked into."""


def everything(seed: int, loss: Loss) -> Plan:
    """A run in which every other message is sent: a tied network, a pause, a PNode that ends, one that is killed."""
    plan = alone("kill_pnode", seed, "tied")
    stop = alone("stop_pnode", seed, "tied").faults[:1]
    placement = {"tok": "p1", "norm": "p2", "up": "p2", "act": "p1", "down": "p3", "head": "p3", "loss": "p2"}
    return replace(
        plan, pnodes=3, spares=0, members=0, placement=placement, faults=(plan.faults[0], *stop), losses=(loss,),
        interruptions=(Interruption(2, "pause", 1.0),), slowness=(1.0, 1.0, 1.0), healed_s=60.0,
    )  # fmt: skip


@pytest.mark.parametrize("deep", [False, True], ids=["line", "receiver"])
@pytest.mark.parametrize("tag", all_messages())
def test_any_one_message_may_be_lost(tag: str, deep: bool) -> None:
    """Lost on the line it is sent again at once; lost behind the link, it is asked again or its wait ends."""
    history = run(3, plan=everything(3, Loss(tag, deep=deep)))
    lost = [e for e in history.events if isinstance(e, Fault) and e.kind.endswith(f"_{tag}")]
    assert len(lost) <= 1 if tag in RARE else len(lost) == (tag not in NEVER)
    breaches = [b for b in check(history) if not (deep and b.invariant == "the run finishes")]
    assert not breaches, "\n".join(map(str, breaches[:3]))
    assert history.ended == "finished"
    assert history.end_s < 60 + (2 * 900 if deep else 60)
