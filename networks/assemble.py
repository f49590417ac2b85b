"""From the flat nodes and edges to a `Graph`: order, cycles, ties, pins, shapes and costs.

Used for files and for networks that arrive as bytes, so that both are checked by the same rules.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

from networks.codecs import CODED_DTYPE, NONE
from networks.diagnostics import Diagnostics, Place, quote
from networks.expand import Flat, FlatEdge, FlatNode
from networks.graph import Edge, Graph, Node, NodeCost, NodeId, PortRef, TensorSpec
from networks.scopes import Port, shown
from networks.types import REGISTRY, ShapeError, infer

LOSS = "loss"
"""The output that training makes small."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What a graph is called and where it comes from."""

    name: str
    file: str


def assemble(
    heading: Heading,
    flat: Flat,
    inputs: Mapping[str, TensorSpec],
    place: Mapping[str, tuple[str, Place]],
    diagnostics: Diagnostics,
) -> Graph | None:
    """The graph; None after noting errors. A flat node without parameters has an error that is noted already."""
    order = topological(flat, diagnostics)
    if order is None:
        return None
    ties = _resolve_ties(flat, order, diagnostics)
    pins = _resolve_pins(flat, place, diagnostics)
    costs = _costs(flat, order, inputs, ties, diagnostics)
    loss = _loss(flat, costs, diagnostics)
    _check_codecs(flat, inputs, costs, diagnostics)
    if diagnostics.found or any(node.params is None for node in flat.nodes):
        return None
    by_id = {node.id: node for node in flat.nodes}
    nodes = [_node(by_id[node_id], index, ties.get(node_id)) for index, node_id in enumerate(order)]
    edges = tuple(Edge(index, _ref(edge.src), _ref(edge.dst), edge.codec) for index, edge in enumerate(flat.edges))
    outputs = {name: _ref(port) for name, (port, _) in flat.outputs.items()}
    return Graph(
        name=heading.name,
        file=heading.file,
        nodes=tuple(nodes),
        edges=edges,
        inputs=dict(inputs),
        outputs=outputs,
        loss=NodeId(loss) if loss is not None else None,
        costs={NodeId(node_id): cost for node_id, cost in costs.items()},
        pins={NodeId(node_id): pnode for node_id, pnode in pins.items()},
    )


def _node(node: FlatNode, order: int, tie: str | None) -> Node:
    assert node.params is not None
    return Node(
        NodeId(node.id), node.type, node.params, order, NodeId(tie) if tie is not None else None, node.where.line
    )


def _ref(port: Port) -> PortRef:
    return PortRef(NodeId(port[0]), port[1])


