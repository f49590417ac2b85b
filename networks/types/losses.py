"""Losses. Each is a *sum* over its targets; dividing by the count is done once, at the update (DESIGN part 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from networks.graph import TensorSpec
from networks.types.base import NodeParams, NodeType, ShapeError, Shapes, VNodeModule, dims_text, need_float, numel


class CrossEntropyParams(NodeParams):
    """Sum of -log softmax(logits)[target] over the targets that are not ignored."""

    ignore_index: int = Field(default=-1, description="targets with this number are not counted")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)


class MSEParams(NodeParams):
    """Sum of squared differences; every element is one target."""


class CrossEntropy(VNodeModule):
    """logits (B, …, C) and targets (B, …) int64 -> scalar."""

    def __init__(self, params: CrossEntropyParams) -> None:
        super().__init__()
        self.params = params

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        p = self.params
        rows = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(
            rows, targets.reshape(-1), ignore_index=p.ignore_index, reduction="sum", label_smoothing=p.label_smoothing
        )


class MSE(VNodeModule):
    """input and targets of one shape -> scalar."""

    def __init__(self, params: MSEParams) -> None:
        super().__init__()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(x, targets, reduction="sum")


def _cross_entropy_check(p: CrossEntropyParams, inputs: Shapes) -> None:
    logits, targets = inputs
    need_float(logits)
    if targets.dtype != "int64":
        raise ShapeError(f"expects int64 targets, got {targets.dtype} {dims_text(targets.shape)}")
    if len(logits.shape) < 2 or logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"expects targets {dims_text(logits.shape[:-1])} for logits {dims_text(logits.shape)}, "
            f"got {dims_text(targets.shape)}"
        )


def _mse_check(p: MSEParams, inputs: Shapes) -> None:
    x, targets = inputs
    need_float(x)
    if x.shape != targets.shape or x.dtype != targets.dtype:
        raise ShapeError(f"expects targets {x}, got {targets}")


def _count_classes(tensors: Sequence[Tensor], params: Any) -> int:
    return int((tensors[1] != params.ignore_index).sum().item())


def _count_elements(tensors: Sequence[Tensor], params: Any) -> int:
    return tensors[1].numel()


def _logits_flops(p: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    return 5 * numel(inputs[0])


def _difference_flops(p: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    return 3 * numel(inputs[0])


def _scalar(params: Any, inputs: Shapes) -> list[TensorSpec]:
    return [TensorSpec("float32", ())]


def _logits_ports(params: Any) -> list[str]:
    return ["logits", "targets"]


def _input_ports(params: Any) -> list[str]:
    return ["input", "targets"]


def _loss_port(params: Any) -> list[str]:
    return ["loss"]


TYPES = [
    NodeType(
        name="cross_entropy", params=CrossEntropyParams, module=CrossEntropy, family="loss",
        doc="cross entropy of class numbers, summed over the targets", flops=_logits_flops,
        check=_cross_entropy_check, shapes=_scalar, inputs=_logits_ports,
        outputs=_loss_port, closed=frozenset({"targets"}),
        is_loss=True, counts=_count_classes, backward=1.0, tidy_gradients=False,
    ),
    NodeType(
        name="mse", params=MSEParams, module=MSE, family="loss", doc="squared error, summed over the elements",
        flops=_difference_flops, check=_mse_check, shapes=_scalar, inputs=_input_ports,
        outputs=_loss_port, is_loss=True,
        counts=_count_elements, backward=1.0, tidy_gradients=False,
    ),
]  # fmt: skip
