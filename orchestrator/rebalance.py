"""What another placement would gain a deployed session. Pure.

Both placements are predicted for the PNodes of now, so a PNode that joined after the session was placed counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from networks.codecs import CodedGroup
from orchestrator.placement import Plan, plan, planned
from orchestrator.work import Machine, Work
from wire.errors import UsageError

WORTH = 1.01
"""A prediction that is better by less than that is no reason to move anything."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The present placement and the best one. `moved`: VNode -> its new PNode; `gain`: present / best step time."""

    present: Plan
    best: Plan
    gain: float
    moved: dict[str, str]
    moved_bytes: int


def compare(
    work: Work,
    machines: Sequence[Machine],
    placement: Mapping[str, str],
    *,
    cores: Mapping[str, int] | None = None,
    coded: tuple[CodedGroup, ...] | None = None,
) -> Comparison:
    """`coded`: the edges that the session codes; another placement chooses its own.

    Raises `UsageError` if a PNode of the present placement can't be had any more.
    """
    absent = sorted(set(placement.values()) - {machine.id for machine in machines})
    if absent:
        raise UsageError(f"{', '.join(absent)} can't be had at present", hint="dcnr ps --pnodes")
    here = {node: placement[node] for node in work.nodes}
    present = planned(replace(work, coded=coded), machines, here, ["the VNodes are there now"], cores)
    best = plan(work, machines, cores=cores)
    if present.forecast.step_s < best.forecast.step_s * WORTH:
        return Comparison(present, present, 1.0, {}, 0)
    moved = {str(node): pnode for node, pnode in best.placement.items() if here[node] != pnode}
    moved_bytes = sum(work.state_bytes[work.order[node]] for node in best.placement if str(node) in moved)
    return Comparison(present, best, present.forecast.step_s / best.forecast.step_s, moved, moved_bytes)
