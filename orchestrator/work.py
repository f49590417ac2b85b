"""What a network costs and what a machine can do, in the numbers that placement decides on. Pure, no torch.

All figures are per training step of the whole batch. Invariants:

- A node's `operations` are its FLOPs, plus the bytes it touches times `Calibration.operations_per_byte`: a layernorm
  or an add is bound by memory, not by arithmetic.
- A `Value` is what one node makes and other nodes read: it travels to each other machine that reads it, once per
  microbatch, and its gradient travels back. A tied weight is a value too: its gradient and its new version cross once
  per step.
- Inputs of the network are no values: data are read where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from networks.codecs import AUTO, CODECS, INT8, NONE, CodedGroup, coded_spec_bytes, wish_of
from networks.graph import BATCH, DTYPE_BYTES, Graph, NodeId, TensorSpec

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of the cost model, measured once on ordinary CPUs; a caller with better figures passes its own."""

    operations_per_byte: float = 10.0
    """FLOPs that pass while one byte is read or written."""
    node_s: float = 8e-6
    """Fixed time of one node's forward or backward pass: the interpreter and the dispatcher."""
    hop_s: float = 400e-6
    """Fixed time from the end of what makes a hop to its arrival: threads and loops are woken, nothing is sent yet."""
    hop_busy_s: float = 60e-6
    """Part of it that each end's compute thread loses."""
    parameter_operations: float = 16.0
    """Operations per parameter and step in the optimizer's update."""
    tensor_s: float = 15e-6
    """Fixed time per parameter tensor and step in the optimizer's update."""
    step_s: float = 1e-3
    """Fixed time of a step: batch, reports, verdict."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A PNode as placement sees it: speed in operations per second, memory, and its link to the others."""

    id: str
    speed: float
    memory_bytes: int
    link_bytes_s: float
    latency_s: float
    host: str = ""

    @property
    def kind(self) -> tuple[float, int, float, float]:
        """Machines of one kind are interchangeable."""
        return (self.speed, self.memory_bytes, self.link_bytes_s, self.latency_s)


@dataclass(frozen=True, slots=True)
class Value:
    """What node `maker` makes for `readers` (positions in topological order, ascending)."""

    maker: int
    readers: tuple[int, ...]
    step_bytes: int
    """Bytes per step to one other machine: activations there and gradients back, or a tie's gradient and version."""
    step_hops: int
    held_bytes: int = 0
    """Memory of the reader's own copy (ties)."""


@dataclass(frozen=True, slots=True)
class Work:
    """A network with a recipe, as costs per node in topological order; see the module's docstring."""

    graph: Graph
    nodes: tuple[NodeId, ...]
    batch: int
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    tensors: tuple[int, ...]
    static_bytes: tuple[int, ...]
    stash_bytes: tuple[int, ...]
    values: tuple[Value, ...]
    pins: tuple[str | None, ...]
    order: dict[NodeId, int]
    state_bytes: tuple[int, ...] = ()
    """What a node's part of a checkpoint holds: parameters, optimizer state, buffers."""
    calibration: Calibration = field(default_factory=Calibration)
    codec: str = NONE
    """The recipe's: what edges ask for that say nothing themselves."""
    coded: tuple[CodedGroup, ...] | None = None
    """The groups of a run that was placed before; None: to be chosen."""
    small_values: tuple[Value, ...] = ()
    """The values if `auto` means int8 everywhere; empty where nothing is left to `auto`."""

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.forward)

    def fixed_s(self, node: int) -> float:
        """Time per step of that node that no faster machine shortens."""
        return 2 * self.microbatches * self.calibration.node_s + self.tensors[node] * self.calibration.tensor_s

    def operations(self, node: int) -> float:
        """All operations of that node in one step."""
        return self.forward[node] + self.backward[node] + self.update[node]


def step_bytes(spec: TensorSpec, batch: int, microbatches: int) -> int:
    """Bytes of all microbatches' tensors of that spec in one step."""
    return spec.size_bytes(batch) if BATCH in spec.shape else spec.size_bytes(1) * microbatches


def coded_step_bytes(spec: TensorSpec, codec: str, batch: int, microbatches: int) -> int:
    """The same under a codec."""
    if codec not in CODECS:
        return step_bytes(spec, batch, microbatches)
    return (
        coded_spec_bytes(codec, spec, batch) if BATCH in spec.shape else coded_spec_bytes(codec, spec, 1) * microbatches
    )


