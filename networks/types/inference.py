"""Shapes and costs without data: each type's formulas, and its module built on torch's meta device for the parameters.

The batch dimension stays a symbol. Nothing is computed: a first computation on the meta device imports torch's
compiler (1.1 s of CPU), and takes a millisecond per node after that (docs/decisions/0023). Tests compare the formulas
with what the modules really give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from networks.graph import BATCH, NodeCost, TensorSpec
from networks.types.base import NodeParams, NodeType, ShapeError

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_known: dict[tuple[str, NodeParams, tuple[TensorSpec, ...]], NodeCost] = {}
_KNOWN_LIMIT = 4096


def infer(kind: NodeType, params: NodeParams, inputs: Sequence[TensorSpec]) -> NodeCost:
    """Outputs, parameters, buffers and FLOPs of one node, given its inputs in the order of its ports.

    Raises ShapeError saying what the node expects and what it got.
    """
    key = (kind.name, params, tuple(inputs))
    if key not in _known:
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        _known[key] = _infer(kind, params, inputs)
    return _known[key]


def _infer(kind: NodeType, params: NodeParams, inputs: Sequence[TensorSpec]) -> NodeCost:
    if not inputs:
        raise ShapeError("expects an input, got none")
    kind.check(params, inputs)
    try:
        with torch.device("meta"):
            module = kind.module(params)
    except (RuntimeError, OverflowError) as error:
        raise ShapeError(f"can't hold parameters as large as these: {str(error).splitlines()[0]}") from error
    outputs = dict(zip(kind.outputs(params), kind.shapes(params, inputs), strict=True))
    forward = kind.flops(params, [_sizes(spec) for spec in inputs], [_sizes(spec) for spec in outputs.values()])
    return NodeCost(
        outputs=outputs,
        parameters={name: _spec(tensor) for name, tensor in module.named_parameters()},
        buffers={name: _spec(tensor) for name, tensor in module.named_buffers()},
        forward_flops=forward,
        backward_flops=round(kind.backward * forward),
    )


def _sizes(spec: TensorSpec) -> list[int]:
    return [1 if extent == BATCH else int(extent) for extent in spec.shape]


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape))
