"""A stage compiled to a flat list of calls over numbered slots, so that the hot path looks nothing up.

`compile_stage` works out from the graph which slot each reader reads, where a value forks, which tensors must be made
tidy, what is sent and which tensors take the gradients that come back. Invariants:

- Operations are in the network's topological order; a run of one-input operations that nobody else reads becomes one
  chain.
- A value with three or more live readers (groups of readers, where one gradient already stands for several) passes a
  `Fork`; the others are read directly.
- A coded group that does not travel whole to another PNode is rounded here: its readers, near and far, get the rounded
  value, and their gradients are summed in order and rounded once. To the value it counts as one reader, in the place
  of its first edge. A group that travels whole has a channel of its own, whose ends code it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from networks.codecs import CodedGroup, group_of
from networks.graph import Edge, Graph, Node, NodeId, PortRef
from networks.stages import Channel, StagePlan
from networks.types import REGISTRY, VNodeModule
from pnode.codecs import round_in_place_of_travel
from pnode.forks import fork, tidy
from pnode.liveness import Liveness, counting_node

Slots = list[Any]


@dataclass(slots=True)
class Op:
    """One call. `ins`, `outs`: slots. `chain`: calls to make one after the other on a single tensor, `links`: whose."""

    node: NodeId
    call: Callable[..., Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    ports: tuple[str, ...]
    hooks: tuple[int, ...] = ()
    chain: tuple[Callable[[Any], Any], ...] = ()
    links: tuple[NodeId, ...] = ()
    between: bool = False
    """No VNode's own: a fork or a rounding."""


@dataclass(slots=True)
class Arrival:
    """A received channel: its tensor goes to `plain`; `leaves` are tensors of their own that collect gradients."""

    channel: Channel
    plain: int
    leaves: tuple[int, ...]


@dataclass(slots=True)
class Departure:
    """A sent channel: the tensor at `plain`; gradients that come back enter at `roots`, in order."""

    channel: Channel
    plain: int
    roots: tuple[int, ...]


