"""Convolution and pooling. Shapes: B batch, C channels, H height, W width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from networks.graph import TensorSpec
from networks.types.base import (
    NodeParams,
    NodeType,
    ShapeError,
    Shapes,
    VNodeModule,
    WeightedParams,
    dims_text,
    expected,
    need_float,
    numel,
)
from networks.types.initial import fill_fan_in


class Conv2dParams(WeightedParams):
    """Cross-correlation with learned kernels."""

    in_: int = Field(alias="in", gt=0, description="input channels")
    out: int = Field(gt=0, description="output channels")
    kernel: int = Field(default=3, gt=0, description="height and width of a kernel")
    stride: int = Field(default=1, gt=0)
    padding: int = Field(default=0, ge=0)
    dilation: int = Field(default=1, gt=0)
    groups: int = Field(default=1, gt=0)
    bias: bool = Field(default=True, description="add a bias")


class PoolParams(NodeParams):
    """One value for each window."""

    kernel: int = Field(default=2, gt=0, description="height and width of a window")
    stride: int | None = Field(default=None, gt=0, description="default: as large as the window")
    padding: int = Field(default=0, ge=0)


class Conv2d(VNodeModule):
    """As torch.nn.Conv2d: weight (out, in / groups, kernel, kernel), bias (out)."""

    def __init__(self, params: Conv2dParams) -> None:
        super().__init__()
        p = self.params = params
        self.weight = nn.Parameter(torch.empty(p.out, p.in_ // p.groups, p.kernel, p.kernel))
        self.bias = nn.Parameter(torch.empty(p.out)) if p.bias else None

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        p = self.params
        fan_in = p.in_ // p.groups * p.kernel * p.kernel
        if p.init is not None:
            p.init.fill(self.weight, initial("weight"))
        else:
            fill_fan_in(self.weight, fan_in, initial("weight"))
        if self.bias is not None:
            if p.init is not None:
                nn.init.zeros_(self.bias)
            else:
                fill_fan_in(self.bias, fan_in, initial("bias"))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        p = self.params
        return F.conv2d(x_BCHW, self.weight, self.bias, p.stride, p.padding, p.dilation, p.groups)


class MaxPool2d(VNodeModule):
    """As torch.nn.MaxPool2d."""

    def __init__(self, params: PoolParams) -> None:
        super().__init__()
        self.params = params

    def forward(self, x_BCHW: Tensor) -> Tensor:
        p = self.params
        result: Tensor = F.max_pool2d(x_BCHW, p.kernel, p.stride, p.padding)
        return result


class AvgPool2d(VNodeModule):
    """As torch.nn.AvgPool2d."""

    def __init__(self, params: PoolParams) -> None:
        super().__init__()
        self.params = params

    def forward(self, x_BCHW: Tensor) -> Tensor:
        p = self.params
        return F.avg_pool2d(x_BCHW, p.kernel, p.stride, p.padding)


def _conv_check(p: Conv2dParams, inputs: Shapes) -> None:
    need_float(inputs[0])
    shape = inputs[0].shape
    if p.in_ % p.groups or p.out % p.groups:
        raise ShapeError(f"groups {p.groups} must divide in {p.in_} and out {p.out}")
    if len(shape) != 4:
        raise expected(("batch", p.in_, "height", "width"), inputs[0])
    if shape[1] != p.in_:
        raise expected((shape[0], p.in_, *shape[2:]), inputs[0])
    reach = p.dilation * (p.kernel - 1) + 1
    for extent in shape[2:]:
        if int(extent) + 2 * p.padding < reach:
            raise ShapeError(f"a kernel that reaches over {reach} is larger than the image {dims_text(shape)}")


def _pool_check(p: PoolParams, inputs: Shapes) -> None:
    need_float(inputs[0])
    shape = inputs[0].shape
    if len(shape) != 4:
        raise expected(("batch", "channels", "height", "width"), inputs[0])
    if 2 * p.padding > p.kernel:
        raise ShapeError(f"padding {p.padding} must be at most half of the kernel {p.kernel}")
    for extent in shape[2:]:
        if int(extent) + 2 * p.padding < p.kernel:
            raise ShapeError(f"a window of {p.kernel} is larger than the image {dims_text(shape)}")


def _conv_shapes(p: Conv2dParams, inputs: Shapes) -> list[TensorSpec]:
    batch, _, *image = inputs[0].shape
    reach = p.dilation * (p.kernel - 1) + 1
    return [TensorSpec("float32", (batch, p.out, *_windows(image, reach, p.stride, p.padding)))]


def _pool_shapes(p: PoolParams, inputs: Shapes) -> list[TensorSpec]:
    batch, channels, *image = inputs[0].shape
    return [TensorSpec("float32", (batch, channels, *_windows(image, p.kernel, p.stride or p.kernel, p.padding)))]


def _windows(image: Sequence[int | str], reach: int, stride: int, padding: int) -> list[int]:
    return [(int(extent) + 2 * padding - reach) // stride + 1 for extent in image]


def _conv_flops(p: Conv2dParams, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    per_output = 2 * (p.in_ // p.groups) * p.kernel * p.kernel + (1 if p.bias else 0)
    return numel(outputs[0]) * per_output


def _pool_flops(p: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    return numel(outputs[0]) * int(p.kernel) ** 2


TYPES = [
    NodeType(
        name="conv2d", params=Conv2dParams, module=Conv2d, family="image", doc="two-dimensional convolution",
        flops=_conv_flops, check=_conv_check, shapes=_conv_shapes, tidy_gradients=False, tidy_output=False,
        example={"in": 3, "out": 8, "kernel": 3, "padding": 1},
    ),
    NodeType(
        name="maxpool2d", params=PoolParams, module=MaxPool2d, family="image", doc="largest value of each window",
        flops=_pool_flops, check=_pool_check, shapes=_pool_shapes,
        backward=1.0, tidy_gradients=False, example={"kernel": 2},
    ),
    NodeType(
        name="avgpool2d", params=PoolParams, module=AvgPool2d, family="image", doc="mean of each window",
        flops=_pool_flops, check=_pool_check, shapes=_pool_shapes,
        backward=1.0, tidy_gradients=False, example={"kernel": 2},
    ),
]  # fmt: skip
