"""From nested scopes to one flat list of nodes and edges: blocks copied, their borders removed.

The order of the expanded file, which decides the order of all sums:

- nodes: as written, the copies of a block in the place of the node that stands for it;
- edges: for each node that stands for a block, in the order of nodes, the edges inside its copies; then the scope's
  own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from networks.diagnostics import Diagnostics, Place, quote
from networks.document import NodeDef, ScopeDef
from networks.limits import BLOCK_DEPTH, EDGES, NODES
from networks.scopes import BROKEN_PORT, CompiledScope, Port, ScopeCompiler, output_ports
from networks.types import NodeParams
from networks.yaml_source import Scalar


@dataclass(slots=True, eq=False)
class FlatNode:
    """A node of the expanded file. `params` is None if the node has an error of its own."""

    id: str
    type: str
    params: NodeParams | None
    where: Place
    tie: str | None = None
    tie_scopes: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class FlatEdge:
    """An edge of the expanded file."""

    src: Port
    dst: Port
    where: Place
    codec: str = ""


Feed = tuple[Port, str]
"""What drives an input of a block, and the codec of the edge that leads there."""


@dataclass(slots=True, eq=False)
class Flat:
    """The expanded file."""

    nodes: list[FlatNode] = field(default_factory=list)
    edges: list[FlatEdge] = field(default_factory=list)
    outputs: dict[str, tuple[Port, Place]] = field(default_factory=dict)


def expand(top: ScopeDef, blocks: dict[str, ScopeDef], diagnostics: Diagnostics) -> Flat | None:
    """The flat graph of a file; None where blocks contain themselves or are too large (noted)."""
    order = _block_order(blocks, diagnostics)
    if order is None:
        return None
    compiled: dict[str, CompiledScope] = {}
    for scope in (*order, top):
        found = ScopeCompiler(scope, diagnostics).compile()
        compiled[scope.name] = found
        for node in scope.nodes.values():
            inner = compiled.get(node.block.name) if node.block is not None else None
            times = (node.entry.repeat or 1) if node.entry is not None else 1
            found.nodes += inner.nodes * times if inner is not None else 1
            found.edges += inner.edges * times if inner is not None else 0
            if found.nodes > NODES or found.edges > EDGES:
                text = f"blocks written out give more than {NODES:,} nodes or {EDGES:,} edges"
                diagnostics.add(node.where, text, "repeat less")
                return None
        found.edges += len(found.links)
    flat = Flat()
    writer = _Writer(compiled, flat)
    writer.write(top, "", ("",), {name: ((name, ""), "") for name in top.inputs})
    for name, scalar in top.outputs.items():
        port = _flat_output(top, compiled, flat, scalar, diagnostics)
        if port is not None:
            flat.outputs[name] = (port, scalar)
    return flat


def _block_order(blocks: dict[str, ScopeDef], diagnostics: Diagnostics) -> list[ScopeDef] | None:
    """Blocks so that each comes after those it contains. None if one contains itself, or nesting is too deep."""
    done: dict[str, int] = {}
    order: list[ScopeDef] = []

    def visit(scope: ScopeDef, path: list[str]) -> int:
        if scope.name in done:
            return done[scope.name]
        depth = 1
        for node in scope.nodes.values():
            if node.block is None:
                continue
            if node.block.name in path or len(path) >= 64:
                names = [*path[path.index(node.block.name) :], node.block.name] if node.block.name in path else path
                text = f"block {quote(node.block.name)} contains itself: {' -> '.join(names)}"
                diagnostics.add(node.where, text if node.block.name in path else "blocks are nested too deep")
                raise _RecursiveBlockError
            depth = max(depth, 1 + visit(node.block, [*path, node.block.name]))
        if depth > BLOCK_DEPTH:
            diagnostics.add(scope.where, f"blocks are nested deeper than {BLOCK_DEPTH} levels", "flatten them")
            raise _RecursiveBlockError
        done[scope.name] = depth
        order.append(scope)
        return depth

    try:
        for scope in blocks.values():
            visit(scope, [scope.name])
    except _RecursiveBlockError:
        return None
    return order


class _RecursiveBlockError(Exception):
    """Blocks can't be ordered; the reason is noted."""


