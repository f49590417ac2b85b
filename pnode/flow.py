"""Where gradients flow: which channels bring one back and which stages run backward at all. Pure.

A value carries a gradient if it is a float, some trainable parameter lies at or above it, and the loss lies below the
node that reads it. Everything else (frozen parts, branches that nobody uses, integers) is answered by an empty `done`.
Every PNode computes this from the same graph, so both ends of a channel agree without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from networks.graph import Graph, Node, NodeId, PortRef
from networks.stages import StagePlan

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Channels whose gradient comes back, and stages that run backward."""

    channels: frozenset[int]
    stages: frozenset[int]


def is_trainable(graph: Graph, node: Node) -> bool:
    """Whether the node has a parameter of its own or through a tie that learns."""
    if getattr(node.params, "frozen", False):
        return False
    return bool(graph.costs[node.id].parameters) or node.tie is not None


def gradient_flow(graph: Graph, plan: StagePlan, *, trainable: Callable[[Node], bool] | None = None) -> GradientFlow:
    """Follow trainability down and the loss up through the graph. O(nodes + edges)."""
    learns = trainable or (lambda node: is_trainable(graph, node))
    into = graph.in_edges()
    active: set[NodeId] = set()
    for node in graph.nodes:
        if learns(node) or any(edge.src.node in active and _is_float(graph, edge.src) for edge in into[node.id]):
            active.add(node.id)
    useful: set[NodeId] = {graph.loss} if graph.loss is not None else set()
    for node in reversed(graph.nodes):
        if node.id in useful:
            useful.update(edge.src.node for edge in into[node.id] if edge.src.node not in graph.inputs)
    channels = frozenset(
        channel.index
        for channel in plan.channels
        if channel.port.node in active
        and _is_float(graph, channel.port)
        and any(edge.dst.node in useful for edge in channel.edges)
    )
    return GradientFlow(channels, frozenset(plan.stage_of[node] for node in active & useful))


def _is_float(graph: Graph, port: PortRef) -> bool:
    cost = graph.costs.get(port.node)
    spec = cost.outputs.get(port.port) if cost is not None else None
    return spec is None or spec.dtype in FLOATS