def with_gradient(graph: Graph) -> set[NodeId]:
    """Nodes whose outputs carry a gradient: a parameter (or a tied one) is at or above them."""
    found: set[NodeId] = set()
    into = graph.in_edges()
    for node in graph.nodes:
        own = node.tie is not None or bool(graph.costs[node.id].parameters)
        if own or any(edge.src.node in found for edge in into[node.id]):
            found.add(node.id)
    return found


def work_of(
    graph: Graph,
    *,
    batch: int,
    microbatches: int,
    optimizer_slots: int = 2,
    calibration: Calibration | None = None,
    codec: str = NONE,
) -> Work:
    """The costs of one training step. `optimizer_slots`: tensors of a parameter's size that the optimizer keeps.

    `codec`: the recipe's. A value counts with the bytes of the mildest codec that an edge of it asks for, `auto` as
    none.
    """
    calibration = calibration or Calibration()
    position = {node.id: node.order for node in graph.nodes}
    grads = with_gradient(graph)
    into = graph.in_edges()
    touched = [0] * len(graph.nodes)
    stash = [0] * len(graph.nodes)
    values: list[Value] = []
    small: list[Value] = []
    for node in graph.nodes:
        outputs = sum(step_bytes(spec, batch, microbatches) for spec in graph.costs[node.id].outputs.values())
        stash[node.order] = -(-outputs // microbatches)
        touched[node.order] = outputs
    for node in graph.nodes:
        for edge in into[node.id]:
            spec = (
                graph.inputs[edge.src.node]
                if edge.src.node in graph.inputs
                else graph.costs[edge.src.node].outputs.get(edge.src.port)
            )
            if spec is not None:
                touched[node.order] += step_bytes(spec, batch, microbatches)
    for port, edges in graph.out_edges().items():
        if port.node in graph.inputs:
            continue
        spec = graph.costs[port.node].outputs[port.port]
        back = spec.dtype in _FLOATS and port.node in grads
        readers = tuple(sorted({position[edge.dst.node] for edge in edges}))
        wishes = {wish_of(graph, edge.index, codec) for edge in edges}
        for found, auto in ((values, NONE), (small, INT8)):
            asked = {auto if wish == AUTO else wish for wish in wishes}
            there = max(coded_step_bytes(spec, one, batch, microbatches) for one in asked)
            found.append(Value(position[port.node], readers, there * (1 + back), 2 * microbatches))
    for owner, users in graph.ties().items():
        size = sum(spec.size_bytes(1) for spec in _tied(graph, owner))
        tie = Value(position[owner], tuple(sorted(position[user] for user in users)), 2 * size, 2, 2 * size)
        values.append(tie)
        small.append(tie)
    forward, backward, update, tensors, static, state = [], [], [], [], [], []
    for node in graph.nodes:
        cost = graph.costs[node.id]
        moved = calibration.operations_per_byte * touched[node.order]
        forward.append(cost.forward_flops * batch + moved)
        backward.append(cost.backward_flops * batch + 2 * moved if node.id in grads else 0.0)
        weights = sum(spec.size_bytes(1) for spec in cost.parameters.values())
        count = sum(spec.size_bytes(1) // DTYPE_BYTES[spec.dtype] for spec in cost.parameters.values())
        update.append(count * calibration.parameter_operations)
        tensors.append(len(cost.parameters))
        state.append(weights * (1 + optimizer_slots) + sum(spec.size_bytes(1) for spec in cost.buffers.values()))
        static.append(state[-1] + weights)
    return Work(
        graph=graph,
        nodes=tuple(node.id for node in graph.nodes),
        batch=batch,
        microbatches=microbatches,
        forward=tuple(forward),
        backward=tuple(backward),
        update=tuple(update),
        tensors=tuple(tensors),
        static_bytes=tuple(static),
        stash_bytes=tuple(stash),
        values=tuple(values),
        pins=tuple(graph.pins.get(node.id) for node in graph.nodes),
        order=position,
        state_bytes=tuple(state),
        calibration=calibration,
        codec=codec,
        small_values=tuple(small) if small != values else (),
    )


def _tied(graph: Graph, owner: NodeId) -> list[TensorSpec]:
    """The shared tensors of a tie's owner: its weight, or all its parameters where none has that name."""
    parameters = graph.costs[owner].parameters
    return [parameters["weight"]] if "weight" in parameters else list(parameters.values())