class _Writer:
    """Writes the copies of all blocks into one flat graph."""

    def __init__(self, compiled: dict[str, CompiledScope], flat: Flat) -> None:
        self.compiled = compiled
        self.flat = flat

    def write(self, scope: ScopeDef, prefix: str, scopes: tuple[str, ...], inputs: dict[str, Feed]) -> None:
        """Nodes and edges of one copy of a scope; `inputs` says what drives its inputs.

        An edge that begins at an input has its own codec, or else that of the edge outside that leads to the input.
        """
        mine = self.compiled[scope.name]
        driven: dict[str, dict[str, Feed]] = {}
        own: list[FlatEdge] = []
        for link in mine.links:
            source, codec = self.resolve(scope, prefix, link.src, inputs)
            codec = link.codec or codec
            node, port = link.dst
            if scope.nodes[node].block is not None:
                driven.setdefault(node, {})[port] = source, codec
            else:
                own.append(FlatEdge(source, (prefix + node, port), link.where, codec))
        for definition in scope.nodes.values():
            if definition.block is not None:
                feeds = driven.get(definition.id, {})
                for copy in copies(definition, prefix):
                    self.write(definition.block, copy, (copy, *scopes), feeds)
                    last = self.resolve_output(definition.block, copy, [*definition.block.outputs][:1])
                    feeds = dict.fromkeys(definition.block.inputs, (last, ""))
            else:
                kind = definition.entry.type if definition.entry is not None else ""
                tie = definition.entry.tie if definition.entry is not None else None
                node_id = prefix + definition.id
                self.flat.nodes.append(FlatNode(node_id, kind, definition.params, definition.where, tie, scopes))
        self.flat.edges += own

    def resolve(self, scope: ScopeDef, prefix: str, port: Port, inputs: dict[str, Feed]) -> Feed:
        """The flat port of a port of a scope's copy, and the codec that comes with it."""
        name, output = port
        if port == BROKEN_PORT or name in scope.inputs:
            return inputs.get(name, (BROKEN_PORT, ""))
        return flat_port(scope.nodes[name], prefix, output, self.compiled), ""

    def resolve_output(self, block: ScopeDef, copy: str, names: list[str]) -> Port:
        """The flat port of a block copy's first output."""
        port = self.compiled[block.name].outputs.get(names[0], BROKEN_PORT) if names else BROKEN_PORT
        return port if port == BROKEN_PORT else flat_port(block.nodes[port[0]], copy, port[1], self.compiled)


def copies(node: NodeDef, prefix: str) -> Iterator[str]:
    """The prefixes of a block's copies: `h.` alone, or `h.0.`, `h.1.`, … where it repeats."""
    repeat = node.entry.repeat if node.entry is not None else None
    if repeat is None:
        yield f"{prefix}{node.id}."
    else:
        for number in range(repeat):
            yield f"{prefix}{node.id}.{number}."


def flat_port(node: NodeDef, prefix: str, port: str, compiled: dict[str, CompiledScope]) -> Port:
    """The flat port that gives a node's output: for a block, that of its last copy."""
    while node.block is not None:
        inner = compiled[node.block.name].outputs.get(port, BROKEN_PORT)
        if inner == BROKEN_PORT:
            return BROKEN_PORT
        *_, prefix = copies(node, prefix)
        node, port = node.block.nodes[inner[0]], inner[1]
    return prefix + node.id, port


def _flat_output(
    top: ScopeDef, compiled: dict[str, CompiledScope], flat: Flat, scalar: Scalar, diagnostics: Diagnostics
) -> Port | None:
    """The flat port that an output of the network names: `head`, `split.0`, or a node inside a block, `h.2.add`."""
    name, _, rest = scalar.text.strip().partition(".")
    node = top.nodes.get(name)
    if node is not None and node.block is not None and rest and rest not in node.block.outputs:
        inner = node.block
        ids = {found.id for found in flat.nodes}
        if scalar.text.strip() in ids:
            local = _definition(inner, node, rest)
            ports = output_ports(local) if local is not None else None
            if ports is not None and len(ports) == 1:
                return scalar.text.strip(), ports[0]
        hint = diagnostics.suggest(scalar.text.strip(), ids)
        diagnostics.add(scalar, f"no node with one output is called {quote(scalar.text)}", hint)
        return None
    port = ScopeCompiler(top, diagnostics).output(scalar)
    return flat_port(top.nodes[port[0]], "", port[1], compiled) if port != BROKEN_PORT else None


def _definition(block: ScopeDef, node: NodeDef, rest: str) -> NodeDef | None:
    """The definition of the node that a dotted name inside a block's copy means."""
    current: NodeDef | None = node
    parts = rest.split(".")
    while parts and current is not None and current.block is not None:
        if current.entry is not None and current.entry.repeat is not None:
            parts.pop(0)
        if not parts:
            return None
        current = current.block.nodes.get(parts.pop(0))
    return current if not parts else None
