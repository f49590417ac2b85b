"""Draws the plan of a run from its seed."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.sim.nets import SHAPES
from tests.sim.plan import KINDS, Plan, Planned, calm

SEEN = (
    "Delivered Prepare", "Delivered StartRun", "Delivered PartsSaved", "Delivered Verdict", "Delivered Committed",
    "Delivered RunHeld", "Delivered Register", "Delivered GradientReport", "Delivered Hop", "Delivered RunFailed",
    "Wrote networks", "parts/", "manifests/", "head.json", "registry/sessions", "registry/term",
    "registry/incarnations", "Computed", "Process kill", "Process start", "Process thaw",
)  # fmt: skip
"""What a fault may wait for."""

WEIGHTS: dict[str, float] = {
    "restart_pnode": 3, "kill_pnode": 3, "double": 2, "kill_orchestrator": 3, "wipe_orchestrator": 1.5,
    "pause_long": 2, "pause_short": 2, "partition": 2, "isolate": 1.5, "lose": 2, "second_orchestrator": 1.5,
    "kill_client": 0.7, "compute_hang": 0.7, "clock_jump": 0.7,
}  # fmt: skip
"""How often a kind comes; the others: 1."""


def draw(seed: int) -> Plan:
    """The plan of a seed: everything, its faults among it."""
    plan = calm(seed)
    pick = random.Random(f"schedule/{seed}")
    count = pick.randint(5, 12)
    kinds = pick.choices(KINDS, [WEIGHTS.get(kind, 1) for kind in KINDS], k=count)
    at, faults = pick.uniform(0.05, 1.5), []
    for kind in kinds:
        faults.append(planned(kind, at, plan, pick))
        at += pick.choice((pick.uniform(0.0, 0.3), pick.uniform(0.2, 2.0), pick.uniform(1.0, 6.0)))
    end = max([at, *(fault.at + fault.seconds for fault in faults)])
    return replace(plan, faults=tuple(faults), healed_s=end + 1.0)


def alone(kind: str, seed: int, network: str = "") -> Plan:
    """A run in which only one kind of fault happens, three times at most."""
    plan = calm(seed, network)
    pick = random.Random(f"alone/{kind}/{seed}")
    steps = SHAPES[plan.network].steps
    faults = tuple(planned(kind, 0.3 + pick.uniform(0.0, steps * 0.8), plan, pick) for _ in range(pick.randint(1, 3)))
    spares = max(plan.spares, 1) if kind == "join" else plan.spares
    end = max(fault.at + fault.seconds for fault in faults)
    return replace(plan, spares=spares, faults=faults, healed_s=end + 1.0)


def planned(kind: str, at: float, plan: Plan, pick: random.Random) -> Planned:
    """A fault of that kind, from that time on."""
    found = Planned(kind, at, _where(kind, plan, pick), "", _seconds(kind, pick), _amount(kind, pick))
    if pick.random() < 0.4:
        delay = pick.choice((0.0, 0.0, pick.uniform(0.0, 0.02), pick.uniform(0.0, 0.3)))
        where = "@" if kind != "lose" and pick.random() < 0.7 else found.where
        found = replace(found, on=pick.choice(SEEN), nth=pick.choice((1, 1, 1, 2, 3, 5)), delay=delay, where=where)
    return found


def _where(kind: str, plan: Plan, pick: random.Random) -> str:
    pnode = f"p{pick.randint(1, plan.pnodes)}"
    if kind.startswith("store_"):
        return pick.choice(("", "", "orchestrator", pnode))
    if "orchestrator" in kind or kind == "kill_client":
        return ""
    return pick.choice(("", pnode))


def _seconds(kind: str, pick: random.Random) -> float:
    short, long = pick.uniform(0.2, 4.0), pick.uniform(4.0, 30.0)
    match kind:
        case "pause_short" | "half_open" | "restart_pnode" | "kill_client":
            return pick.uniform(0.0, 8.0) if kind != "restart_pnode" else pick.uniform(0.0, 2.0)
        case "pause_long":
            return pick.uniform(10.0, 30.0)
        case "false_hint":
            return pick.choice((0.0, pick.uniform(0.0, 0.3), short))
        case "kill_pnode" | "double" | "stop_pnode":
            return pick.choice((short, long, long))
        case "compute_death" | "compute_hang":
            return pick.uniform(5.0, 60.0)
        case "reconnect" | "lose" | "clock_jump" | "join" | "second_orchestrator":
            return 0.0
        case _:
            return pick.choice((short, short, long))


def _amount(kind: str, pick: random.Random) -> float:
    match kind:
        case "clock_jump":
            return pick.choice((-1, 1)) * pick.choice((30.0, 1200.0, 3600.0, 90_000.0))
        case "slow_compute":
            return pick.uniform(2.0, 20.0)
        case "double":
            return pick.uniform(0.0, 30.0)
        case "false_hint":
            return pick.choice((1.0, 1.0, 0.5))
        case "store_cut" | "store_flip":
            return pick.uniform(0.1, 0.6)
        case "store_unavailable" | "store_stall" | "store_full" | "store_read_only":
            return pick.choice((1.0, 1.0, pick.uniform(0.2, 0.8)))
        case _:
            return pick.uniform(0.05, 1.0)
