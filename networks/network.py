"""A network that is ready to be deployed, and its canonical bytes.

The bytes are JSON with sorted keys, without spaces; they hold what the network means, not how its file was laid out,
so that a comment or another path to the file leaves the digest as it is. `from_bytes` trusts nothing: everything is
checked again by the rules for files, and bytes that are not exactly what `to_bytes` would give are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import msgspec
from pydantic import ValidationError

from networks.assemble import Heading, assemble
from networks.codecs import NONE, WISHES
from networks.diagnostics import Diagnostics, Place, Spot, literal
from networks.expand import Flat, FlatEdge, FlatNode
from networks.expressions import VarValue
from networks.graph import Graph, PortRef, TensorSpec
from networks.limits import EDGES, NETWORK_BYTES, NODES
from networks.model import InputEntry, is_id
from networks.recipe import Recipe
from networks.scopes import Port
from networks.types import REGISTRY
from networks.yaml_source import SourceText
from wire.errors import RemoteError

FORMAT = 1

_NODE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}(?:\.[a-z0-9][a-z0-9_-]{0,62}){0,16}")
_SCALAR = str | int | float | bool | None
_PARAM = _SCALAR | list[_SCALAR] | dict[str, _SCALAR]


class BadNetworkError(RemoteError):
    """Bytes that claim to be a network are none."""

    exit_code = 65


class _NodeData(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    type: str
    params: dict[str, _PARAM]
    tie: str | None = None


class _InputData(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: list[int | str]


class _NetworkData(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    vars: dict[str, int | float | str | bool]
    inputs: list[_InputData]
    nodes: list[_NodeData]
    edges: list[tuple[str, str]]
    outputs: list[tuple[str, str]]
    place: dict[str, str]
    train: dict[str, Any]
    codecs: dict[str, str] = {}


@dataclass(frozen=True)
class Network:
    """A validated graph and how it is trained. `vars` are the values that its file was read with."""

    graph: Graph
    recipe: Recipe
    vars: dict[str, VarValue] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The network's name."""
        return self.graph.name

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of `to_bytes()`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def parameters(self) -> int:
        """Number of scalars in all parameters; a tied weight counts once."""
        return sum(cost.parameter_count for cost in self.graph.costs.values())

    def to_bytes(self) -> bytes:
        """The canonical bytes: the same for the same meaning, on every machine."""
        graph = self.graph
        nodes = []
        for node in graph.nodes:
            data = {"id": node.id, "type": node.type, "params": node.params.model_dump(mode="json", by_alias=True)}
            nodes.append(data if node.tie is None else {**data, "tie": node.tie})
        whole: dict[str, Any] = {
            "format": FORMAT,
            "name": graph.name,
            "vars": self.vars,
            "inputs": [
                {"name": name, "dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in graph.inputs.items()
            ],
            "nodes": nodes,
            "edges": [[_text(edge.src), _text(edge.dst)] for edge in graph.edges],
            "outputs": [[name, _text(port)] for name, port in graph.outputs.items()],
            "place": graph.pins,
            "train": _recipe_data(self.recipe),
        }
        codecs = {str(edge.index): edge.codec for edge in graph.edges if edge.codec}
        if codecs:
            whole["codecs"] = codecs
        return json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The network of canonical bytes. Raises `BadNetworkError` for anything else."""
        if len(data) > NETWORK_BYTES:
            raise BadNetworkError(f"a network of {len(data):,} bytes is over the limit of {NETWORK_BYTES:,}")
        try:
            raw = msgspec.json.decode(data, type=_NetworkData, strict=True)
            network = cls(*_checked(raw))
            same = network.to_bytes() == bytes(data)
        except (msgspec.MsgspecError, ValidationError, RecursionError, ValueError) as error:
            raise BadNetworkError(f"not a network: {literal(str(error).splitlines()[0])[:300]}") from error
        if not same:
            raise BadNetworkError("not a network: the bytes are not in canonical form")
        return network


def _recipe_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe; without a codec as it was written before there were codecs, so that stored networks stay valid."""
    found = recipe.model_dump(mode="json")
    if found["codec"] == NONE:
        del found["codec"]
    return found


def _text(port: PortRef) -> str:
    return f"{port.node}:{port.port}"


def _checked(raw: _NetworkData) -> tuple[Graph, Recipe, dict[str, VarValue]]:
    """Graph, recipe and variables of decoded bytes, checked as a file is. Raises ValueError."""
    if raw.format != FORMAT:
        raise ValueError(f"format {raw.format} is not {FORMAT}")
    if not is_id(raw.name):
        raise ValueError(f"{raw.name!r} can't be a network's id")
    if len(raw.nodes) > NODES or len(raw.edges) > EDGES:
        raise ValueError(f"more than {NODES:,} nodes or {EDGES:,} edges")
    here = Spot(SourceText("network", ""), 1, 1)
    inputs = _inputs(raw)
    flat = Flat([_flat_node(node, here) for node in raw.nodes])
    names = {node.id for node in flat.nodes}
    if len(names) < len(flat.nodes) or not names.isdisjoint(inputs):
        raise ValueError("two nodes have one id")
    flat.edges = [FlatEdge(_port(src), _port(dst), here) for src, dst in raw.edges]
    _take_codecs(flat, raw.codecs)
    flat.outputs = {name: (_port(port), here) for name, port in raw.outputs}
    _check_ports(flat, inputs)
    diagnostics = Diagnostics()
    place: dict[str, tuple[str, Place]] = {node: (pnode, here) for node, pnode in raw.place.items()}
    if not all(is_id(pnode) for pnode in raw.place.values()) or not raw.place.keys() <= names:
        raise ValueError("a pin names no node or no PNode")
    graph = assemble(Heading(raw.name, f"{raw.name}.yaml"), flat, inputs, place, diagnostics)
    if graph is None:
        raise ValueError("; ".join(found.text for found in diagnostics.found[:3]))
    recipe = Recipe.model_validate(_tuples(raw.train))
    return graph, recipe, dict(raw.vars)


def _inputs(raw: _NetworkData) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for data in raw.inputs:
        if not is_id(data.name) or data.name in found:
            raise ValueError(f"{data.name!r} can't be an input's name")
        entry = InputEntry.model_validate({"dtype": data.dtype, "shape": tuple(data.shape)})
        found[data.name] = TensorSpec(entry.dtype, entry.shape)
    return found


def _flat_node(data: _NodeData, here: Spot) -> FlatNode:
    if not _NODE_ID.fullmatch(data.id):
        raise ValueError(f"{data.id!r} can't be a node's id")
    kind = REGISTRY.get(data.type)
    if kind is None:
        raise ValueError(f"unknown node type {data.type!r}")
    return FlatNode(data.id, data.type, kind.params.model_validate(_tuples(data.params)), here, data.tie, ("",))


def _port(text: str) -> Port:
    node, _, port = text.partition(":")
    return node, port


def _take_codecs(flat: Flat, codecs: dict[str, str]) -> None:
    for index, codec in codecs.items():
        if not (index.isascii() and index.isdecimal()) or len(index) > 7 or int(index) >= len(flat.edges):
            raise ValueError(f"there is no edge {index[:20]!r} to be coded")
        if codec not in WISHES:
            raise ValueError(f"no codec is called {codec[:20]!r}")
        flat.edges[int(index)].codec = codec


def _check_ports(flat: Flat, inputs: dict[str, TensorSpec]) -> None:
    """Every edge joins ports that exist, and every input port is driven once, variadic ones in order."""
    outputs: set[Port] = {(name, "") for name in inputs}
    ports: dict[str, list[str]] = {}
    variadic: set[str] = set()
    for node in flat.nodes:
        kind = REGISTRY[node.type]
        assert node.params is not None
        outputs |= {(node.id, port) for port in kind.outputs(node.params)}
        ports[node.id] = kind.inputs(node.params)
        if kind.variadic:
            variadic.add(node.id)
    have: dict[str, list[str]] = {node: [] for node in ports}
    for edge in flat.edges:
        if edge.src not in outputs or edge.dst[0] not in have:
            raise ValueError(f"edge {edge.src[0]!r} -> {edge.dst[0]!r} joins what does not exist")
        have[edge.dst[0]].append(edge.dst[1])
    for name, driven in have.items():
        want = [str(number) for number in range(max(1, len(driven)))] if name in variadic else sorted(ports[name])
        if (driven if name in variadic else sorted(driven)) != want:
            raise ValueError(f"the inputs of {name!r} are not driven once each")
    if not all(port in outputs and port[1] for port, _ in flat.outputs.values()):
        raise ValueError("an output names what does not exist")
    if {edge.src[0] for edge in flat.edges} & inputs.keys() != inputs.keys():
        raise ValueError("an input is never used")


def _tuples(value: Any) -> Any:
    """Lists as tuples, as the strict models want them."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
