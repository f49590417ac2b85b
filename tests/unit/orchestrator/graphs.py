"""Synthetic graphs and machines for placement tests: random but from a seed, without torch."""

from __future__ import annotations

import random
from typing import Any, cast

from networks.graph import Edge, Graph, Node, NodeCost, NodeId, PortRef, TensorSpec
from orchestrator.work import Machine


def make_graph(
    widths: list[int],
    reads: list[list[int]],
    *,
    parameters: list[int] | None = None,
    flops: list[int] | None = None,
    ties: dict[int, int] | None = None,
    pins: dict[int, str] | None = None,
) -> Graph:
    """Node i makes float32(batch, widths[i]) from the nodes in reads[i]; -1 is the network's input."""
    names = [NodeId(f"n{i}") for i in range(len(widths))]
    ties = ties or {}
    nodes = tuple(
        Node(names[i], "linear", cast("Any", None), i, names[ties[i]] if i in ties else None)
        for i in range(len(widths))
    )
    edges: list[Edge] = []
    for i, sources in enumerate(reads):
        for source in sources:
            src = PortRef(NodeId("x"), "") if source < 0 else PortRef(names[source], "y")
            edges.append(Edge(len(edges), src, PortRef(names[i], str(len(edges)))))
    costs = {}
    for i, name in enumerate(names):
        weight = {"weight": TensorSpec("float32", (parameters[i],))} if parameters and parameters[i] else {}
        cost = flops[i] if flops else 1000 * widths[i]
        costs[name] = NodeCost(
            {"y": TensorSpec("float32", ("batch", widths[i]))}, {} if i in ties else weight, {}, cost, 2 * cost
        )
    return Graph(
        name="synthetic",
        file="synthetic.yaml",
        nodes=nodes,
        edges=tuple(edges),
        inputs={"x": TensorSpec("float32", ("batch", 8))},
        outputs={},
        loss=names[-1],
        costs=costs,
        pins={names[i]: pnode for i, pnode in (pins or {}).items()},
    )


def random_graph(source: random.Random, size: int, *, pnodes: list[str] | None = None) -> Graph:
    """A chain with random skips, widths, costs, sometimes a tie, sometimes a pin."""
    widths = [source.choice([1, 4, 16, 64, 256]) for _ in range(size)]
    reads = [[-1] if i == 0 else [i - 1] for i in range(size)]
    for i in range(2, size):
        for _ in range(source.choice([0, 0, 1, 2])):
            reads[i].append(source.randrange(-1, i - 1))
    parameters = [source.choice([0, 100, 10_000, 100_000]) for _ in range(size)]
    flops = [source.choice([0, 1_000, 50_000, 1_000_000, 3_000_000]) for _ in range(size)]
    ties = {}
    if size > 2 and source.random() < 0.3:
        owner = source.randrange(size - 1)
        parameters[owner] = 50_000
        ties[source.randrange(owner + 1, size)] = owner
    pins = {}
    if pnodes and source.random() < 0.25:
        pins[source.randrange(size)] = source.choice(pnodes)
    return make_graph(widths, reads, parameters=parameters, flops=flops, ties=ties, pins=pins)


def transformer_like(layers: int, width: int = 128) -> Graph:
    """`layers` blocks of eight nodes with two residuals each."""
    widths, reads, parameters, flops = [width], [[-1]], [64 * width], [width]
    for _ in range(layers):
        base = len(widths) - 1
        factors = [1, 3, 1, 1, 4, 4, 1, 1]
        sources = [[0], [1], [2, 0], [3], [4], [5], [6], [7, 3]]
        weights = [1, 4 * width, 0, 1, 4 * width, 0, 4 * width, 0]
        for factor, source, weight in zip(factors, sources, weights, strict=True):
            widths.append(width * factor)
            reads.append([base + place for place in source])
            parameters.append(weight * width)
            flops.append(2 * weight * width + width)
    return make_graph(widths, reads, parameters=parameters, flops=flops)


def random_machines(source: random.Random, count: int, *, tight: bool = False) -> list[Machine]:
    """Unequal machines; `tight`: memory that may not hold all."""
    return [
        Machine(
            id=f"p{i}",
            speed=source.choice([1e9, 2e9, 3e9, 7e9]),
            memory_bytes=source.choice([400_000, 1_500_000, 4_000_000]) if tight else 1 << 34,
            link_bytes_s=source.choice([1e6, 1e7, 1e9]),
            latency_s=source.choice([0.0, 1e-4, 1e-2]),
            host=f"h{i}",
        )
        for i in range(count)
    ]


def equal_machines(count: int, *, speed: float = 2e10, memory_bytes: int = 1 << 34, host: str = "h") -> list[Machine]:
    """Machines of one kind on one host, with loopback between them."""
    return [Machine(f"p{i}", speed, memory_bytes, 1e9, 1e-4, host) for i in range(count)]
