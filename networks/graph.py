"""What a network is once its file has been read: a flat graph of typed nodes and the edges between their ports.

Blocks are unrolled, expressions evaluated, names resolved. Invariants:

- `nodes` is in the network's one topological order (Kahn's algorithm, ties broken by place in the expanded file);
  every process computes in this order, so sums are made in the same order everywhere.
- `edges` is in the order of the expanded file; `Edge.index` is the position in it. Where a value has several
  readers, its gradients are summed in this order.
- An edge that starts at an input of the network has `src.node` equal to that input's name and an empty port.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from networks.types import NodeParams

NodeId = NewType("NodeId", str)

BATCH = "batch"


@dataclass(frozen=True, slots=True)
class PortRef:
    """One port of one node: `split.0` is `PortRef("split", "0")`. An input of the network has port ""."""

    node: NodeId
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}" if self.port else str(self.node)


@dataclass(frozen=True, slots=True)
class Edge:
    """A value's way from an output port (or an input of the network) to an input port."""

    index: int
    src: PortRef
    dst: PortRef
    codec: str = ""
    """What the file asks for on this edge (networks.codecs); "" leaves it to the recipe."""

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype (torch's short name, such as `float32`) and shape; the symbol "batch" stands for the batch dimension."""

    dtype: str
    shape: tuple[int | str, ...]

    def size_bytes(self, batch: int) -> int:
        """Bytes of one such tensor for a microbatch of `batch` samples."""
        count = 1
        for extent in self.shape:
            count *= batch if extent == BATCH else int(extent)
        return count * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}({', '.join(str(extent) for extent in self.shape)})"


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One typed node. `order` is its position in `Graph.nodes`; `tie` names the node whose weight it shares."""

    id: NodeId
    type: str
    params: NodeParams
    order: int
    tie: NodeId | None = None
    line: int = 0


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node costs for one sample (batch = 1), inferred before anything is placed."""

    outputs: dict[str, TensorSpec]
    parameters: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    forward_flops: int
    backward_flops: int

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the parameters that this node owns (a tied weight counts at its owner only)."""
        return sum(spec.size_bytes(1) // DTYPE_BYTES[spec.dtype] for spec in self.parameters.values())


@dataclass(frozen=True, slots=True)
class Graph:
    """A validated network graph; see the module's docstring for its invariants."""

    name: str
    file: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, PortRef]
    loss: NodeId | None
    costs: dict[NodeId, NodeCost]
    pins: dict[NodeId, str] = field(default_factory=dict)

    def node(self, node_id: str) -> Node:
        """The node of that id; KeyError if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def in_edges(self) -> dict[NodeId, list[Edge]]:
        """Each node's incoming edges in edge order, which is the order of its variadic inputs (`add`, `concat`)."""
        found: dict[NodeId, list[Edge]] = {node.id: [] for node in self.nodes}
        for edge in self.edges:
            found[edge.dst.node].append(edge)
        return found

    def out_edges(self) -> dict[PortRef, list[Edge]]:
        """The readers of each value (output port or network input) in edge order."""
        found: dict[PortRef, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.src, []).append(edge)
        return found

    def ties(self) -> dict[NodeId, list[NodeId]]:
        """Owner of a shared weight -> the other nodes that use it, in topological order."""
        found: dict[NodeId, list[NodeId]] = {}
        for node in self.nodes:
            if node.tie is not None:
                found.setdefault(node.tie, []).append(node.id)
        return found