def topological(flat: Flat, diagnostics: Diagnostics) -> list[str] | None:
    """Kahn's order, ties broken by place in the expanded file. None after noting a cycle with its path."""
    place = {node.id: index for index, node in enumerate(flat.nodes)}
    waiting = dict.fromkeys(place, 0)
    readers: dict[str, list[str]] = {}
    for edge in flat.edges:
        if edge.src[0] in place:
            waiting[edge.dst[0]] += 1
            readers.setdefault(edge.src[0], []).append(edge.dst[0])
    ready = [place[node] for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        node = flat.nodes[heapq.heappop(ready)].id
        order.append(node)
        for reader in readers.get(node, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, place[reader])
    if len(order) == len(flat.nodes):
        return order
    _note_cycle(flat, {node for node, count in waiting.items() if count > 0}, diagnostics)
    return None


def _note_cycle(flat: Flat, stuck: set[str], diagnostics: Diagnostics) -> None:
    """Follow edges backwards among the nodes that never became ready: that must come around."""
    into: dict[str, FlatEdge] = {}
    for edge in flat.edges:
        if edge.dst[0] in stuck and edge.src[0] in stuck:
            into.setdefault(edge.dst[0], edge)
    start = next(node.id for node in flat.nodes if node.id in stuck)
    seen: dict[str, int] = {}
    path: list[str] = []
    while start not in seen:
        seen[start] = len(path)
        path.append(start)
        start = into[start].src[0]
    cycle = path[seen[start] :][::-1]
    first = min(range(len(cycle)), key=lambda index: cycle[index])
    cycle = cycle[first:] + cycle[:first]
    path = [*cycle, cycle[0]]
    if len(path) > 40:
        path = [*path[:20], "…", *path[-19:]]
    where = into[cycle[0]].where
    diagnostics.add(
        where, f"the edges form a cycle: {' -> '.join(path)}", "a network has no way back to an earlier node"
    )


def _resolve_ties(flat: Flat, order: list[str], diagnostics: Diagnostics) -> dict[str, str]:
    """User of a shared weight -> its owner, which is the first of them in topological order."""
    by_id = {node.id: node for node in flat.nodes}
    group: dict[str, str] = {}

    def root(node_id: str) -> str:
        while group.get(node_id, node_id) != node_id:
            node_id = group[node_id]
        return node_id

    for node in flat.nodes:
        if node.tie is None:
            continue
        other = _tied_node(node, by_id, diagnostics)
        if other is None:
            continue
        group[root(node.id)] = root(other.id)
    members: dict[str, list[str]] = {}
    tied = {*group, *group.values()}
    for node_id in order:
        if node_id in tied:
            members.setdefault(root(node_id), []).append(node_id)
    return {user: names[0] for names in members.values() for user in names[1:]}


def _tied_node(node: FlatNode, by_id: dict[str, FlatNode], diagnostics: Diagnostics) -> FlatNode | None:
    """The node that a `tie` names, looked up from the inside out. None after noting what is wrong."""
    assert node.tie is not None
    where = _at_key(node.where, "tie")
    found = next((by_id[scope + node.tie] for scope in node.tie_scopes if scope + node.tie in by_id), None)
    if found is None:
        diagnostics.add(where, f"no node is called {quote(node.tie)}", diagnostics.suggest(node.tie, by_id))
        return None
    if found is node:
        diagnostics.add(where, f"{quote(node.id)} is tied to itself", "name another node, or remove 'tie'")
        return None
    for one in (node, found):
        kind = REGISTRY.get(one.type)
        if kind is not None and kind.tie is None:
            types = ", ".join(name for name, entry in REGISTRY.items() if entry.tie is not None)
            diagnostics.add(
                where, f"{quote(one.id)} is of type {one.type}, which has no weight to share", f"these have: {types}"
            )
            return None
    return found


def _at_key(where: Place, key: str) -> Place:
    items = getattr(where, "items", None)
    found = items.get(key) if isinstance(items, dict) else None
    return found if found is not None else where


def _resolve_pins(flat: Flat, place: Mapping[str, tuple[str, Place]], diagnostics: Diagnostics) -> dict[str, str]:
    """Node -> PNode. A key names a node or, as the beginning of dotted ids, a block's copies; the longest key wins."""
    pins: dict[str, tuple[int, str]] = {}
    ids = [node.id for node in flat.nodes]
    for key, (pnode, where) in place.items():
        hit = [node_id for node_id in ids if node_id == key or node_id.startswith(f"{key}.")]
        if not hit:
            diagnostics.add(where, f"no node is called {quote(key)}", diagnostics.suggest(key, ids))
        for node_id in hit:
            if pins.get(node_id, (-1, ""))[0] < len(key):
                pins[node_id] = (len(key), pnode)
    return {node_id: pins[node_id][1] for node_id in ids if node_id in pins}


def _costs(
    flat: Flat, order: list[str], inputs: Mapping[str, TensorSpec], ties: dict[str, str], diagnostics: Diagnostics
) -> dict[str, NodeCost]:
    """Shapes and costs in topological order; what depends on a node with an error is left out."""
    by_id = {node.id: node for node in flat.nodes}
    into: dict[str, list[FlatEdge]] = {node.id: [] for node in flat.nodes}
    for edge in flat.edges:
        into[edge.dst[0]].append(edge)
    specs: dict[Port, TensorSpec] = {(name, ""): spec for name, spec in inputs.items()}
    costs: dict[str, NodeCost] = {}
    for node_id in order:
        node = by_id[node_id]
        if node.params is None:
            continue
        kind = REGISTRY[node.type]
        edges = into[node_id]
        if not kind.variadic:
            by_port = {edge.dst[1]: edge for edge in edges}
            names = kind.inputs(node.params)
            if any(name not in by_port for name in names):
                continue
            edges = [by_port[name] for name in names]
        if not edges or any(edge.src not in specs for edge in edges):
            continue
        try:
            cost = infer(node.type, node.params, [specs[edge.src] for edge in edges])
        except ShapeError as error:
            sources = ", ".join(quote(shown(edge.src)) for edge in edges)
            diagnostics.add(node.where, f"{quote(node_id)} {error.message} from {sources}")
            continue
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            diagnostics.add(node.where, f"{quote(node_id)} can't be built: {reason}", "are its numbers too large?")
            continue
        if node_id in ties:
            cost = _without_shared(node, cost, by_id[ties[node_id]], costs, diagnostics)
        costs[node_id] = cost
        for port, spec in cost.outputs.items():
            specs[node_id, port] = spec
    return costs


def _without_shared(
    node: FlatNode, cost: NodeCost, owner: FlatNode, costs: dict[str, NodeCost], diagnostics: Diagnostics
) -> NodeCost:
    """The cost without the weight that the owner has; notes two shapes that don't agree."""
    mine, theirs = REGISTRY[node.type].tie, REGISTRY[owner.type].tie
    have = costs.get(owner.id)
    if mine is None or theirs is None or have is None:
        return cost
    own, shared = cost.parameters[mine], have.parameters[theirs]
    if own != shared:
        text = f"{quote(node.id)} has a weight {own}, but {quote(owner.id)}, to which it is tied, has {shared}"
        diagnostics.add(_at_key(node.where, "tie"), text, "tied weights have one shape: (out, in) and (num, dim)")
    return replace(cost, parameters={name: spec for name, spec in cost.parameters.items() if name != mine})


def _loss(flat: Flat, costs: dict[str, NodeCost], diagnostics: Diagnostics) -> str | None:
    """The node of the output `loss`, which must be one floating-point number."""
    entry = flat.outputs.get(LOSS)
    if entry is None:
        return None
    (node, port), where = entry
    cost = costs.get(node)
    if cost is not None:
        spec = cost.outputs[port]
        if spec.shape or "float" not in spec.dtype:
            text = f"output 'loss' must be a single number, got {spec} from {quote(node)}"
            diagnostics.add(where, text, "end in a node of type cross_entropy or mse")
        elif not _counts_targets(flat, node):
            text = f"output 'loss' is {quote(node)}, and no cross_entropy or mse leads to it"
            diagnostics.add(where, text, "a loss is a sum over targets")
    return node


def _check_codecs(
    flat: Flat, inputs: Mapping[str, TensorSpec], costs: Mapping[str, NodeCost], diagnostics: Diagnostics
) -> None:
    """Note edges that ask for a codec but carry something that can't be coded."""
    for edge in flat.edges:
        if edge.codec in ("", NONE):
            continue
        if edge.src[0] in inputs:
            text = f"{quote(edge.src[0])} is an input: it is read where it is used and never travels"
            diagnostics.add(edge.where, f"{text}, so it has no codec", "write '->'")
            continue
        cost = costs.get(edge.src[0])
        spec = cost.outputs.get(edge.src[1]) if cost is not None else None
        if spec is not None and spec.dtype != CODED_DTYPE:
            text = f"{quote(shown(edge.src))} gives {spec}, and only {CODED_DTYPE} can be coded"
            diagnostics.add(edge.where, text, "write '->'")


def _counts_targets(flat: Flat, node: str) -> bool:
    by_id = {one.id: one for one in flat.nodes}
    into: dict[str, list[str]] = {}
    for edge in flat.edges:
        into.setdefault(edge.dst[0], []).append(edge.src[0])
    seen: set[str] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in by_id:
            continue
        seen.add(current)
        kind = REGISTRY.get(by_id[current].type)
        if kind is not None and kind.is_loss:
            return True
        waiting += into.get(current, ())
    return False
