"""Which PNode runs which VNode, and why. Pure.

Objective: the smallest time of the slowest stage, compute and wire together, with its share of the pipeline's filling
and draining (`segments`); then the fewest bytes on the wire. Hard limits: memory and pins. Search: contiguous cuts of
the topological order over the orders of unequal machines, idle machines allowed.

- Up to `EXACT_MACHINES` machines and as many cuts as the budget allows: exact (`search`).
- Beyond: a heuristic (`greedy`), and the plan states its largest possible gap.
- Never more bytes on the wire than round-robin, where round-robin is possible at all.
- Pins that no contiguous placement can keep are kept by moving those nodes alone; the plan says so.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from networks.codecs import summary_of
from networks.graph import NodeId
from orchestrator.greedy import Greedy
from orchestrator.predict import Forecast, forecast, wire_bytes
from orchestrator.search import Cuts, ExactSearch
from orchestrator.segments import Segments
from orchestrator.work import Machine, Work
from wire.errors import DCNRError, UsageError

EXACT_MACHINES = 8
EXACT_CELLS = 3e9
"""Budget of an exact search: numbers looked at."""
CUTS = 700
"""Larger networks are cut only where little crosses, at about so many positions."""


class NothingFitsError(DCNRError):
    """No placement keeps the limits; the message says which machine lacks how much."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement, what it is predicted to cost, and why it was chosen. `gap`: at most so far above the best."""

    placement: dict[NodeId, str]
    forecast: Forecast
    reasons: tuple[str, ...]
    time_s: float
    exact: bool
    gap: float


def plan(work: Work, machines: Sequence[Machine], *, pnodes: int = 0, cores: Mapping[str, int] | None = None) -> Plan:
    """The best placement on `machines`; on exactly `pnodes` of them unless 0.

    Where edges leave their codec to the link, the search is made with the bytes of none and of int8, and the better
    forecast counts. Raises `NothingFitsError`; `UsageError` for a number of machines that can't be had or a pin to no
    machine.
    """
    _check(work, machines, pnodes)
    found = _searched(work, machines, pnodes, cores)
    if work.coded is None and work.small_values:
        small = _searched(replace(work, values=work.small_values), machines, pnodes, cores)
        found = min(found, small, key=lambda one: one.forecast.step_s)
    return found


def _searched(work: Work, machines: Sequence[Machine], pnodes: int, cores: Mapping[str, int] | None) -> Plan:
    in_flight = _in_flight(work, machines, pnodes)
    pinned = {node: pin for node, pin in zip(work.nodes, work.pins, strict=True) if pin is not None}
    greedy = Greedy(work, machines, in_flight)
    guess = greedy.run(pnodes)
    rough = guess is not None and not pinned
    known_s = guess[0] * (1 + 1e-6) if guess is not None and rough else float("inf")
    if len(machines) <= EXACT_MACHINES or work.size <= 64:
        segments = Segments(work, in_flight, _cut_positions(work))
        search = ExactSearch(segments, machines, pnodes)
        if search.cost_cells(known_s) <= EXACT_CELLS:
            return _exact(work, machines, segments, search, known_s, pnodes, cores)
    if guess is None:
        raise _nothing_fits(work, machines, in_flight, pnodes)
    placement = {work.nodes[node]: machine.id for machine, start, end in guess[1] for node in range(start, end)}
    moved = [node for node, pin in pinned.items() if placement[node] != pin]
    placement.update({node: pinned[node] for node in moved})
    placement = _no_more_than_round_robin(work, machines, placement, in_flight, pnodes)
    gap = max(0.0, guess[0] / greedy.lower_bound_s(pnodes) - 1)
    reasons = [
        f"a heuristic for {len(machines)} PNodes and {work.size} VNodes chose it: at most {gap:.0%} above the best "
        f"possible"
    ]
    if moved:
        reasons.append(f"{len(moved)} pinned VNodes moved to their PNodes after the search")
    return _finish(work, machines, placement, reasons, (guess[0], False, gap), cores)


