"""The network file as pydantic models: what may be written where, before anything is computed from it.

A node's own parameters are checked by its type's model (networks.types); `NodeEntry` holds what all nodes share.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from networks.graph import BATCH, DTYPE_BYTES
from networks.limits import EXTENT
from networks.recipe import Recipe, Section

ID_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
"""Ids of networks, nodes, blocks, inputs, outputs and PNodes: never a path, never a letter that looks like another."""

VAR_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"

BLOCK = "block"
"""The `type` of a node that stands for a block's nodes."""

Id = Annotated[str, Field(pattern=ID_PATTERN)]
Dtype = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
assert set(Dtype.__args__) == set(DTYPE_BYTES)  # type: ignore[attr-defined]

_ID = re.compile(ID_PATTERN.strip("^$"))


def is_id(text: str) -> bool:
    """Whether `text` can be an id (of a network, node, PNode, …)."""
    return _ID.fullmatch(text) is not None


class InputEntry(Section):
    """An input of the network: the shape begins with `batch`, the number of samples."""

    dtype: Dtype = Field(description="type of the elements")
    shape: tuple[Any, ...] = Field(description="extents; the first is the word batch")

    @field_validator("shape")
    @classmethod
    def _shape(cls, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        if not shape or shape[0] != BATCH:
            raise ValueError("the first extent is the word batch")
        for extent in shape[1:]:
            if not isinstance(extent, int) or isinstance(extent, bool) or not 1 <= extent <= EXTENT:
                raise ValueError(f"extents are whole numbers from 1 to {EXTENT:,}, got {extent!r}")
        if len(shape) > 8:
            raise ValueError("at most 8 dimensions")
        return shape


class NodeEntry(BaseModel):
    """What every node has; all other keys are its type's parameters."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    id: Id = Field(description="the node's name, unique among its neighbours")
    type: str = Field(description="a node type, or 'block'")
    tie: str | None = Field(default=None, description="id of the node whose weight this one shares")
    block: Id | None = Field(default=None, description="which block, if the type is 'block'")
    repeat: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="how many copies of the block, one after the other; they are called id.0, id.1, …"
    )


class BlockEntry(Section):
    """A sub-graph that nodes of type `block` stand for."""

    inputs: tuple[Id, ...] = Field(min_length=1, description="names of the block's inputs")
    nodes: tuple[NodeEntry, ...] = Field(min_length=1, description="its nodes")
    edges: tuple[str, ...] = Field(
        min_length=1, description="chains such as 'x -> norm -> add'; 'a -int8-> b' names a codec"
    )
    output: str | None = Field(default=None, description="the node whose value the block gives")
    outputs: dict[Id, str] | None = Field(default=None, description="named outputs, instead of 'output'")

    @model_validator(mode="after")
    def _one_kind_of_output(self) -> Self:
        if (self.output is None) == (self.outputs is None):
            raise ValueError("give either 'output' or 'outputs'")
        return self


class NetworkFile(Section):
    """A whole file."""

    version: Literal[1] = Field(description="version of the file format")
    name: Id = Field(description="the network's id")
    vars: dict[Annotated[str, Field(pattern=VAR_PATTERN)], int | float | str | bool] = Field(
        default={}, description="values to be used as $name and in $(expressions)"
    )
    inputs: dict[Id, InputEntry] = Field(min_length=1, description="what the network is fed with")
    blocks: dict[Id, BlockEntry] = Field(default={}, description="sub-graphs")
    nodes: tuple[NodeEntry, ...] = Field(min_length=1, description="the nodes")
    edges: tuple[str, ...] = Field(min_length=1, description="chains such as 'tokens -> tok -> head -> loss.logits'")
    outputs: dict[Id, str] = Field(min_length=1, description="what the network gives; 'loss' is what is trained")
    place: dict[str, Id] = Field(default={}, description="nodes (or whole blocks) that must run on a certain PNode")
    train: Recipe | None = Field(default=None, description="the recipe's defaults")
