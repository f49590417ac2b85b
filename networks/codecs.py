"""Codecs of edges: their names, what may have one, how large a value is then, which edges of a run have one. Pure.

A *coded group* is one value on its way to some of its readers, all with one codec. It means the same numbers wherever
its VNodes run: each reader gets `decode(encode(value))`, and the sum of their gradients, in the order of the edges, is
coded once on its way back. Where the whole group crosses from one PNode to another, the coded bytes travel; where it
does not (any more), the maker's stage rounds it in place. So the groups belong to the run, not to a placement.

- bf16: the upper half of a float32, rounded to the nearest, ties to even. Relative error at most 2^-8.
- int8: blocks of at most `BLOCK` neighbours along the last dimension, each with a float32 scale `absmax / 127`; error
  at most `absmax / 254` of the block.

Only float32 values can be coded: integers never, other floats were asked for because of their precision or size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from networks.graph import BATCH, Graph, PortRef, TensorSpec
from wire.coded import BF16 as BF16
from wire.coded import CODECS as CODECS
from wire.coded import INT8 as INT8
from wire.coded import coded_bytes

NONE, AUTO = "none", "auto"
"""What a wish may be besides one of `CODECS`, which is what a group may have."""
Wish = Literal["none", "bf16", "int8", "auto"]
WISHES: tuple[Wish, ...] = ("none", "bf16", "int8", "auto")
CODED_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class CodedGroup:
    """Edges (their indices, ascending) that carry one value, coded once for all of them."""

    codec: str
    edges: tuple[int, ...]


def coded_spec_bytes(codec: str, spec: TensorSpec, batch: int) -> int:
    """Bytes of one tensor of that spec for `batch` samples."""
    if codec not in CODECS:
        return spec.size_bytes(batch)
    return coded_bytes(codec, [batch if extent == BATCH else int(extent) for extent in spec.shape])


def wish_of(graph: Graph, edge: int, default: str) -> str:
    """What an edge asks for: its own codec or the recipe's; `none` where the value can't be coded."""
    found = graph.edges[edge]
    if not can_be_coded(graph, found.src):
        return NONE
    return found.codec or default


def can_be_coded(graph: Graph, port: PortRef) -> bool:
    """Whether a value can be coded at all: a float32 that a node makes."""
    return port.node not in graph.inputs and graph.costs[port.node].outputs[port.port].dtype == CODED_DTYPE


def asks_for_codec(graph: Graph, default: str) -> bool:
    """Whether the network wants any edge coded."""
    return default != NONE or any(edge.codec not in ("", NONE) for edge in graph.edges)


def group_of(groups: Sequence[CodedGroup]) -> dict[int, CodedGroup]:
    """Edge -> its group."""
    return {edge: group for group in groups for edge in group.edges}


def groups_problem(graph: Graph, groups: Sequence[CodedGroup]) -> str:
    """What is wrong with groups that came from elsewhere, or ""."""
    seen: set[int] = set()
    for group in groups:
        if group.codec not in CODECS:
            return f"codec {group.codec!r} is not known here; known are {', '.join(CODECS)}"
        edges = group.edges
        if not edges or list(edges) != sorted(set(edges)) or edges[0] < 0 or edges[-1] >= len(graph.edges):
            return f"the edges {list(edges)[:4]} of a coded group are none of this network's, or not in order"
        port = graph.edges[edges[0]].src
        if any(graph.edges[edge].src != port for edge in edges):
            return f"the edges {list(edges)[:4]} of a coded group carry several values"
        if not can_be_coded(graph, port):
            return f"'{port}' is no {CODED_DTYPE} that a VNode makes, so it can't be coded"
        if not seen.isdisjoint(edges):
            return f"an edge of '{port}' is in two coded groups"
        seen.update(edges)
    return ""


def summary_of(groups: Sequence[CodedGroup]) -> str:
    """For a person: `int8 on 4 edges, bf16 on 1`; "" without any."""
    counts: Mapping[str, int] = {
        codec: sum(len(group.edges) for group in groups if group.codec == codec) for codec in CODECS
    }
    parts = [f"{codec} on {count}" for codec, count in counts.items() if count]
    if not parts:
        return ""
    only = len(parts) == 1 and sum(counts.values()) == 1
    return ", ".join([f"{parts[0]} {'edge' if only else 'edges'}", *parts[1:]])


def codec_text(codec: str) -> str:
    """For errors: `coded by 'int8'`, `without codec`."""
    return f"coded by {codec[:20]!r}" if codec else "without codec"
