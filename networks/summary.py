"""What `dcnr net show` tells about a network, as plain tables: nodes, edges and totals.

Figures are per sample (batch = 1); bytes of parameters are float32, FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from networks.graph import Graph, TensorSpec
from networks.types import REGISTRY


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: what it reads, its outputs (port, shape), what it owns, and what it costs."""

    id: str
    type: str
    sources: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    output_bytes: int
    parameters: int
    buffers: int
    forward_flops: int
    backward_flops: int
    tie: str
    pnode: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """One edge as a network file writes it, its two ports in full, what flows along it, and how many bytes of it."""

    index: int
    source: str
    target: str
    source_port: str
    target_port: str
    tensor: str
    size_bytes: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """The whole network."""

    nodes: int
    edges: int
    parameters: int
    trainable: int
    parameter_bytes: int
    forward_flops: int
    backward_flops: int
    edge_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything about a graph that a person wants to see before it is placed."""

    name: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    nodes: tuple[NodeRow, ...]
    edges: tuple[EdgeRow, ...]
    totals: Totals


def summarize(graph: Graph) -> Summary:
    """The tables of a graph, nodes in topological and edges in file order."""
    edges = tuple(_edge_rows(graph))
    nodes = tuple(_node_rows(graph, edges))
    parameters = sum(row.parameters for row in nodes)
    totals = Totals(
        nodes=len(nodes),
        edges=len(edges),
        parameters=parameters,
        trainable=sum(row.parameters for row in nodes if not row.frozen),
        parameter_bytes=sum(spec.size_bytes(1) for cost in graph.costs.values() for spec in cost.parameters.values()),
        forward_flops=sum(row.forward_flops for row in nodes),
        backward_flops=sum(row.backward_flops for row in nodes),
        edge_bytes=sum(row.size_bytes for row in edges),
    )
    inputs = tuple((name, str(spec)) for name, spec in graph.inputs.items())
    outputs = tuple((name, str(port)) for name, port in graph.outputs.items())
    return Summary(graph.name, inputs, outputs, nodes, edges, totals)


def _node_rows(graph: Graph, edges: Sequence[EdgeRow]) -> list[NodeRow]:
    rows = []
    into = graph.in_edges()
    for node in graph.nodes:
        cost = graph.costs[node.id]
        rows.append(
            NodeRow(
                id=node.id,
                type=node.type,
                sources=tuple(edges[edge.index].source for edge in into[node.id]),
                outputs=tuple((port, str(spec)) for port, spec in cost.outputs.items()),
                output_bytes=sum(spec.size_bytes(1) for spec in cost.outputs.values()),
                parameters=cost.parameter_count,
                buffers=len(cost.buffers),
                forward_flops=cost.forward_flops,
                backward_flops=cost.backward_flops,
                tie=node.tie or "",
                pnode=graph.pins.get(node.id, ""),
                frozen=bool(getattr(node.params, "frozen", False)),
            )
        )
    return rows


def _edge_rows(graph: Graph) -> list[EdgeRow]:
    rows = []
    types = {node.id: node for node in graph.nodes}
    for edge in graph.edges:
        spec: TensorSpec = graph.inputs.get(edge.src.node) or graph.costs[edge.src.node].outputs[edge.src.port]
        target = types[edge.dst.node]
        kind = REGISTRY[target.type]
        plain = not kind.variadic and len(kind.inputs(target.params)) == 1
        source = str(edge.src.node) if edge.src.port in ("", "y") else str(edge.src)
        reader = str(target.id) if plain else str(edge.dst)
        rows.append(
            EdgeRow(edge.index, source, reader, str(edge.src), str(edge.dst), str(spec), spec.size_bytes(1), edge.codec)
        )
    return rows
