"""From nested scopes to one flat list of nodes and edges: chains taken apart, ports found, blocks copied.

The order of the expanded file, which decides the order of all sums:

- nodes: as written, the copies of a block in the place of the node that stands for it;
- edges: for each node that stands for a block, in the order of nodes, the edges inside its copies; then the scope's
  own.

A bare name in an edge means the node's only port; several free ports are taken in order, variadic ones (`add`,
`concat`) in the order of the edges. In the middle of a chain, `a -> b.port -> c` names an input port of b if b has one
of that name, else an output port.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from networks.diagnostics import Diagnostics, Place, Spot, quote
from networks.document import DEFAULT_OUTPUT, NodeDef, ScopeDef
from networks.types import NodeParams
from networks.yaml_source import Mapping, Scalar

MAX_NODES = 100_000
MAX_EDGES = 500_000
MAX_NESTING = 8

_ENDPOINT = re.compile(r"([a-z0-9][a-z0-9_-]{0,62})(?:\.([a-z0-9_-]{1,63}))?")

Port = tuple[str, str]
"""A node's id and a port, in one scope or in the flat graph; an input has port ""."""

BROKEN_PORT: Port = ("", "?")
"""Where a value should come from, but an error that is noted already hides what it is."""


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


@dataclass(slots=True, eq=False)
class Flat:
    """The expanded file."""

    nodes: list[FlatNode] = field(default_factory=list)
    edges: list[FlatEdge] = field(default_factory=list)
    outputs: dict[str, tuple[Port, Place]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Link:
    src: Port
    dst: Port
    where: Place


@dataclass(slots=True, eq=False)
class _Compiled:
    """A scope whose names are resolved."""

    scope: ScopeDef
    links: list[_Link] = field(default_factory=list)
    outputs: dict[str, Port] = field(default_factory=dict)
    nodes: int = 0
    edges: int = 0


def expand(top: ScopeDef, blocks: dict[str, ScopeDef], diagnostics: Diagnostics) -> Flat | None:
    """The flat graph of a file; None where blocks contain themselves or are too large (noted)."""
    order = _block_order(blocks, diagnostics)
    if order is None:
        return None
    compiled: dict[str, _Compiled] = {}
    for scope in (*order, top):
        found = _Compiler(scope, diagnostics).compile()
        compiled[scope.name] = found
        for node in scope.nodes.values():
            inner = compiled.get(node.block.name) if node.block is not None else None
            times = (node.entry.repeat or 1) if node.entry is not None else 1
            found.nodes += inner.nodes * times if inner is not None else 1
            found.edges += inner.edges * times if inner is not None else 0
            if found.nodes > MAX_NODES or found.edges > MAX_EDGES:
                text = f"blocks written out give more than {MAX_NODES:,} nodes or {MAX_EDGES:,} edges"
                diagnostics.add(node.where, text, "repeat less")
                return None
        found.edges += len(found.links)
    flat = Flat()
    writer = _Writer(compiled, flat)
    writer.write(top, "", ("",), {name: (name, "") for name in top.inputs})
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
                raise _RecursiveBlock
            depth = max(depth, 1 + visit(node.block, [*path, node.block.name]))
        if depth > MAX_NESTING:
            diagnostics.add(scope.where, f"blocks are nested deeper than {MAX_NESTING} levels", "flatten them")
            raise _RecursiveBlock
        done[scope.name] = depth
        order.append(scope)
        return depth

    try:
        for scope in blocks.values():
            visit(scope, [scope.name])
    except _RecursiveBlock:
        return None
    return order


class _RecursiveBlock(Exception):
    pass


def input_ports(node: NodeDef) -> tuple[list[str], bool] | None:
    """Names of a node's input ports, and whether it takes any number of them; None if the node is broken."""
    if node.block is not None:
        return [*node.block.inputs], False
    if node.kind is None or node.params is None:
        return None
    return node.kind.inputs(node.params), node.kind.variadic


def output_ports(node: NodeDef) -> list[str] | None:
    """Names of a node's output ports; None if the node is broken."""
    if node.block is not None:
        return [*node.block.outputs]
    if node.kind is None or node.params is None:
        return None
    return node.kind.outputs(node.params)


@dataclass(slots=True)
class _End:
    """One element of a chain."""

    name: str
    port: str | None
    where: Spot


class _Compiler:
    """Resolves the edges and outputs of one scope."""

    def __init__(self, scope: ScopeDef, diagnostics: Diagnostics) -> None:
        self.scope = scope
        self.diagnostics = diagnostics
        self.read: set[str] = set()

    def compile(self) -> _Compiled:
        scope = self.scope
        raw: list[tuple[Port, _End]] = []
        complete = not scope.broken_nodes
        for scalar in scope.edges:
            ends = self.chain(scalar)
            complete = complete and ends is not None
            for index, right in enumerate((ends or [])[1:]):
                assert ends is not None
                source = self.source(ends[index], first=index == 0)
                target = self.is_target(right)
                complete = complete and target and source != BROKEN_PORT
                if target:
                    raw.append((source, right))
        found = _Compiled(scope)
        self.assign(raw, found, complete)
        for name, scalar in scope.outputs.items():
            if scope.name:
                found.outputs[name] = self.output(scalar)
        self.check_repeats()
        if complete:
            for name, where in scope.inputs.items():
                if name not in self.read:
                    owner = f"of block {quote(scope.name)} " if scope.name else ""
                    self.diagnostics.add(where, f"input {quote(name)} {owner}is never used", "connect or remove it")
        return found

    def chain(self, scalar: Scalar) -> list[_End] | None:
        """The elements of `a -> b.port -> c`, each with its column; None after noting a fault."""
        parts = scalar.text.split("->")
        ends: list[_End] = []
        at = scalar.column + scalar.quoted
        for part in parts:
            word = part.strip()
            spot = Spot(scalar.source, scalar.line, at + len(part) - len(part.lstrip()))
            at += len(part) + 2
            match = _ENDPOINT.fullmatch(word)
            if match is None:
                text = f"{quote(word)} is not a name" if word else "a name is missing"
                self.diagnostics.add(spot, f"{text} in edge {quote(scalar.text)}", "write 'a -> b' or 'a.port -> b'")
                return None
            ends.append(_End(match[1], match[2], spot))
        if len(ends) < 2:
            self.diagnostics.add(scalar, f"{quote(scalar.text)} is not an edge", "write 'a -> b'")
            return None
        return ends

    def known(self, end: _End) -> bool:
        if end.name in self.scope.nodes or end.name in self.scope.inputs:
            return True
        if self.scope.broken_nodes:
            return False
        names = [*self.scope.nodes, *self.scope.inputs]
        where = f"in block {quote(self.scope.name)} " if self.scope.name else ""
        hint = self.diagnostics.suggest(end.name, names)
        self.diagnostics.add(end.where, f"no node or input {where}is called {quote(end.name)}", hint)
        return False

    def source(self, end: _End, *, first: bool) -> Port:
        """The output port (or input of the scope) that an element of a chain stands for as a source."""
        node = self.scope.nodes.get(end.name)
        if node is None:
            if (first and not self.known(end)) or end.name not in self.scope.inputs:
                return BROKEN_PORT
            self.read.add(end.name)
            if end.port is not None:
                self.diagnostics.add(end.where, f"input {quote(end.name)} has no ports", f"write '{end.name}'")
                return BROKEN_PORT
            return end.name, ""
        ports = output_ports(node)
        if ports is None:
            return BROKEN_PORT
        port = end.port
        if not first and port is not None and self.is_input_port(node, port):
            port = None
        if port is not None:
            if port not in ports and first:
                self.unknown_port(end, "output", ports)
            return (node.id, port) if port in ports else BROKEN_PORT
        if len(ports) > 1:
            listed = ", ".join(f"{node.id}.{name}" for name in ports[:8])
            self.diagnostics.add(end.where, f"{quote(node.id)} has several outputs", f"say which: {listed}")
        return (node.id, ports[0]) if len(ports) == 1 else BROKEN_PORT

    def is_input_port(self, node: NodeDef, port: str) -> bool:
        ports = input_ports(node)
        return ports is not None and (port in ports[0] or (ports[1] and port.isdigit()))

    def is_target(self, end: _End) -> bool:
        """Whether an element of a chain can be driven."""
        if not self.known(end):
            return False
        if end.name in self.scope.inputs:
            text = f"{quote(end.name)} is an input; nothing can lead to it"
            self.diagnostics.add(end.where, text, "inputs begin a chain")
            return False
        return True

    def unknown_port(self, end: _End, what: str, ports: list[str]) -> None:
        hint = self.diagnostics.suggest(str(end.port), ports)
        hint = hint or (f"it has {', '.join(ports[:8])}" if ports else "any number: 0, 1, …")
        self.diagnostics.add(end.where, f"{quote(end.name)} has no {what} port {quote(end.port)}", hint)

    def assign(self, raw: list[tuple[Port, _End]], found: _Compiled, complete: bool) -> None:
        """Give each edge its input port; note ports that are driven twice or not at all."""
        taken: dict[str, dict[str, tuple[Port, Spot]]] = {name: {} for name in self.scope.nodes}
        explicit: dict[str, set[str]] = {name: set() for name in self.scope.nodes}
        for _, end in raw:
            if end.port is not None:
                explicit[end.name].add(end.port)
        following = dict.fromkeys(self.scope.nodes, 0)
        for source, end in raw:
            node = self.scope.nodes[end.name]
            ports = input_ports(node)
            if ports is None:
                continue
            names, variadic = ports
            port = end.port if end.port is not None and self.is_input_port(node, end.port) else None
            if port is None and end.port is not None and end.port not in (output_ports(node) or ()):
                self.unknown_port(end, "input", names)
                complete = False
                continue
            if port is None:
                port = self.next_port(node, names, variadic, explicit[node.id], taken[node.id], following)
            if port in taken[node.id]:
                first, where = taken[node.id][port]
                label = f"{node.id}.{port}" if len(names) != 1 else node.id
                text = f"{quote(label)} already gets {quote(shown(first))}, on line {where.line}"
                hint = "join values by a node of type 'add' or 'concat'"
                self.diagnostics.add(end.where, text, hint)
                continue
            taken[node.id][port] = (source, end.where)
            found.links.append(_Link(source, (node.id, port), end.where))
        self.check_driven(taken, complete)
        _order_variadic(found.links, self.scope)

    def next_port(
        self,
        node: NodeDef,
        names: list[str],
        variadic: bool,
        explicit: set[str],
        taken: dict[str, tuple[Port, Spot]],
        following: dict[str, int],
    ) -> str:
        """The port that a bare name means: the next free one, else the last one (which is then driven twice)."""
        if variadic:
            number = following[node.id]
            while str(number) in explicit or str(number) in taken:
                number += 1
            following[node.id] = number + 1
            return str(number)
        for name in names:
            if name not in explicit and name not in taken:
                return name
        return names[-1]

    def check_driven(self, taken: dict[str, dict[str, tuple[Port, Spot]]], complete: bool) -> None:
        for node in self.scope.nodes.values():
            ports = input_ports(node)
            if ports is None or not complete:
                continue
            names, variadic = ports
            have = taken[node.id]
            if variadic:
                names = [str(number) for number in range(max(1, len(have)))]
            missing = [name for name in names if name not in have]
            if not missing:
                continue
            if len(names) == 1:
                text = f"{quote(node.id)} gets no input"
                hint = f"add an edge such as '… -> {node.id}'"
            else:
                text = f"{quote(node.id)} gets nothing at {', '.join(quote(name) for name in missing[:8])}"
                hint = f"add an edge such as '… -> {node.id}.{missing[0]}'"
            self.diagnostics.add(_id_place(node), text, hint)

    def output(self, scalar: Scalar) -> Port:
        """The port that a block's output names."""
        match = _ENDPOINT.fullmatch(scalar.text.strip())
        if match is None:
            self.diagnostics.add(scalar, f"{quote(scalar.text)} is not a node", "write NODE or NODE.PORT")
            return BROKEN_PORT
        end = _End(match[1], match[2], Spot(scalar.source, scalar.line, scalar.column + scalar.quoted))
        if end.name in self.scope.inputs:
            self.diagnostics.add(scalar, f"output {quote(end.name)} is an input", "name a node")
            return BROKEN_PORT
        return self.source(end, first=True)

    def check_repeats(self) -> None:
        for node in self.scope.nodes.values():
            if (
                node.block is None
                or node.entry is None
                or node.entry.repeat is None
                or not isinstance(node.where, Mapping)
            ):
                continue
            if len(node.block.inputs) != 1 or len(node.block.outputs) != 1:
                text = f"only a block with one input and one output can repeat, {quote(node.block.name)} has "
                text += f"{len(node.block.inputs)} and {len(node.block.outputs)}"
                self.diagnostics.add(node.where.items["repeat"], text, "remove 'repeat'")


def _order_variadic(links: list[_Link], scope: ScopeDef) -> None:
    """Let the edges into each variadic node stand in the order of their ports, in the places they have together."""
    places: dict[str, list[int]] = {}
    for index, link in enumerate(links):
        kind = scope.nodes[link.dst[0]].kind
        if kind is not None and kind.variadic:
            places.setdefault(link.dst[0], []).append(index)
    for indices in places.values():
        ordered = sorted((links[index] for index in indices), key=lambda link: int(link.dst[1]))
        for index, link in zip(indices, ordered, strict=True):
            links[index] = link


class _Writer:
    """Writes the copies of all blocks into one flat graph."""

    def __init__(self, compiled: dict[str, _Compiled], flat: Flat) -> None:
        self.compiled = compiled
        self.flat = flat

    def write(self, scope: ScopeDef, prefix: str, scopes: tuple[str, ...], inputs: dict[str, Port]) -> None:
        """Nodes and edges of one copy of a scope; `inputs` says what drives its inputs."""
        mine = self.compiled[scope.name]
        driven: dict[str, dict[str, Port]] = {}
        own: list[FlatEdge] = []
        for link in mine.links:
            source = self.resolve(scope, prefix, link.src, inputs)
            node, port = link.dst
            if scope.nodes[node].block is not None:
                driven.setdefault(node, {})[port] = source
            else:
                own.append(FlatEdge(source, (prefix + node, port), link.where))
        for definition in scope.nodes.values():
            if definition.block is not None:
                feeds = driven.get(definition.id, {})
                for copy in copies(definition, prefix):
                    self.write(definition.block, copy, (copy, *scopes), feeds)
                    last = self.resolve_output(definition.block, copy, [*definition.block.outputs][:1])
                    feeds = dict.fromkeys(definition.block.inputs, last)
            else:
                kind = definition.entry.type if definition.entry is not None else ""
                tie = definition.entry.tie if definition.entry is not None else None
                node_id = prefix + definition.id
                self.flat.nodes.append(FlatNode(node_id, kind, definition.params, definition.where, tie, scopes))
        self.flat.edges += own

    def resolve(self, scope: ScopeDef, prefix: str, port: Port, inputs: dict[str, Port]) -> Port:
        """The flat port of a port of a scope's copy."""
        name, output = port
        if port == BROKEN_PORT or name in scope.inputs:
            return inputs.get(name, BROKEN_PORT)
        return flat_port(scope.nodes[name], prefix, output, self.compiled)

    def resolve_output(self, block: ScopeDef, copy: str, names: list[str]) -> Port:
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


def flat_port(node: NodeDef, prefix: str, port: str, compiled: dict[str, _Compiled]) -> Port:
    """The flat port that gives a node's output: for a block, that of its last copy."""
    while node.block is not None:
        inner = compiled[node.block.name].outputs.get(port, BROKEN_PORT)
        if inner == BROKEN_PORT:
            return BROKEN_PORT
        *_, prefix = copies(node, prefix)
        node, port = node.block.nodes[inner[0]], inner[1]
    return prefix + node.id, port


def _flat_output(
    top: ScopeDef, compiled: dict[str, _Compiled], flat: Flat, scalar: Scalar, diagnostics: Diagnostics
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
    port = _Compiler(top, diagnostics).output(scalar)
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


def shown(port: Port) -> str:
    """A port as people write it: the node alone where it has one plain output."""
    return port[0] if port[1] in ("", DEFAULT_OUTPUT) else f"{port[0]}.{port[1]}"


def _id_place(node: NodeDef) -> Place:
    return node.where.items.get("id", node.where) if isinstance(node.where, Mapping) else node.where
