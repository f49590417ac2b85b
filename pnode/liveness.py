"""Which gradients flow, known from the graph alone; pure, without torch.

An edge is *live* when a gradient travels back along it: something trainable lies before it, the loss lies behind it,
and the port it enters lets gradients through. Both ends of a channel work this out for themselves and agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from networks.graph import Edge, Graph, NodeId
from networks.types import REGISTRY


@dataclass(frozen=True, slots=True)
class Liveness:
    """`live`: indices of live edges. `trainable`: nodes with a parameter that training changes."""

    live: frozenset[int]
    trainable: frozenset[NodeId]

    def edges(self, edges: Iterable[Edge]) -> list[Edge]:
        """Those of `edges` that are live, in order."""
        return [edge for edge in edges if edge.index in self.live]


def is_frozen(graph: Graph, node_id: NodeId) -> bool:
    """Whether the file says that this node's weights are never trained."""
    return bool(getattr(graph.node(node_id).params, "frozen", False))


def find_live(graph: Graph) -> Liveness:
    """The live edges of a network; none if it has no loss."""
    into, nodes = graph.in_edges(), graph.nodes
    frozen = {node.id for node in nodes if getattr(node.params, "frozen", False)}
    trainable = set()
    for node in nodes:
        owned = [
            name for name in graph.costs[node.id].parameters if node.tie is None or name != REGISTRY[node.type].tie
        ]
        tied = node.tie is not None and node.tie not in frozen
        if node.id not in frozen and (owned or tied):
            trainable.add(node.id)
    carries: set[NodeId] = set()
    for node in nodes:
        closed = REGISTRY[node.type].closed
        through = any(edge.src.node in carries and edge.dst.port not in closed for edge in into[node.id])
        if through or node.id in trainable:
            carries.add(node.id)
    reaches: set[NodeId] = set() if graph.loss is None else {graph.loss}
    live: set[int] = set()
    for node in reversed(nodes):
        if node.id in reaches:
            for edge in into[node.id]:
                if edge.src.node not in graph.inputs and edge.dst.port not in REGISTRY[node.type].closed:
                    reaches.add(edge.src.node)
                    if edge.src.node in carries:
                        live.add(edge.index)
    return Liveness(frozenset(live), frozenset(trainable & reaches))


def needed_nodes(graph: Graph, outputs: Iterable[str]) -> frozenset[NodeId]:
    """The nodes that must run to get these outputs of the network. KeyError for an unknown output."""
    wanted = {graph.outputs[name].node for name in outputs}
    into = graph.in_edges()
    for node in reversed(graph.nodes):
        if node.id in wanted:
            wanted.update(edge.src.node for edge in into[node.id] if edge.src.node not in graph.inputs)
    return frozenset(wanted)


def counting_node(graph: Graph) -> NodeId | None:
    """The node whose targets are the unit of the loss: the first loss node on a path to the network's loss."""
    if graph.loss is None:
        return None
    into = graph.in_edges()
    behind = {graph.loss}
    for node in reversed(graph.nodes):
        if node.id in behind:
            behind.update(edge.src.node for edge in into[node.id] if edge.src.node not in graph.inputs)
    return next((node.id for node in graph.nodes if node.id in behind and REGISTRY[node.type].is_loss), None)
