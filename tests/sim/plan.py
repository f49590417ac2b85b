"""What a run is made of: a network, machines, lines, an operator and a schedule of faults, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.sim.client import Interruption
from tests.sim.nets import SHAPES
from tests.sim.network import Loss
from wire.sim import Hints, Line

KINDS = (
    "slow_line", "delay", "drop", "duplicate", "reorder", "damage", "partition", "partition_one_way", "isolate",
    "reconnect", "half_open", "lose", "false_hint",
    "pause_short", "pause_long", "kill_pnode", "restart_pnode", "stop_pnode", "double", "second_pnode", "join",
    "kill_orchestrator", "wipe_orchestrator", "stop_orchestrator", "pause_orchestrator", "second_orchestrator",
    "kill_client",
    "store_unavailable", "store_slow", "store_stall", "store_lost_before", "store_lost_after", "store_late",
    "store_cut", "store_flip", "store_full", "store_read_only", "store_conflict",
    "clock_jump", "compute_death", "compute_hang", "slow_compute",
)  # fmt: skip
"""Every kind of fault."""

LOSABLE = (
    "register", "registered", "heartbeat", "heartbeat_ack", "goodbye", "prepare", "start_run", "hold_run", "release",
    "ok", "hop", "tie_gradient", "tie_version", "gradient_report", "verdict", "progress", "parts_saved", "committed",
    "run_held", "run_failed",
)  # fmt: skip
"""Messages of which single ones are lost."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault that is to come: at a time, or, from then on, when `on` is seen for the `nth` time, and `delay` later.

    `on`: "Delivered Prepare", "Wrote head.json", "Computed" … `where`, `to`: machines, "" for one drawn at that moment.
    """

    kind: str
    at: float
    where: str = ""
    to: str = ""
    seconds: float = 0.0
    amount: float = 0.0
    on: str = ""
    nth: int = 1
    delay: float = 0.0

    def __str__(self) -> str:
        when = f"{self.at:.2f} s" + (f", at the {self.nth}. {self.on} and {self.delay:.3f} s" if self.on else "")
        where = f" {self.where}" + (f" > {self.to}" if self.to else "")
        return f"{when}: {self.kind}{where} for {self.seconds:.2f} s ({self.amount:.3g})"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that is decided beforehand."""

    network: str = "chain"
    pnodes: int = 2
    spares: int = 0
    members: int = 2
    placement: Mapping[str, str] = field(default_factory=dict)
    slowness: tuple[float, ...] = ()
    every: int = 2
    keep: int = 3
    line: Line = Line(delay_s=0.002, jitter_s=0.003)  # noqa: RUF009
    hints: Hints = Hints()  # noqa: RUF009
    """Of connections that closed, where a process ended or a line was taken up again."""
    lease_s: float = 10.0
    compute_s: float = 0.05
    compute_limit_s: float = 40.0
    store_given: bool = False
    """PNodes are started with `--store`, so that even a new one finds an orchestrator that came up elsewhere."""
    interruptions: tuple[Interruption, ...] = ()
    until: int = 0
    """The first start is for so many steps only; the operator resumes it then."""
    faults: tuple[Planned, ...] = ()
    losses: tuple[Loss, ...] = ()
    """Single messages that are lost, from the start on."""
    healed_s: float = 0.0
    give_up_s: float = 1500.0
    """So long after everything is healed the world no longer waits for the run."""

    def text(self) -> str:
        """For people."""
        lines = [
            f"network {self.network}, {self.pnodes} PNodes and {self.spares} spare, members "
            f"{self.members or 'by hand'}, checkpoint every {self.every} steps, keep {self.keep}",
            *(f"  placed {vnode} on {pnode}" for vnode, pnode in self.placement.items()),
            f"  line {self.line}, {self.hints}",
            *([f"  operator: first until step {self.until}"] if self.until else []),
            *(f"  operator: {item}" for item in self.interruptions),
            *(f"  fault {item}" for item in self.faults),
            f"  healed at {self.healed_s:.1f} s",
        ]
        return "\n".join(lines)


def calm(seed: int, network: str = "") -> Plan:
    """A run without faults; the seed draws the rest."""
    pick = random.Random(f"plan/{seed}")
    name = network or pick.choice(sorted(SHAPES))
    pnodes = pick.choice((2, 2, 3, 3, 4))
    spares = int(pick.random() < 0.4)
    nodes = [line.split("id: ")[1].split(",")[0] for line in SHAPES[name].text.splitlines() if "{id: " in line]
    placement: dict[str, str] = {}
    members = min(pnodes, 3)
    if pick.random() < 0.4:
        members = 0
        placement = {node: f"p{pick.randint(1, pnodes)}" for node in nodes}
    line = Line(
        delay_s=pick.choice((0.0005, 0.002, 0.01)), jitter_s=pick.choice((0.0, 0.002, 0.01)),
        drop=pick.choice((0.0, 0.0, 0.0, 0.01)), duplicate=pick.choice((0.0, 0.0, 0.01)),
        reorder=pick.choice((0.0, 0.0, 0.02)),
    )  # fmt: skip
    steps = SHAPES[name].steps
    interruptions = _interruptions(pick, steps) if pick.random() < 0.35 else ()
    until = pick.randint(1, steps - 1) if pick.random() < 0.1 else 0
    return Plan(
        name, pnodes, spares, members, placement, tuple(pick.choice((1.0, 1.0, 2.0)) for _ in range(pnodes + spares)),
        pick.choice(SHAPES[name].every), pick.choice((1, 2, 3)), line, interruptions=interruptions, until=until,
        compute_s=pick.choice((0.04, 0.08, 0.15)), store_given=pick.random() < 0.5,
        hints=Hints(pick.choice((0.0, 0.5, 1.0, 1.0)), pick.choice((0.001, 0.1, 3.0))),
    )  # fmt: skip


HABITS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("pause", ""),),
    (("stop", ""),),
    (("pause", ""), ("stop", "pausing")),
    (("pause", ""), ("stop", "rest")),
    (("stop", "created"),),
    (("pause", "starting"),),
    (("stop", "starting"),),
    (("pause", "recovering"),),
    (("stop", "recovering"),),
    (("stop", "rest"),),
    (("rebalance", ""),),
    (("rebalance", ""), ("pause", "starting")),
    (("rebalance", ""), ("rebalance", "")),
)
"""What an operator does one after the other: action, and in which state."""


def _interruptions(pick: random.Random, steps: int) -> tuple[Interruption, ...]:
    """One habit, sometimes another one later."""
    found: list[Interruption] = []
    step = pick.choice((1, 1, pick.randint(1, steps - 1), steps - 1))
    for _ in range(pick.choice((1, 1, 1, 2))):
        for action, state in pick.choice(HABITS):
            after = step if state in ("", "recovering") else 0
            found.append(Interruption(after, action, pick.uniform(0.1, 6.0), state))
        step = pick.randint(step, steps - 1)
    created = [item for item in found if item.state == "created"]
    return (*created, *(item for item in found if item.state != "created"))