@dataclass(slots=True)
class Program:
    """What a stage does; see the module's docstring."""

    size: int = 0
    inputs: dict[str, int] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    fused: list[Op] = field(default_factory=list)
    ports: dict[PortRef, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    def run(self, slots: Slots, ops: Sequence[Op]) -> None:
        """Carry out `ops`. Slots of inputs and arrivals are set before; the others are set by this.

        An error gets the attribute `vnode`: whose call it was.
        """
        op, link = None, 0
        try:
            for op in ops:
                ins = op.ins
                if op.chain:
                    value = slots[ins[0]]
                    for link, call in enumerate(op.chain):  # noqa: B007
                        value = call(value)
                    slots[op.outs[0]] = value
                elif len(op.outs) == 1:
                    if len(ins) == 1:
                        value = op.call(slots[ins[0]])
                    elif len(ins) == 2:
                        value = op.call(slots[ins[0]], slots[ins[1]])
                    else:
                        value = op.call(*[slots[i] for i in ins])
                    slots[op.outs[0]] = value
                else:
                    values = op.call(*[slots[i] for i in ins])
                    for out, value in zip(op.outs, values, strict=True):
                        slots[out] = value
                for hooked in op.hooks:
                    if slots[hooked].requires_grad:
                        slots[hooked].register_hook(tidy)
        except Exception as error:
            if op is not None:
                error.vnode = str(op.links[link] if op.links else op.node)  # type: ignore[attr-defined]
            raise


def compile_stage(
    graph: Graph, plan: StagePlan, stage: int, modules: Mapping[NodeId, VNodeModule], liveness: Liveness
) -> Program:
    """The program of one stage. `modules` must have their parameters where they stay: calls are bound here."""
    return _Compiler(graph, plan, stage, modules, liveness).compile()


class _Compiler:
    def __init__(
        self,
        graph: Graph,
        plan: StagePlan,
        stage: int,
        modules: Mapping[NodeId, VNodeModule],
        liveness: Liveness,
    ) -> None:
        self.graph, self.modules, self.liveness = graph, modules, liveness
        self.members = set(plan.stages[stage].nodes)
        self.ins, self.outs = plan.ins(stage), plan.outs(stage)
        self.into, self.readers = graph.in_edges(), graph.out_edges()
        self.coded = group_of(plan.groups)
        self.types = {node.id: REGISTRY[node.type] for node in graph.nodes}
        self.program = Program()

    def compile(self) -> Program:
        program = self.program
        for name in self.graph.inputs:
            mine = self._mine(PortRef(NodeId(name), ""))
            if mine:
                program.inputs[name] = slot = self._slot()
                for edge in mine:
                    program.reads[edge.index] = slot
        for channel in self.ins:
            self._arrive(channel)
        for node in self.graph.nodes:
            if node.id in self.members:
                self._compute(node)
        counting = counting_node(self.graph)
        for node in self.graph.nodes:
            if node.id in self.members and node.id in (self.graph.loss, counting):
                program.kept.update(program.ports[port] for port in program.ports if port.node == node.id)
                program.kept.update(program.reads[edge.index] for edge in self.into[node.id])
        program.fused = _fuse(program)
        return program

    def _slot(self) -> int:
        self.program.size += 1
        return self.program.size - 1

    def _mine(self, port: PortRef) -> list[Edge]:
        return [edge for edge in self.readers.get(port, []) if edge.dst.node in self.members]

    def _untidy(self, edges: Sequence[Edge]) -> bool:
        """Whether a gradient that comes back along one of these edges may be laid out unusually."""
        return any(not self.types[edge.dst.node].tidy_gradients for edge in self.liveness.edges(edges))

    def _arrive(self, channel: Channel) -> None:
        reads, live = self.program.reads, self.liveness.edges(channel.edges)
        plain = self._slot()
        for edge in channel.edges:
            reads[edge.index] = plain
        if not live:
            self.program.arrivals.append(Arrival(channel, plain, ()))
        elif channel.presum:
            leaf = self._slot()
            if len(live) >= 3:
                self._fork(channel.port.node, leaf, [[edge] for edge in live])
            else:
                for edge in live:
                    reads[edge.index] = leaf
            self.program.arrivals.append(Arrival(channel, plain, (leaf,)))
        else:
            leaves = []
            for edge in live:
                reads[edge.index] = self._slot()
                leaves.append(reads[edge.index])
            self.program.arrivals.append(Arrival(channel, plain, tuple(leaves)))

    def _fork(self, node: NodeId, slot: int, groups: Sequence[Sequence[Edge]]) -> list[int]:
        count = len(groups)
        branches = [self._slot() for _ in groups]
        self.program.ops.append(Op(node, lambda value: fork(value, count), (slot,), tuple(branches), (), between=True))
        for branch, group in zip(branches, groups, strict=True):
            for edge in group:
                if edge.dst.node in self.members:
                    self.program.reads[edge.index] = branch
        return branches

    def _compute(self, node: Node) -> None:
        kind, program = self.types[node.id], self.program
        by_port = {edge.dst.port: edge for edge in self.into[node.id]}
        edges = self.into[node.id] if kind.variadic else [by_port[port] for port in kind.inputs(node.params)]
        ports = kind.outputs(node.params)
        outs = tuple(self._slot() for _ in ports)
        call = self.modules[node.id].bind()
        if not kind.tidy_output:
            call = _tidied(call) if len(ports) == 1 else _tidied_all(call)
        op = Op(node.id, call, tuple(program.reads[edge.index] for edge in edges), outs, tuple(ports))
        program.ops.append(op)
        hooks = []
        for name, slot in zip(ports, outs, strict=True):
            port = PortRef(node.id, name)
            program.ports[port] = slot
            if self._leave(port, slot):
                hooks.append(slot)
        op.hooks = tuple(hooks)

    def _leave(self, port: PortRef, slot: int) -> bool:
        """Connect a new value with its readers; whether gradients that reach it must be made tidy."""
        readers = self.readers.get(port, [])
        channels = [channel for channel in self.outs if channel.port == port]
        travels = {channel.edges[0].index for channel in channels if channel.codec}
        rounded = [group for group in self._groups(readers) if group.edges[0] not in travels]
        inner = {edge for group in rounded for edge in group.edges}
        outer = [channel for channel in channels if channel.edges[0].index not in inner]
        branches = self._spread(port.node, slot, readers, outer, rounded)
        for group in rounded:
            edges = [edge for edge in readers if edge.index in group.edges]
            out = self._round(port.node, branches.get(group.edges[0], slot), group.codec)
            behind = [channel for channel in channels if channel.edges[0].index in group.edges]
            self._spread(port.node, out, edges, behind, ())
        mine = [edge for edge in readers if edge.dst.node in self.members and edge.index not in inner]
        return not branches and self._untidy(mine)

    def _groups(self, readers: Sequence[Edge]) -> list[CodedGroup]:
        """The coded groups among a value's readers, by first edge."""
        return list(dict.fromkeys(self.coded[edge.index] for edge in readers if edge.index in self.coded))

    def _round(self, node: NodeId, slot: int, codec: str) -> int:
        out = self._slot()
        call = partial(round_in_place_of_travel, codec=codec)
        self.program.ops.append(Op(node, call, (slot,), (out,), (), between=True))
        return out

    def _spread(
        self,
        node: NodeId,
        slot: int,
        readers: Sequence[Edge],
        channels: Sequence[Channel],
        rounded: Sequence[CodedGroup],
    ) -> dict[int, int]:
        """Connect the value in `slot` with its readers, each channel that sums and each rounded group as one of them.

        Returns the branch of each live part by its first edge if it forks; else nothing, since all read `slot`.
        """
        program = self.program
        channel_of = {edge.index: channel for channel in channels for edge in channel.edges}
        group_of_edge = group_of(rounded)
        parts: dict[int, list[Edge]] = {}
        owner: dict[int, Channel | None] = {}
        for edge in readers:
            channel, group = channel_of.get(edge.index), group_of_edge.get(edge.index)
            if edge.dst.node in self.members:
                program.reads[edge.index] = slot
            first = edge.index
            if group is not None:
                first = group.edges[0]
            elif channel is not None and channel.presum:
                first = channel.edges[0].index
            parts.setdefault(first, []).append(edge)
            owner[first] = channel if group is None else None
        live = {first: found for first, edges in parts.items() if (found := self.liveness.edges(edges))}
        branches: dict[int, int] = {}
        if len(live) >= 3:
            branches = dict(zip(live, self._fork(node, slot, [*live.values()]), strict=True))
        for channel in channels:
            roots = tuple(branches.get(first, slot) for first in live if owner[first] is channel)
            program.departures.append(Departure(channel, slot, roots))
        return branches


def _tidied(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: tidy(call(*inputs))


def _tidied_all(call: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda *inputs: [tidy(value) for value in call(*inputs)]


def _fuse(program: Program) -> list[Op]:
    """The operations with runs of one-input, one-output ones joined where only the next one reads the value."""
    uses: dict[int, int] = {}
    for op in program.ops:
        for slot in op.ins:
            uses[slot] = uses.get(slot, 0) + 1
    kept = program.kept | {slot for leave in program.departures for slot in (leave.plain, *leave.roots)}
    fused: list[Op] = []
    for op in program.ops:
        last = fused[-1] if fused else None
        simple = len(op.ins) == 1 and len(op.outs) == 1 and not op.between
        if (
            last is not None
            and simple
            and not last.hooks
            and last.chain
            and last.outs == op.ins
            and uses[op.ins[0]] == 1
            and op.ins[0] not in kept
        ):
            chain, links = (*last.chain, op.call), (*last.links, op.node)
            fused[-1] = Op(last.node, last.call, last.ins, op.outs, op.ports, op.hooks, chain, links)
        else:
            chain, links = ((op.call,), (op.node,)) if simple else ((), ())
            fused.append(Op(op.node, op.call, op.ins, op.outs, op.ports, op.hooks, chain, links))
    return fused