def _exact(
    work: Work,
    machines: Sequence[Machine],
    segments: Segments,
    search: ExactSearch,
    known_s: float,
    pnodes: int,
    cores: Mapping[str, int] | None,
) -> Plan:
    in_flight = _in_flight(work, machines, pnodes)
    found = search.run(known_s) or search.run()
    if found is None:
        return _scattered(work, machines, in_flight, pnodes, cores)
    placement = _placed(work, segments, found)
    rival = round_robin(work, machines, pnodes)
    allowed = wire_bytes(rival, work)
    if wire_bytes(placement, work) > allowed and _can_be(rival, work, machines, in_flight, pnodes):
        leaner = search.run(at_most_bytes=allowed)
        placement = rival if leaner is None else _placed(work, segments, leaner)
        found = found if leaner is None else leaner
    whole = segments.count == work.size
    bound = 0.0 if whole else max(0.0, found.time_s / Greedy(work, machines, in_flight).lower_bound_s(pnodes) - 1)
    how = (
        "no contiguous placement on these PNodes is faster (the search was exact)"
        if whole
        else f"it is the best of {segments.count} of {work.size} cuts: at most {bound:.0%} above the best possible"
    )
    return _finish(work, machines, placement, [how], (found.time_s, whole, bound), cores)


def round_robin(work: Work, machines: Sequence[Machine], pnodes: int = 0) -> dict[NodeId, str]:
    """Node i on machine i modulo their number, pins kept: the plainest placement, to compare with."""
    chosen = list(machines)[: pnodes or len(machines)]
    return {
        node: pin if pin is not None else chosen[place % len(chosen)].id
        for place, (node, pin) in enumerate(zip(work.nodes, work.pins, strict=True))
    }


def random_placement(work: Work, machines: Sequence[Machine], seed: int) -> dict[NodeId, str]:
    """Each node on a machine drawn from `seed`, pins kept; uses every machine where there are nodes enough."""
    source = random.Random(seed)
    ids = [machine.id for machine in machines]
    drawn = [*source.sample(ids, len(ids)), *(source.choice(ids) for _ in range(work.size))][: work.size]
    source.shuffle(drawn)
    return {
        node: pin if pin is not None else place for node, pin, place in zip(work.nodes, work.pins, drawn, strict=True)
    }


def check_placement(work: Work, machines: Sequence[Machine], placement: Mapping[str, str]) -> dict[NodeId, str]:
    """A placement given by hand, complete and on known PNodes; nodes that it leaves out go where their predecessor is.

    Raises `UsageError` naming the node or PNode.
    """
    known = {machine.id for machine in machines}
    for name, pnode in placement.items():
        if name not in work.order:
            raise UsageError(f"placement names the VNode {name!r}, which {work.graph.name} does not have")
        if pnode not in known:
            raise UsageError(f"placement puts {name!r} on {pnode!r}, which is not alive", hint="dcnr ps --pnodes")
    if not placement:
        raise UsageError("the placement is empty")
    here = next(iter(placement.values()))
    found: dict[NodeId, str] = {}
    for node, pin in zip(work.nodes, work.pins, strict=True):
        here = placement.get(node, pin or here)
        found[node] = here
    return found


def hand_placed(
    work: Work, machines: Sequence[Machine], placement: Mapping[str, str], *, cores: Mapping[str, int] | None = None
) -> Plan:
    """The plan for a placement given by hand. Raises as `check_placement`, and `NothingFitsError`."""
    whole = check_placement(work, machines, placement)
    found = planned(work, machines, whole, ["it was placed by hand"], cores)
    if lacking := why_it_does_not_fit(machines, found.forecast.memory_bytes):
        raise NothingFitsError(f"{work.graph.name} does not fit: {'; '.join(lacking)}")
    return found


def _check(work: Work, machines: Sequence[Machine], pnodes: int) -> None:
    if not machines:
        raise UsageError("there is no living PNode to place on", hint="start one: dcnr up, or dcnr pnode")
    if pnodes > len(machines):
        raise UsageError(f"{pnodes} PNodes were asked for, but {len(machines)} are alive", hint="dcnr ps --pnodes")
    if pnodes > work.size:
        raise UsageError(f"{pnodes} PNodes were asked for, but {work.graph.name} has only {work.size} VNodes")
    known = {machine.id for machine in machines}
    for node, pin in zip(work.nodes, work.pins, strict=True):
        if pin is not None and pin not in known:
            raise UsageError(
                f"{node!r} is pinned to {pin!r}, which is not alive", hint=f"alive: {', '.join(sorted(known))}"
            )


def _in_flight(work: Work, machines: Sequence[Machine], pnodes: int) -> int:
    """Microbatches whose activations a PNode of a chain holds at most at one time."""
    return min(work.microbatches, (pnodes or len(machines)) + 1)


