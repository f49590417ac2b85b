"""Types that work element by element: activations, dropout, softmax, sum and product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from networks.graph import TensorSpec
from networks.types.base import (
    Call,
    NodeParams,
    NodeType,
    ShapeError,
    Shapes,
    VNodeModule,
    dims_text,
    need_float,
    per_element,
)


class NoParams(NodeParams):
    """Takes no parameters."""


class GeluParams(NodeParams):
    """Hendrycks and Gimpel, arXiv 1606.08415."""

    approximate: Literal["none", "tanh"] = Field(default="none", description="exact, or GPT-2's tanh formula")


class DimParams(NodeParams):
    """Works along one dimension; 0 is the batch."""

    dim: int = Field(default=-1, description="dimension, counted from the batch (0) or from the end (-1)")


class DropoutParams(NodeParams):
    """Srivastava et al., JMLR 15 (2014)."""

    p: float = Field(default=0.5, ge=0, lt=1, description="share of the elements that are dropped while training")


class Function(VNodeModule):
    """A node that is one torch function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)

    def bind(self) -> Call:
        return self.function


def _function(function: Callable[..., Tensor]) -> Callable[[Any], VNodeModule]:
    return lambda params: Function(function)


def _gelu(params: GeluParams) -> VNodeModule:
    return Function(F.gelu if params.approximate == "none" else partial(F.gelu, approximate=params.approximate))


def _softmax(params: DimParams) -> VNodeModule:
    return Function(partial(torch.softmax, dim=params.dim))


class Dropout(VNodeModule):
    """Drops elements by a mask of its own generator while training; passes them on otherwise."""

    def __init__(self, params: DropoutParams) -> None:
        super().__init__()
        self.rate = params.p

    def forward(self, x: Tensor) -> Tensor:
        if not self.context.training or self.rate == 0.0:
            return x.view_as(x)
        return x * self.context.mask(self.vnode, x.shape, self.rate, x).to(x.dtype)


class Add(VNodeModule):
    """Sum of all inputs, in the order of the edges."""

    def __init__(self, params: NoParams) -> None:
        super().__init__()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        if not others:
            return x.view_as(x)
        for other in others:
            x = x + other
        return x


class Mul(VNodeModule):
    """Product of all inputs, in the order of the edges."""

    def __init__(self, params: NoParams) -> None:
        super().__init__()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        if not others:
            return x.view_as(x)
        for other in others:
            x = x * other
        return x


def _float_check(params: Any, inputs: Shapes) -> None:
    need_float(inputs[0])


def _softmax_check(params: DimParams, inputs: Shapes) -> None:
    need_float(inputs[0])
    rank = len(inputs[0].shape)
    if not -rank <= params.dim < rank or params.dim % rank == 0:
        raise ShapeError(f"dim {params.dim} is not a dimension behind the batch of {dims_text(inputs[0].shape)}")


def _broadcast(params: Any, inputs: Shapes) -> list[TensorSpec]:
    shape: tuple[int | str, ...] = ()
    for spec in inputs:
        need_float(spec)
        longer, shorter = (shape, spec.shape) if len(shape) >= len(spec.shape) else (spec.shape, shape)
        joined = list(longer)
        for offset in range(1, len(shorter) + 1):
            a, b = longer[-offset], shorter[-offset]
            if a != b and a != 1 and b != 1:
                texts = " and ".join(dims_text(each.shape) for each in inputs)
                raise ShapeError(f"expects shapes that broadcast together, got {texts}")
            joined[-offset] = b if a == 1 else a
        shape = tuple(joined)
    return [TensorSpec("float32", shape)]


def _variadic(params: Any) -> list[str]:
    return []


def _activation(name: str, function: Callable[..., Tensor], cost: int, doc: str) -> NodeType:
    return NodeType(
        name=name, params=NoParams, module=_function(function), family="activation", doc=doc,
        flops=per_element(cost), check=_float_check, backward=1.0,
    )  # fmt: skip


TYPES = [
    _activation("relu", torch.relu, 1, "max(x, 0)"),
    NodeType(
        name="gelu", params=GeluParams, module=_gelu, family="activation", doc="Gaussian error linear unit",
        flops=per_element(10), check=_float_check, backward=1.5,
    ),
    _activation("silu", F.silu, 5, "x · sigmoid(x)"),
    _activation("tanh", torch.tanh, 5, "hyperbolic tangent"),
    _activation("sigmoid", torch.sigmoid, 4, "1 / (1 + exp(-x))"),
    NodeType(
        name="softmax", params=DimParams, module=_softmax, family="activation", doc="softmax along one dimension",
        flops=per_element(5), check=_softmax_check, backward=1.0, example={"dim": -1},
    ),
    NodeType(
        name="dropout", params=DropoutParams, module=Dropout, family="activation",
        doc="drops elements at random while training", flops=per_element(2), check=_float_check, backward=0.5,
        example={"p": 0.1},
    ),
    NodeType(
        name="add", params=NoParams, module=Add, family="merge", doc="sum of all inputs (shapes broadcast)",
        flops=per_element(1), shapes=_broadcast, inputs=_variadic, variadic=True, backward=1.0,
        tidy_gradients=False, tidy_output=False,
    ),
    NodeType(
        name="mul", params=NoParams, module=Mul, family="merge", doc="product of all inputs (shapes broadcast)",
        flops=per_element(1), shapes=_broadcast, inputs=_variadic, variadic=True, backward=2.0,
        tidy_gradients=False, tidy_output=False,
    ),
]  # fmt: skip
