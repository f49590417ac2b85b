"""What keeps every number the same wherever a network is cut (DESIGN part 6; docs/decisions/0021).

- A tensor that crosses from one VNode to the next is *tidy*: contiguous, usual strides, aligned to 64 bytes. What
  comes off the wire is tidy, and matrix products give other bits for other layouts and alignments, so all must be.
- Where a value has three or more gradients, they are added in the order of the edges. One and two need no help:
  there is nothing to order, and a + b = b + a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64


def tidy(tensor: Tensor) -> Tensor:
    """The tensor itself if it is laid out as a fresh one would be, otherwise a copy (a node in the autograd graph)."""
    if tensor.is_contiguous() and tensor.storage_offset() * tensor.itemsize % ALIGNMENT_BYTES == 0:
        stride = 1
        for extent, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            if step != stride:
                break
            stride *= extent if extent > 0 else 1
        else:
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def received(tensor: Tensor, device: torch.device) -> Tensor:
    """A received tensor on `device`, tidy, and at an aligned address (a frame may begin anywhere)."""
    tensor = tensor.detach().to(device)
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT_BYTES:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tidy(tensor)


class Fork(torch.autograd.Function):
    """One value, `count` readers; their gradients are added in the order of the readers, missing ones left out."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        total = None
        for gradient in gradients:
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return None if total is None else tidy(total), None


def fork(value: Tensor, count: int) -> Sequence[Tensor]:
    """`count` aliases of `value` whose gradients are summed in order."""
    if not value.requires_grad:
        return [value] * count
    branches: Sequence[Tensor] = Fork.apply(value, count)  # type: ignore[no-untyped-call]
    return branches
