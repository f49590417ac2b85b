"""The names of one scope (a block, or the file's top level) resolved: chains taken apart, every edge given its ports.

A bare name in an edge means the node's only port; several free ports are taken in order, variadic ones (`add`,
`concat`) in the order of the edges. In the middle of a chain, `a -> b.port -> c` names an input port of b if b has one
of that name, else an output port. An arrow may name a codec, `a -int8-> b`: it belongs to the edge that it draws.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from networks.codecs import WISHES
from networks.diagnostics import Diagnostics, Place, Spot, quote
from networks.document import DEFAULT_OUTPUT, NodeDef, ScopeDef
from networks.yaml_source import Mapping, Scalar

ENDPOINT = re.compile(r"([a-z0-9][a-z0-9_-]{0,62})(?:\.([a-z0-9_-]{1,63}))?")
ARROW = re.compile(r"(?<=\s)-([A-Za-z0-9_]*)->|->")
"""A plain arrow, or one with a codec, which needs a space before it: `a-int8->b` has always meant the node a-int8."""

Port = tuple[str, str]
"""A node's id and a port, in one scope or in the flat graph; an input has port ""."""

BROKEN_PORT: Port = ("", "?")
"""Where a value should come from, but an error that is noted already hides what it is."""


@dataclass(slots=True, eq=False)
class Link:
    """An edge inside one scope, both ports known."""

    src: Port
    dst: Port
    where: Place
    codec: str = ""


@dataclass(slots=True, eq=False)
class CompiledScope:
    """A scope whose names are resolved."""

    scope: ScopeDef
    links: list[Link] = field(default_factory=list)
    outputs: dict[str, Port] = field(default_factory=dict)
    nodes: int = 0
    edges: int = 0


def input_ports(node: NodeDef) -> tuple[list[str], bool] | None:
    """Names of a node's input ports, and whether it takes any number of them; None if the node is broken."""
    if node.block is not None:
        return ([*node.block.inputs], False) if node.block.inputs else None
    if node.kind is None or node.params is None:
        return None
    return node.kind.inputs(node.params), node.kind.variadic


def output_ports(node: NodeDef) -> list[str] | None:
    """Names of a node's output ports; None if the node is broken."""
    if node.block is not None:
        return [*node.block.outputs] or None
    if node.kind is None or node.params is None:
        return None
    return node.kind.outputs(node.params)


@dataclass(slots=True)
class _End:
    """One element of a chain."""

    name: str
    port: str | None
    where: Spot
    codec: str = ""
    """Of the arrow that leads here."""


class ScopeCompiler:
    """Resolves the edges and outputs of one scope."""

    def __init__(self, scope: ScopeDef, diagnostics: Diagnostics) -> None:
        self.scope = scope
        self.diagnostics = diagnostics
        self.read: set[str] = set()

    def compile(self) -> CompiledScope:
        """Links with both ports, and the scope's outputs; what is wrong is noted."""
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
        found = CompiledScope(scope)
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
        ends: list[_End] = []
        begin = scalar.column + scalar.quoted
        at, codec = 0, ""
        for arrow in (*ARROW.finditer(scalar.text), None):
            part = scalar.text[at : arrow.start() if arrow is not None else None]
            word = part.strip()
            spot = Spot(scalar.source, scalar.line, begin + at + len(part) - len(part.lstrip()))
            match = ENDPOINT.fullmatch(word)
            if match is None:
                text = f"{quote(word)} is not a name" if word else "a name is missing"
                self.diagnostics.add(spot, f"{text} in edge {quote(scalar.text)}", "write 'a -> b' or 'a.port -> b'")
                return None
            ends.append(_End(match[1], match[2], spot, codec))
            if arrow is None:
                break
            at, codec = arrow.end(), arrow[1] or ""
            if arrow[1] is not None and codec not in WISHES:
                where = Spot(scalar.source, scalar.line, begin + arrow.start() + 1)
                hint = self.diagnostics.suggest(codec, WISHES) or f"there are {', '.join(WISHES)}"
                self.diagnostics.add(where, f"no codec is called {quote(codec)}", hint)
                codec = ""
        if len(ends) < 2:
            self.diagnostics.add(scalar, f"{quote(scalar.text)} is not an edge", "write 'a -> b'")
            return None
        return ends

    def known(self, end: _End) -> bool:
        """Whether a name is one of the scope's; notes it if not."""
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
        """Whether the node has an input port of that name."""
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
        """Note a port that the node does not have."""
        hint = self.diagnostics.suggest(str(end.port), ports)
        hint = hint or (f"it has {', '.join(ports[:8])}" if ports else "any number: 0, 1, …")
        self.diagnostics.add(end.where, f"{quote(end.name)} has no {what} port {quote(end.port)}", hint)

    def assign(self, raw: list[tuple[Port, _End]], found: CompiledScope, complete: bool) -> None:
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
            found.links.append(Link(source, (node.id, port), end.where, end.codec))
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
        """Note input ports that no edge drives, unless edges with errors may be the reason."""
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
        match = ENDPOINT.fullmatch(scalar.text.strip())
        if match is None:
            self.diagnostics.add(scalar, f"{quote(scalar.text)} is not a node", "write NODE or NODE.PORT")
            return BROKEN_PORT
        end = _End(match[1], match[2], Spot(scalar.source, scalar.line, scalar.column + scalar.quoted))
        if end.name in self.scope.inputs:
            self.diagnostics.add(scalar, f"output {quote(end.name)} is an input", "name a node")
            return BROKEN_PORT
        return self.source(end, first=True)

    def check_repeats(self) -> None:
        """Note blocks that can't be chained."""
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


def _order_variadic(links: list[Link], scope: ScopeDef) -> None:
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


def shown(port: Port) -> str:
    """A port as people write it: the node alone where it has one plain output."""
    return port[0] if port[1] in ("", DEFAULT_OUTPUT) else f"{port[0]}.{port[1]}"


def _id_place(node: NodeDef) -> Place:
    return node.where.items.get("id", node.where) if isinstance(node.where, Mapping) else node.where
