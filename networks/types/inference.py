"""Shapes and costs without data: run the node's module on torch's meta device.

The batch dimension is symbolic. The module runs twice, with two batch sizes; a dimension that follows them is the
batch, one that changes otherwise mixes samples and is refused. It runs as at inference, so that no dropout mask is
drawn, and what it makes for itself is on the meta device too: no numbers in a file can cost memory here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from networks.graph import BATCH, NodeCost, TensorSpec
from networks.types.base import NodeParams, NodeType, RunContext, ShapeError, VNodeModule, dims_text

_BATCHES = (2, 3)

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
    with torch.device("meta"):
        module = kind.module(params)
    module.context = RunContext(training=False, update_buffers=False)
    runs = [_run(module, inputs, batch) for batch in _BATCHES]
    outputs: dict[str, TensorSpec] = {}
    for port, *tensors in zip(kind.outputs(params), *runs, strict=True):
        shape: list[int | str] = []
        for small, large in zip(tensors[0].shape, tensors[1].shape, strict=True):
            if small == large:
                shape.append(small)
            elif (small, large) == _BATCHES:
                shape.append(BATCH)
            else:
                raise ShapeError(f"mixes the batch with other dimensions: got {dims_text(inputs[0].shape)}")
        outputs[port] = TensorSpec(NAMES[tensors[0].dtype], tuple(shape))
    forward = kind.flops(params, [_sizes(spec) for spec in inputs], [_sizes(spec) for spec in outputs.values()])
    return NodeCost(
        outputs=outputs,
        parameters={name: _spec(tensor) for name, tensor in module.named_parameters()},
        buffers={name: _spec(tensor) for name, tensor in module.named_buffers()},
        forward_flops=forward,
        backward_flops=round(kind.backward * forward),
    )


def _run(module: VNodeModule, inputs: Sequence[TensorSpec], batch: int) -> tuple[Tensor, ...]:
    tensors = [torch.empty(_sizes(spec, batch), dtype=DTYPES[spec.dtype], device="meta") for spec in inputs]
    try:
        with torch.no_grad(), torch.device("meta"):
            result = module(*tensors)
    except (RuntimeError, IndexError, ValueError) as error:
        got = ", ".join(dims_text(spec.shape) for spec in inputs)
        raise ShapeError(f"can't take {got}: {str(error).splitlines()[0]}") from error
    return result if isinstance(result, tuple) else (result,)


def _sizes(spec: TensorSpec, batch: int = 1) -> list[int]:
    return [batch if extent == BATCH else int(extent) for extent in spec.shape]


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape))
