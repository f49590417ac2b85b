"""Which edges of a placement are coded, and why. Pure.

What the file says (`bf16`, `int8`) holds for every edge that crosses PNodes. `auto` is decided for each pair of
PNodes, for both directions and all its edges at once, from measured link and predicted compute:

- A link is *hidden* while a microbatch's bytes take at most `HIDDEN` of the time that the busiest PNode computes on
  one: the schedule has other work meanwhile, and nothing is coded.
- Else the mildest codec that hides it, or else the smallest: bf16 before int8.
- A codec that saves less than `WORTH` of a microbatch's time, with the link's round trip, is not used: no codec
  shortens a round trip.

The choice is made when VNodes are placed, is part of the deployment, and stays the run's over recoveries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from networks.codecs import AUTO, BF16, CODECS, INT8, NONE, CodedGroup, asks_for_codec
from networks.graph import NodeId
from networks.stages import Channel, StagePlan, wished_groups
from orchestrator.work import Machine, Work, coded_step_bytes, with_gradient

HIDDEN = 0.5
WORTH = 0.05
CODING_BYTES_S = {BF16: 4e9, INT8: 1e9}
"""float32 bytes per second that one core encodes and decodes."""
MOST_REASONS = 12


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a microbatch sends over one pair of PNodes, in the direction with more of it, and what it is beside."""

    size_bytes: Mapping[str, float]  # by codec, NONE too
    link_bytes_s: float
    round_trip_s: float
    compute_s: float  # that the busiest PNode computes on a microbatch

    def seconds(self, codec: str) -> float:
        """On the wire, and coding and decoding."""
        coding_s = self.size_bytes[NONE] / CODING_BYTES_S[codec] if codec in CODING_BYTES_S else 0.0
        return self.size_bytes[codec] / self.link_bytes_s + coding_s


def choose(traffic: Traffic) -> str:
    """The codec of a pair's `auto` edges: `none`, `bf16` or `int8`."""
    raw_s = traffic.seconds(NONE)
    allowed_s = HIDDEN * traffic.compute_s
    if raw_s <= allowed_s:
        return NONE
    worth_s = WORTH * (max(raw_s, traffic.compute_s) + traffic.round_trip_s)
    worthy = [codec for codec in (BF16, INT8) if raw_s - traffic.seconds(codec) >= worth_s]
    hiding = [codec for codec in worthy if traffic.seconds(codec) <= allowed_s]
    return hiding[0] if hiding else min(worthy, key=traffic.seconds, default=NONE)


def coded_groups(
    work: Work, placement: Mapping[NodeId, str], machines: Sequence[Machine]
) -> tuple[tuple[CodedGroup, ...], list[str]]:
    """The coded groups of a placement, and sentences about them; those that the run has already, if it has any."""
    if work.coded is not None:
        return work.coded, []
    if not asks_for_codec(work.graph, work.codec):
        return (), []
    by_id = {machine.id: machine for machine in machines}
    wished = wished_groups(work.graph, placement, work.codec)
    pairs: dict[tuple[str, str], list[tuple[Channel, CodedGroup]]] = {}
    for channel, group in wished:
        if group.codec == AUTO:
            ends = placement[channel.port.node], placement[channel.edges[0].dst.node]
            pairs.setdefault((min(ends), max(ends)), []).append((channel, group))
    compute_s = busiest_s(work, placement, by_id)
    chosen: dict[tuple[int, ...], str] = {}
    reasons = []
    for (one, other), entries in sorted(pairs.items()):
        traffic = Traffic(
            _larger_direction(work, placement, one, entries),
            min(by_id[one].link_bytes_s, by_id[other].link_bytes_s),
            by_id[one].latency_s + by_id[other].latency_s,
            compute_s,
        )
        codec = choose(traffic)
        chosen.update({group.edges: codec for _, group in entries})
        reasons.append(_reason(one, other, codec, traffic))
    groups = [
        CodedGroup(chosen[group.edges] if group.codec == AUTO else group.codec, group.edges) for _, group in wished
    ]
    if len(reasons) > MOST_REASONS:
        reasons = [*reasons[:MOST_REASONS], f"{len(reasons) - MOST_REASONS} more pairs of PNodes were judged likewise"]
    return tuple(group for group in groups if group.codec in CODECS), reasons


def fixed_groups(work: Work, placement: Mapping[NodeId, str]) -> tuple[CodedGroup, ...]:
    """Groups of which no machine has to be known: the run's own, or what the file says without `auto`."""
    if work.coded is not None:
        return work.coded
    if not asks_for_codec(work.graph, work.codec):
        return ()
    return tuple(group for _, group in wished_groups(work.graph, placement, work.codec) if group.codec in CODECS)


def busiest_s(work: Work, placement: Mapping[NodeId, str], machines: Mapping[str, Machine]) -> float:
    """Seconds that the busiest PNode computes on one microbatch, forward and backward."""
    found: dict[str, float] = {}
    for order, node in enumerate(work.nodes):
        speed = machines[placement[node]].speed
        here = (work.forward[order] + work.backward[order]) / speed / work.microbatches
        found[placement[node]] = found.get(placement[node], 0.0) + here + 2 * work.calibration.node_s
    return max(found.values())


def channel_bytes(work: Work, plan: StagePlan) -> list[tuple[int, int]]:
    """Per channel: bytes per step forward and backward, coded where it is."""
    grads = with_gradient(work.graph)
    found = []
    for channel in plan.channels:
        spec = work.graph.costs[channel.port.node].outputs[channel.port.port]
        size = coded_step_bytes(spec, channel.codec, work.batch, work.microbatches)
        flows = channel.port.node in grads and spec.dtype.startswith(("float", "bfloat"))
        found.append((size, size * (1 if channel.presum else len(channel.edges)) if flows else 0))
    return found


def _larger_direction(
    work: Work, placement: Mapping[NodeId, str], one: str, entries: Sequence[tuple[Channel, CodedGroup]]
) -> dict[str, float]:
    grads = with_gradient(work.graph)
    sizes: dict[str, list[float]] = {codec: [0.0, 0.0] for codec in (NONE, *CODECS)}
    for channel, _ in entries:
        spec = work.graph.costs[channel.port.node].outputs[channel.port.port]
        there = int(placement[channel.port.node] != one)
        for codec, both in sizes.items():
            size = coded_step_bytes(spec, codec, work.batch, work.microbatches) / work.microbatches
            both[there] += size
            both[1 - there] += size if channel.port.node in grads else 0.0
    return {codec: max(both) for codec, both in sizes.items()}


def _reason(one: str, other: str, codec: str, traffic: Traffic) -> str:
    raw_s, rate = traffic.seconds(NONE), traffic.link_bytes_s * 8 / 1e6
    beside = (
        f"a microbatch takes {raw_s * 1e3:.3g} ms on the wire ({rate:.3g} Mbit/s, round trip "
        f"{traffic.round_trip_s * 1e3:.3g} ms) beside {traffic.compute_s * 1e3:.3g} ms of compute"
    )
    if codec == NONE:
        why = "hidden" if raw_s <= HIDDEN * traffic.compute_s else "and no codec would gain 5 %"
        return f"{one} <-> {other} goes without codec: {beside}, {why}"
    return f"{one} <-> {other} is coded by {codec}, {traffic.seconds(codec) * 1e3:.3g} ms: {beside}"
