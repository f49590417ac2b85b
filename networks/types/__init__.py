"""The closed registry of node types: for each a parameter model, a torch module, a shape check and a cost formula.

One file holds one family. To add a type, write its parameter model and module in the file of its family (or a new
one) and list it in that file's `TYPES`; tests/unit/compute holds every entry to the rules in `base`.
"""

from __future__ import annotations

from networks.graph import NodeCost, TensorSpec
from networks.types import attention, dense, image, inference, losses, norm, pointwise, shape
from networks.types.base import (
    AttentionCache,
    Call,
    NodeParams,
    NodeType,
    RunContext,
    ShapeError,
    VNodeModule,
    WeightedParams,
    generator_for,
)
from networks.types.inference import DTYPES, NAMES

REGISTRY: dict[str, NodeType] = {
    kind.name: kind for family in (dense, norm, attention, pointwise, shape, image, losses) for kind in family.TYPES
}


def infer(type: str, params: NodeParams, inputs: list[TensorSpec]) -> NodeCost:
    """Shapes, parameters and FLOPs of a node of that type; `inputs` in the order of its ports. Raises ShapeError."""
    return inference.infer(REGISTRY[type], params, inputs)


__all__ = [
    "DTYPES",
    "NAMES",
    "REGISTRY",
    "AttentionCache",
    "Call",
    "NodeParams",
    "NodeType",
    "RunContext",
    "ShapeError",
    "VNodeModule",
    "WeightedParams",
    "generator_for",
    "infer",
]
