"""Where gradients flow between stages: which channels bring one back and which stages run backward at all. Pure.

Everything else (frozen parts, branches that nobody uses, integers) is answered by an empty `done`. Both ends of a
channel work this out from the same live edges (pnode.liveness), so they agree without a word.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from networks.graph import NodeId
from networks.stages import StagePlan


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Channels whose gradient comes back, stages that run backward, and tensors per gradient hop of a channel."""

    channels: frozenset[int]
    stages: frozenset[int]
    tensors: dict[int, int]


def gradient_flow(plan: StagePlan, live: AbstractSet[int], trainable: AbstractSet[NodeId]) -> GradientFlow:
    """`live`: indices of edges along which a gradient travels; `trainable`: nodes that learn from the loss."""
    counts = {channel.index: sum(edge.index in live for edge in channel.edges) for channel in plan.channels}
    tensors = {c.index: 1 if c.presum else counts[c.index] for c in plan.channels if counts[c.index]}
    channels = frozenset(tensors)
    stages = {plan.stage_of[node] for node in trainable}
    stages.update(channel.dst for channel in plan.channels if channel.index in channels)
    return GradientFlow(channels, frozenset(stages), tensors)
