"""Types that change a shape: concat, split, reshape, flatten, transpose, and the mean over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from networks.graph import TensorSpec
from networks.types.base import (
    NodeParams,
    NodeType,
    ShapeError,
    Shapes,
    VNodeModule,
    dims_text,
    need_float,
    numel,
    per_element,
)


class ConcatParams(NodeParams):
    """Inputs one behind the other along `dim`."""

    dim: int = Field(default=-1, description="dimension, counted from the batch (0) or from the end (-1)")


class SplitParams(NodeParams):
    """The input cut along `dim`; output i is port `i`. Say either `parts` or `sizes`."""

    dim: int = Field(default=-1, description="dimension, counted from the batch (0) or from the end (-1)")
    parts: int | None = Field(default=None, gt=0, le=4096, description="number of equal parts")
    sizes: tuple[int, ...] | None = Field(default=None, strict=False, description="size of each part")


class ReshapeParams(NodeParams):
    """A new shape for each sample; the batch dimension stays."""

    shape: tuple[int, ...] = Field(strict=False, description="shape of one sample; one of them may be -1")


class FlattenParams(NodeParams):
    """Dimensions `start` to `end` become one."""

    start: int = Field(default=1, ge=1, description="first dimension; the batch is 0")
    end: int = Field(default=-1, description="last dimension")


class TransposeParams(NodeParams):
    """Two dimensions change places."""

    dim0: int = Field(default=-2, description="counted from the batch (0) or from the end (-1)")
    dim1: int = Field(default=-1, description="counted from the batch (0) or from the end (-1)")


class MeanParams(NodeParams):
    """Mean over one or more dimensions behind the batch."""

    dim: int | Annotated[tuple[int, ...], Field(strict=False)] = Field(
        default=-1, description="dimension or list of dimensions"
    )
    keepdim: bool = Field(default=False, description="keep them, with size 1")

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions as a tuple."""
        return (self.dim,) if isinstance(self.dim, int) else self.dim


class Concat(VNodeModule):
    """torch.cat."""

    def __init__(self, params: ConcatParams) -> None:
        super().__init__()
        self.dim = params.dim

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, self.dim)


class Split(VNodeModule):
    """torch.split; a tuple of tensors."""

    def __init__(self, params: SplitParams) -> None:
        super().__init__()
        self.params = params

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        p = self.params
        if p.sizes is not None:
            return torch.split(x, list(p.sizes), p.dim)
        return torch.tensor_split(x, p.parts or 1, p.dim)


class Reshape(VNodeModule):
    """torch.reshape of each sample."""

    def __init__(self, params: ReshapeParams) -> None:
        super().__init__()
        self.shape = params.shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.shape)


class Flatten(VNodeModule):
    """torch.flatten, as a tensor of its own also where there is nothing to flatten."""

    def __init__(self, params: FlattenParams) -> None:
        super().__init__()
        self.params = params

    def forward(self, x: Tensor) -> Tensor:
        start = self.params.start
        end = self.params.end % x.dim()
        return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


class Transpose(VNodeModule):
    """torch.transpose."""

    def __init__(self, params: TransposeParams) -> None:
        super().__init__()
        self.dims = (params.dim0, params.dim1)

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.dims)


class Mean(VNodeModule):
    """torch.mean."""

    def __init__(self, params: MeanParams) -> None:
        super().__init__()
        self.dims, self.keepdim = params.dims, params.keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims, self.keepdim)


def split_outputs(params: SplitParams) -> list[str]:
    """The names of a split's outputs: 0, 1, …"""
    return [str(part) for part in range(len(params.sizes) if params.sizes is not None else params.parts or 1)]


def _behind_batch(spec: TensorSpec, dims: Sequence[int]) -> list[int]:
    rank = len(spec.shape)
    for dim in dims:
        if not -rank <= dim < rank or dim % rank == 0:
            raise ShapeError(f"dim {dim} is not a dimension behind the batch of {dims_text(spec.shape)}")
    return [dim % rank for dim in dims]


def _concat_check(p: ConcatParams, inputs: Shapes) -> None:
    first = inputs[0]
    (dim,) = _behind_batch(first, [p.dim])
    for spec in inputs[1:]:
        same_rank = len(spec.shape) == len(first.shape)
        if not same_rank or any(
            a != b for i, (a, b) in enumerate(zip(first.shape, spec.shape, strict=True)) if i != dim
        ):
            want = [*first.shape]
            want[dim] = "any"
            raise ShapeError(f"expects {dims_text(want)} as from the first input, got {dims_text(spec.shape)}")
        if spec.dtype != first.dtype:
            raise ShapeError(f"expects {first.dtype} as from the first input, got {spec.dtype}")


def _split_check(p: SplitParams, inputs: Shapes) -> None:
    if (p.parts is None) == (p.sizes is None):
        raise ShapeError("expects either parts (equal parts) or sizes (a list), got both or neither")
    (dim,) = _behind_batch(inputs[0], [p.dim])
    extent = inputs[0].shape[dim]
    assert isinstance(extent, int)
    if p.parts is not None and extent % p.parts:
        raise ShapeError(f"expects a dim {p.dim} that divides by {p.parts}, got {dims_text(inputs[0].shape)}")
    if p.sizes is not None and (sum(p.sizes) != extent or min(p.sizes, default=0) < 1):
        raise ShapeError(f"expects sizes that sum to {extent}, the dim {p.dim} of {dims_text(inputs[0].shape)}")


