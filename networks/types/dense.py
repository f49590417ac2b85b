"""Linear layers and look-up tables. Shapes: B batch, T positions, I inputs, O outputs, D width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from networks.graph import TensorSpec
from networks.types.base import (
    Call,
    NodeType,
    ShapeError,
    Shapes,
    VNodeModule,
    WeightedParams,
    need_integer,
    need_last,
    numel,
)
from networks.types.initial import fill_fan_in


class LinearParams(WeightedParams):
    """y = x Wᵀ + b over the last dimension."""

    in_: int = Field(alias="in", gt=0, description="size of the input's last dimension")
    out: int = Field(gt=0, description="size of the output's last dimension")
    bias: bool = Field(default=True, description="add a bias")


class Linear(VNodeModule):
    """As torch.nn.Linear: weight (out, in), bias (out)."""

    def __init__(self, params: LinearParams) -> None:
        super().__init__()
        self.params = params
        self.weight = nn.Parameter(torch.empty(params.out, params.in_))
        self.bias = nn.Parameter(torch.empty(params.out)) if params.bias else None

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        init, fan_in = self.params.init, self.params.in_
        if init is not None:
            init.fill(self.weight, initial("weight"))
        else:
            fill_fan_in(self.weight, fan_in, initial("weight"))
        if self.bias is not None:
            if init is not None:
                nn.init.zeros_(self.bias)
            else:
                fill_fan_in(self.bias, fan_in, initial("bias"))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def bind(self) -> Call:
        linear, weight, bias = F.linear, self.weight, self.bias
        if bias is None:
            return lambda x: linear(x, weight)
        return lambda x: linear(x, weight, bias)


def _linear_flops(p: LinearParams, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    rows = numel(inputs[0][:-1])
    return rows * (2 * p.in_ * p.out + (p.out if p.bias else 0))


def _linear_check(p: LinearParams, inputs: Shapes) -> None:
    need_last(inputs[0], p.in_)


def _linear_shapes(p: LinearParams, inputs: Shapes) -> list[TensorSpec]:
    return [TensorSpec("float32", (*inputs[0].shape[:-1], p.out))]


class EmbeddingParams(WeightedParams):
    """One row of a table for each number."""

    num: int = Field(gt=0, description="rows of the table (vocabulary size)")
    dim: int = Field(gt=0, description="size of a row")


class Embedding(VNodeModule):
    """As torch.nn.Embedding: weight (num, dim), drawn from N(0, 1) unless `init` says otherwise."""

    def __init__(self, params: EmbeddingParams) -> None:
        super().__init__()
        self.params = params
        self.weight = nn.Parameter(torch.empty(params.num, params.dim))

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        if self.params.init is not None:
            self.params.init.fill(self.weight, initial("weight"))
        else:
            nn.init.normal_(self.weight, generator=initial("weight"))

    def forward(self, x_BT: Tensor) -> Tensor:
        return F.embedding(x_BT, self.weight)

    def bind(self) -> Call:
        embedding, weight = F.embedding, self.weight
        return lambda x_BT: embedding(x_BT, weight)


def _embedding_check(p: EmbeddingParams, inputs: Shapes) -> None:
    need_integer(inputs[0])


def _embedding_shapes(p: EmbeddingParams, inputs: Shapes) -> list[TensorSpec]:
    return [TensorSpec("float32", (*inputs[0].shape, p.dim))]


class PositionParams(WeightedParams):
    """A learned vector for each position; the input only says how many positions there are."""

    num: int = Field(gt=0, description="largest number of positions")
    dim: int = Field(gt=0, description="size of a vector")


class Position(VNodeModule):
    """weight (num, dim); x (B, T, …) -> (T, dim), to be added to every sample."""

    def __init__(self, params: PositionParams) -> None:
        super().__init__()
        self.params = params
        self.weight = nn.Parameter(torch.empty(params.num, params.dim))

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        if self.params.init is not None:
            self.params.init.fill(self.weight, initial("weight"))
        else:
            nn.init.normal_(self.weight, generator=initial("weight"))

    def forward(self, x_BT: Tensor) -> Tensor:
        start = self.context.position
        end = start + x_BT.shape[1]
        if end > self.params.num:
            raise ShapeError(f"expects at most {self.params.num} positions, got {end}")
        return self.weight[start:end].clone()


def _position_check(p: PositionParams, inputs: Shapes) -> None:
    shape = inputs[0].shape
    if len(shape) < 2 or not isinstance(shape[1], int):
        raise ShapeError(f"expects (batch, at most {p.num}), got ({', '.join(map(str, shape))})")
    if shape[1] > p.num:
        raise ShapeError(f"expects (batch, at most {p.num}), got ({', '.join(map(str, shape))})")


def _position_shapes(p: PositionParams, inputs: Shapes) -> list[TensorSpec]:
    return [TensorSpec("float32", (inputs[0].shape[1], p.dim))]


def _look_up_flops(p: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    return numel(outputs[0])


TYPES = [
    NodeType(
        name="linear", params=LinearParams, module=Linear, family="dense", tie="weight",
        doc="fully connected layer over the last dimension", flops=_linear_flops, check=_linear_check,
        shapes=_linear_shapes,
        example={"in": 64, "out": 32},
    ),
    NodeType(
        name="embedding", params=EmbeddingParams, module=Embedding, family="dense", tie="weight",
        doc="a learned vector for each token number", flops=_look_up_flops, check=_embedding_check,
        shapes=_embedding_shapes,
        closed=frozenset({"x"}), backward=1.0, example={"num": 100, "dim": 16},
    ),
    NodeType(
        name="position", params=PositionParams, module=Position, family="dense", tie="weight",
        doc="a learned vector for each position, without a batch dimension", flops=_look_up_flops,
        check=_position_check, shapes=_position_shapes,
        closed=frozenset({"x"}), backward=1.0, example={"num": 64, "dim": 16},
    ),
]  # fmt: skip
