"""Normalisation. Shapes: B batch, C channels, H height, W width, D width of a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from networks.types.base import Call, NodeType, Shapes, VNodeModule, WeightedParams, expected, need_last, per_element


class LayerNormParams(WeightedParams):
    """Ba et al., arXiv 1607.06450, over the last dimension."""

    dim: int = Field(gt=0, description="size of the last dimension")
    eps: float = Field(default=1e-5, gt=0)
    bias: bool = Field(default=True, description="add a bias")


class RMSNormParams(WeightedParams):
    """Zhang and Sennrich, arXiv 1910.07467, over the last dimension."""

    dim: int = Field(gt=0, description="size of the last dimension")
    eps: float = Field(default=1e-5, gt=0)


class BatchNorm2dParams(WeightedParams):
    """Ioffe and Szegedy, arXiv 1502.03167. Statistics are those of one microbatch."""

    dim: int = Field(gt=0, description="channels")
    eps: float = Field(default=1e-5, gt=0)
    momentum: float = Field(default=0.1, ge=0, le=1, description="weight of the new statistics, as torch counts it")


class _Scaled(VNodeModule):
    params: Any
    weight: nn.Parameter
    bias: nn.Parameter | None

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        if self.params.init is not None:
            self.params.init.fill(self.weight, initial("weight"))
        else:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(_Scaled):
    """weight (dim), bias (dim)."""

    def __init__(self, params: LayerNormParams) -> None:
        super().__init__()
        self.params = params
        self.weight = nn.Parameter(torch.empty(params.dim))
        self.bias = nn.Parameter(torch.empty(params.dim)) if params.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.params.dim,), self.weight, self.bias, self.params.eps)

    def bind(self) -> Call:
        norm, shape, eps, weight, bias = torch.layer_norm, (self.params.dim,), self.params.eps, self.weight, self.bias
        return lambda x: norm(x, shape, weight, bias, eps)


class RMSNorm(_Scaled):
    """weight (dim)."""

    def __init__(self, params: RMSNormParams) -> None:
        super().__init__()
        self.params = params
        self.weight = nn.Parameter(torch.empty(params.dim))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.params.dim,), self.weight, self.params.eps)


class BatchNorm2d(_Scaled):
    """weight, bias, and the buffers running_mean, running_var, all (dim)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, params: BatchNorm2dParams) -> None:
        super().__init__()
        self.params = params
        self.weight = nn.Parameter(torch.empty(params.dim))
        self.bias = nn.Parameter(torch.empty(params.dim))
        self.register_buffer("running_mean", torch.zeros(params.dim))
        self.register_buffer("running_var", torch.ones(params.dim))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        p, context = self.params, self.context
        mean: Tensor | None = self.running_mean
        var: Tensor | None = self.running_var
        if context.training and not context.update_buffers:
            mean = var = None
        return F.batch_norm(x_BCHW, mean, var, self.weight, self.bias, context.training, p.momentum, p.eps)


def _norm_check(p: Any, inputs: Shapes) -> None:
    need_last(inputs[0], p.dim)


def _batch_norm_check(p: BatchNorm2dParams, inputs: Shapes) -> None:
    shape = inputs[0].shape
    if len(shape) != 4:
        raise expected(("batch", p.dim, "height", "width"), inputs[0])
    if shape[1] != p.dim:
        raise expected((shape[0], p.dim, *shape[2:]), inputs[0])


TYPES = [
    NodeType(
        name="layernorm", params=LayerNormParams, module=LayerNorm, family="norm",
        doc="layer normalisation over the last dimension", flops=per_element(8), check=_norm_check,
        example={"dim": 64},
    ),
    NodeType(
        name="rmsnorm", params=RMSNormParams, module=RMSNorm, family="norm",
        doc="root-mean-square normalisation over the last dimension", flops=per_element(5), check=_norm_check,
        example={"dim": 64},
    ),
    NodeType(
        name="batchnorm2d", params=BatchNorm2dParams, module=BatchNorm2d, family="norm",
        doc="batch normalisation over images, with running statistics", flops=per_element(8),
        check=_batch_norm_check, example={"dim": 16},
    ),
]  # fmt: skip
