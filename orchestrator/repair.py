"""A placement after a loss: PNodes that still live keep their VNodes, the lost ones go to others or to a spare. Pure.

What was asked for is kept as far as it can be had: a placement by hand while all its PNodes live, else as much of it as
they hold; a number of PNodes, or fewer. Where the survivors' VNodes can't stay, everything is placed as if new. The
network's own pins are hard limits even here. Each shortfall is a sentence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from networks.graph import NodeId
from orchestrator.placement import (
    EXACT_MACHINES,
    NothingFitsError,
    Plan,
    hand_placed,
    plan,
    planned,
    why_it_does_not_fit,
)
from orchestrator.predict import forecast
from orchestrator.work import Machine, Work
from wire.errors import DCNRError

SPARES = 3
"""Idle PNodes that are tried, the fastest first, where there are too many PNodes for an exact search."""


def place_again(
    work: Work,
    machines: Sequence[Machine],
    *,
    pnodes: int = 0,
    wanted: Mapping[str, str] | None = None,
    keep: Mapping[str, str] | None = None,
    cores: Mapping[str, int] | None = None,
) -> tuple[Plan, list[str]]:
    """The placement and what it falls short of. `keep`: where VNodes are; a PNode that isn't in `machines` is lost.

    Raises `NothingFitsError`, `UsageError`.
    """
    alive = {machine.id for machine in machines}
    notes: list[str] = []
    wanted = dict(wanted or {})
    if wanted and alive.issuperset(wanted.values()):
        with contextlib.suppress(DCNRError):
            return hand_placed(work, machines, wanted, cores=cores), notes
    if absent := sorted(set(wanted.values()) - alive):
        notes.append(f"placed by hand on {', '.join(absent)} too, which can't be had: their VNodes go to others")
    count = min(pnodes, len(machines), work.size)
    if count < pnodes and machines:
        notes.append(f"{pnodes} PNodes were asked for, but {len(machines)} can be had: it goes on with {count}")
    kept = {name: pnode for name, pnode in {**wanted, **(keep or {})}.items() if pnode in alive and name in work.order}
    if kept:
        with contextlib.suppress(DCNRError):
            return _with(work, machines, kept, count, cores), notes
        notes.append(f"what is on {', '.join(sorted(set(kept.values())))} can't stay there: all VNodes are placed anew")
    return plan(work, machines, pnodes=count, cores=cores), notes


def _with(
    work: Work, machines: Sequence[Machine], kept: Mapping[str, str], count: int, cores: Mapping[str, int] | None
) -> Plan:
    """The best placement on `count` PNodes with these VNodes left in place. Raises `NothingFitsError`, `UsageError`."""
    pins = tuple(pin or kept.get(node) for node, pin in zip(work.nodes, work.pins, strict=True))
    if len(machines) > EXACT_MACHINES:
        found = _patched(work, machines, pins, count, cores)
    else:
        found = plan(replace(work, pins=pins), machines, pnodes=count, cores=cores)
    if lacking := why_it_does_not_fit(machines, found.forecast.memory_bytes):
        raise NothingFitsError(f"{work.graph.name} does not fit: {'; '.join(lacking)}")
    if len(set(found.placement.values())) < count:
        raise NothingFitsError(f"{count} PNodes were asked for, and what stays where it is leaves no VNodes for some")
    return found


def _patched(
    work: Work,
    machines: Sequence[Machine],
    pins: Sequence[str | None],
    count: int,
    cores: Mapping[str, int] | None,
) -> Plan:
    """The best of a few plain ways to fill the gaps: all to one spare, or each gap to a neighbour, or to both."""
    used = {pin for pin in pins if pin is not None}
    idle = [machine for machine in machines if machine.id not in used]
    spares = [machine.id for machine in sorted(idle, key=lambda one: (-one.speed, one.id))[:SPARES]]
    fillings = [[pin or spare for pin in pins] for spare in spares] if len(used) < (count or len(machines)) else []
    if used:
        fillings += [_from_left(pins), _from_left(pins[::-1])[::-1], _halved(pins)]
    best: tuple[float, dict[NodeId, str]] | None = None
    for filling in fillings:
        placement = dict(zip(work.nodes, filling, strict=True))
        result = forecast(placement, work, machines, cores=cores)
        if not why_it_does_not_fit(machines, result.memory_bytes) and (best is None or result.step_s < best[0]):
            best = result.step_s, placement
    if best is None:
        raise NothingFitsError(f"{work.graph.name} does not fit: its survivors and spares lack memory")
    return planned(work, machines, best[1], ["survivors keep their VNodes; gaps go to a spare or to neighbours"], cores)


def _from_left(pins: Sequence[str | None]) -> list[str]:
    """Each gap goes to whoever is before it, the first one to whoever is after it."""
    here = next(pin for pin in pins if pin is not None)
    found = []
    for pin in pins:
        here = pin or here
        found.append(here)
    return found


def _halved(pins: Sequence[str | None]) -> list[str]:
    """Each gap goes half to whoever is before it and half to whoever is after it."""
    left, right = _from_left(pins), _from_left(pins[::-1])[::-1]
    found: list[str] = []
    start = 0
    for place in range(len(pins) + 1):
        if place < len(pins) and pins[place] is None:
            continue
        middle = (start + place + 1) // 2
        found += [*left[start:middle], *right[middle:place]]
        if place < len(pins):
            found.append(right[place])
        start = place + 1
    return found