def _cut_positions(work: Work) -> list[int] | None:
    """All positions, or about `CUTS` of them: in each stretch of equal work the one where least crosses."""
    size = work.size
    if size <= CUTS:
        return None
    crossing = [0] * (size + 2)
    for value in work.values:
        crossing[value.maker + 1] += value.step_bytes
        crossing[value.readers[-1] + 1] -= value.step_bytes
    for place in range(1, size + 2):
        crossing[place] += crossing[place - 1]
    per_cut = sum(work.operations(node) for node in range(size)) / CUTS
    found, best, held = [0], 0, 0.0
    for place in range(1, size):
        held += work.operations(place - 1)
        if not best or crossing[place] <= crossing[best]:
            best = place
        if held >= per_cut:
            found.append(best)
            best, held = 0, 0.0
    pinned = [place for place, pin in enumerate(work.pins) if pin is not None]
    return sorted({*found, *pinned, *(place + 1 for place in pinned), size})


def _placed(work: Work, segments: Segments, cuts: Cuts) -> dict[NodeId, str]:
    nodes = work.nodes
    return {
        nodes[place]: piece.machine.id
        for piece in cuts.pieces
        for place in range(segments.cuts[piece.start], segments.cuts[piece.end])
    }


def _fits(work: Work, machines: Sequence[Machine], placement: Mapping[NodeId, str], in_flight: int) -> bool:
    return not why_it_does_not_fit(machines, memory_needs(work, placement, in_flight))


def memory_needs(work: Work, placement: Mapping[NodeId, str], in_flight: int) -> dict[str, int]:
    """Memory that each machine needs."""
    found: dict[str, int] = {}
    for place, node in enumerate(work.nodes):
        here = placement[node]
        found[here] = found.get(here, 0) + work.static_bytes[place] + in_flight * work.stash_bytes[place]
    for value in work.values:
        owner = placement[work.nodes[value.maker]]
        for user in {placement[work.nodes[reader]] for reader in value.readers} - {owner}:
            found[user] += value.held_bytes
    return found


def why_it_does_not_fit(machines: Sequence[Machine], needs: Mapping[str, int]) -> list[str]:
    """For each machine that can't hold its share, a phrase saying what it lacks."""
    room = {machine.id: machine.memory_bytes for machine in machines}
    return [
        f"{pnode} lacks {size_text(need - room[pnode])} (needs {size_text(need)}, has {size_text(room[pnode])})"
        for pnode, need in needs.items()
        if need > room[pnode]
    ]


def _scattered(
    work: Work, machines: Sequence[Machine], in_flight: int, pnodes: int, cores: Mapping[str, int] | None
) -> Plan:
    """Where no contiguous placement keeps the pins: the best without them, then the pinned nodes moved."""
    guess = Greedy(work, machines, in_flight).run(pnodes)
    if guess is None:
        raise _nothing_fits(work, machines, in_flight, pnodes)
    placement = {work.nodes[node]: machine.id for machine, start, end in guess[1] for node in range(start, end)}
    placement.update({node: pin for node, pin in zip(work.nodes, work.pins, strict=True) if pin is not None})
    if not _fits(work, machines, placement, in_flight):
        raise _nothing_fits(work, machines, in_flight, pnodes)
    placement = _no_more_than_round_robin(work, machines, placement, in_flight, pnodes)
    reasons = ["the pins allow no contiguous placement: pinned VNodes were moved to their PNodes after the search"]
    return _finish(work, machines, placement, reasons, (guess[0], False, 0.0), cores)


def _no_more_than_round_robin(
    work: Work, machines: Sequence[Machine], placement: dict[NodeId, str], in_flight: int, pnodes: int
) -> dict[NodeId, str]:
    rival = round_robin(work, machines, pnodes)
    leaner = wire_bytes(placement, work) > wire_bytes(rival, work)
    return rival if leaner and _can_be(rival, work, machines, in_flight, pnodes) else placement


def _can_be(rival: Mapping[NodeId, str], work: Work, machines: Sequence[Machine], in_flight: int, pnodes: int) -> bool:
    """Whether it fits, on as many PNodes as were asked for: where most nodes are pinned it may use fewer."""
    return _fits(work, machines, rival, in_flight) and (not pnodes or len(set(rival.values())) == pnodes)