def _reshape_check(p: ReshapeParams, inputs: Shapes) -> None:
    shape = inputs[0].shape
    if not shape or not isinstance(shape[0], str):
        raise ShapeError(f"expects (batch, …), got {dims_text(shape)}")
    have = numel([int(extent) for extent in shape[1:]])
    known = numel([extent for extent in p.shape if extent != -1])
    open_dims = sum(extent == -1 for extent in p.shape)
    fits = known > 0 and have % known == 0 if open_dims else known == have
    if open_dims > 1 or any(extent == 0 or extent < -1 for extent in p.shape) or not fits:
        raise ShapeError(f"can't give {have} elements per sample, {dims_text(shape)}, the shape {dims_text(p.shape)}")


def _flatten_check(p: FlattenParams, inputs: Shapes) -> None:
    rank = len(inputs[0].shape)
    if not p.start < rank or not p.start - rank <= p.end < rank or (p.end % rank) < p.start:
        raise ShapeError(f"can't flatten dims {p.start} to {p.end} of {dims_text(inputs[0].shape)}")


def _transpose_check(p: TransposeParams, inputs: Shapes) -> None:
    _behind_batch(inputs[0], [p.dim0, p.dim1])


def _mean_check(p: MeanParams, inputs: Shapes) -> None:
    need_float(inputs[0])
    dims = _behind_batch(inputs[0], p.dims)
    if not dims or len(set(dims)) != len(dims):
        raise ShapeError(f"expects one or more different dims, got {list(p.dims)}")


def _concat_shapes(p: ConcatParams, inputs: Shapes) -> list[TensorSpec]:
    shape = list(inputs[0].shape)
    shape[p.dim] = sum(int(spec.shape[p.dim]) for spec in inputs)
    return [TensorSpec(inputs[0].dtype, tuple(shape))]


def _split_shapes(p: SplitParams, inputs: Shapes) -> list[TensorSpec]:
    shape = list(inputs[0].shape)
    parts = p.parts or 1
    found = []
    for size in p.sizes if p.sizes is not None else [int(shape[p.dim]) // parts] * parts:
        shape[p.dim] = size
        found.append(TensorSpec(inputs[0].dtype, tuple(shape)))
    return found


def _reshape_shapes(p: ReshapeParams, inputs: Shapes) -> list[TensorSpec]:
    batch, *rest = inputs[0].shape
    known = numel([extent for extent in p.shape if extent != -1])
    open_extent = numel([int(extent) for extent in rest]) // known
    return [TensorSpec(inputs[0].dtype, (batch, *[open_extent if e == -1 else e for e in p.shape]))]


def _flatten_shapes(p: FlattenParams, inputs: Shapes) -> list[TensorSpec]:
    shape = inputs[0].shape
    end = p.end % len(shape) + 1
    joined = numel([int(extent) for extent in shape[p.start : end]])
    return [TensorSpec(inputs[0].dtype, (*shape[: p.start], joined, *shape[end:]))]


def _transpose_shapes(p: TransposeParams, inputs: Shapes) -> list[TensorSpec]:
    shape = list(inputs[0].shape)
    shape[p.dim0], shape[p.dim1] = shape[p.dim1], shape[p.dim0]
    return [TensorSpec(inputs[0].dtype, tuple(shape))]


def _mean_shapes(p: MeanParams, inputs: Shapes) -> list[TensorSpec]:
    shape = inputs[0].shape
    gone = {dim % len(shape) for dim in p.dims}
    kept = [1 if place in gone else extent for place, extent in enumerate(shape) if p.keepdim or place not in gone]
    return [TensorSpec("float32", tuple(kept))]


def _mean_flops(p: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    return numel(inputs[0])


def _variadic(params: Any) -> list[str]:
    return []


TYPES = [
    NodeType(
        name="concat", params=ConcatParams, module=Concat, family="shape", doc="inputs joined along one dimension",
        flops=per_element(1), check=_concat_check, shapes=_concat_shapes, inputs=_variadic, variadic=True, backward=1.0,
        tidy_gradients=False, tidy_output=False, example={"dim": -1},
    ),
    NodeType(
        name="split", params=SplitParams, module=Split, family="shape", doc="the input cut into several outputs",
        flops=per_element(1), check=_split_check, shapes=_split_shapes, outputs=split_outputs, backward=1.0,
        tidy_gradients=False, tidy_output=False, example={"parts": 2},
    ),
    NodeType(
        name="reshape", params=ReshapeParams, module=Reshape, family="shape", doc="a new shape for each sample",
        flops=per_element(0), check=_reshape_check, shapes=_reshape_shapes,
        backward=1.0, tidy_gradients=False, tidy_output=False,
        example={"shape": [8, 8]},
    ),
    NodeType(
        name="flatten", params=FlattenParams, module=Flatten, family="shape", doc="several dimensions become one",
        flops=per_element(0), check=_flatten_check, shapes=_flatten_shapes,
        backward=1.0, tidy_gradients=False, tidy_output=False,
    ),
    NodeType(
        name="transpose", params=TransposeParams, module=Transpose, family="shape",
        doc="two dimensions change places", flops=per_element(1), check=_transpose_check, shapes=_transpose_shapes,
        backward=1.0,
        tidy_gradients=False, tidy_output=False,
    ),
    NodeType(
        name="mean", params=MeanParams, module=Mean, family="shape", doc="mean over dimensions", flops=_mean_flops,
        check=_mean_check, shapes=_mean_shapes,
        backward=1.0, tidy_gradients=False, tidy_output=False, example={"dim": [2, 3]},
    ),
]  # fmt: skip