def _nothing_fits(work: Work, machines: Sequence[Machine], in_flight: int, pnodes: int) -> NothingFitsError:
    """The error for a network that has no place, with what is missing where."""
    pinned: dict[str, int] = {}
    for place, pin in enumerate(work.pins):
        if pin is not None:
            pinned[pin] = pinned.get(pin, 0) + work.static_bytes[place] + in_flight * work.stash_bytes[place]
    if lacking := why_it_does_not_fit(machines, pinned):
        return NothingFitsError(f"{work.graph.name} does not fit: with its pins, {'; '.join(lacking)}")
    total = sum(work.static_bytes) + in_flight * sum(work.stash_bytes)
    room = sum(sorted((machine.memory_bytes for machine in machines), reverse=True)[: pnodes or len(machines)])
    largest = max(range(work.size), key=lambda node: work.static_bytes[node] + in_flight * work.stash_bytes[node])
    need = work.static_bytes[largest] + in_flight * work.stash_bytes[largest]
    roomiest = max(machines, key=lambda machine: machine.memory_bytes)
    hint = "add a PNode with more memory, or lower train.batch or raise train.microbatches"
    if need > roomiest.memory_bytes:
        return NothingFitsError(
            f"{work.graph.name} does not fit: the VNode {work.nodes[largest]!r} needs {size_text(need)}, and "
            f"{roomiest.id}, the largest PNode, has {size_text(roomiest.memory_bytes)}: it lacks "
            f"{size_text(need - roomiest.memory_bytes)}",
            hint=hint,
        )
    each = ", ".join(f"{machine.id} has {size_text(machine.memory_bytes)}" for machine in machines[:12])
    short = f": {size_text(total - room)} are lacking" if total > room else ", but no cut of it does"
    return NothingFitsError(
        f"{work.graph.name} does not fit: it needs {size_text(total)} in all and {each}{short}", hint=hint
    )


def planned(
    work: Work, machines: Sequence[Machine], placement: dict[NodeId, str], reasons: list[str],
    cores: Mapping[str, int] | None = None,
) -> Plan:  # fmt: skip
    """The plan of any placement that is given, with its forecast and the sentences that explain it."""
    return _finish(work, machines, placement, reasons, (0.0, False, 0.0), cores)


def _finish(
    work: Work,
    machines: Sequence[Machine],
    placement: dict[NodeId, str],
    reasons: list[str],
    figures: tuple[float, bool, float],
    cores: Mapping[str, int] | None,
) -> Plan:
    result = forecast(placement, work, machines, cores=cores)
    time_s, exact, gap = figures
    reasons = [*reasons, *_sentences(work, machines, placement, result)]
    return Plan(placement, result, tuple(reasons), time_s, exact, gap)


def _sentences(work: Work, machines: Sequence[Machine], placement: Mapping[NodeId, str], result: Forecast) -> list[str]:
    by_id = {machine.id: machine for machine in machines}
    total = sum(result.compute_s.values()) or 1.0
    found = []
    counts: dict[str, int] = {}
    for pnode in placement.values():
        counts[pnode] = counts.get(pnode, 0) + 1
    for pnode, seconds in sorted(result.compute_s.items(), key=lambda item: -item[1])[:12]:
        found.append(
            f"{pnode} ({by_id[pnode].speed / 1e9:.1f} GFLOP/s) takes {counts[pnode]} VNodes: "
            f"{seconds * 1e3:.1f} ms of compute per step, {seconds / total:.0%} of all"
        )
    idle = [machine.id for machine in machines if machine.id not in counts]
    if idle:
        stay, them = ("stays", "it") if len(idle) == 1 else ("stay", "them")
        found.append(f"{', '.join(idle[:12])} {stay} idle: with {them} a step would not be faster")
    found += result.coded_because
    if result.coded:
        found.append(f"values are rounded ({summary_of(result.coded)}), so the run does not equal one without codec")
    if result.wire_bytes:
        pair, most = max(result.wire_bytes.items(), key=lambda item: item[1])
        found.append(
            f"{size_text(result.total_wire_bytes)} go over the wire per step, most of it {pair[0]} -> {pair[1]} "
            f"({size_text(most)})"
        )
    busy = max(result.compute_s.values())
    found.append(
        f"a step takes {result.step_s * 1e3:.1f} ms: the busiest PNode computes {busy / result.step_s:.0%} of it, "
        f"the rest is filling and draining {result.levels} levels with {work.microbatches} microbatches, and the wire"
    )
    return found


def size_text(size: float) -> str:
    """Bytes for a person: 1.5 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
