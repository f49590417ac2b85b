"""Tensors coded for an edge, and back: bf16 and int8 as networks.codecs defines them. Pure torch, on any device.

The bytes, and so the decoded tensor, depend on the tensor alone: not on where it is made or read, and in int8 not on
other samples. Values that are not finite are never lost: bf16 carries them, int8 makes the whole block NaN, so whoever
looks for them behind the edge finds them and the step is not applied.

    bf16: values as bfloat16
    int8: [scales as float32, one per block, row by row][values as int8]

In int8 a block whose scale would be below the smallest normal float32 (absmax below 2^-119) becomes zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wire.coded import BF16, BLOCK, SCALE_BYTES, blocks_of, coded_bytes

LEVELS = 127
SMALLEST = torch.finfo(torch.float32).tiny
LARGEST = float.fromhex("0x1.020406p+121")
"""The largest scale whose value 127 is still finite in float32."""


def encode(tensor: Tensor, codec: str) -> Tensor:
    """The bytes of a floating-point tensor: uint8, one dimension, on its device. Raises KeyError for no codec."""
    tensor = tensor.detach()
    size = coded_bytes(codec, tensor.shape)
    if codec == BF16:
        return tensor.to(torch.bfloat16).contiguous().reshape(-1).view(torch.uint8)
    found = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    if size:
        _encode_int8(tensor.to(torch.float32), found)
    return found


def decode(data: Tensor, codec: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of `encode`'s bytes. Raises KeyError for no codec, ValueError for another number of bytes."""
    size = coded_bytes(codec, shape)
    if data.numel() != size:
        raise ValueError(f"expected {size} bytes of {codec}, got {data.numel()}")
    if not size:
        return torch.empty(list(shape), dtype=dtype, device=data.device)
    if codec == BF16:
        return data.view(torch.bfloat16).reshape(list(shape)).to(dtype)
    blocks = blocks_of(shape)
    last = shape[-1] if shape else 1
    scales = data[: SCALE_BYTES * blocks].view(torch.float32)
    values = data[SCALE_BYTES * blocks :].view(torch.int8).reshape(-1, last)
    if last <= BLOCK:
        found = values * scales.reshape(-1, 1)
    else:
        found = values * scales.reshape(values.shape[0], -1).repeat_interleave(BLOCK, dim=1)[:, :last]
    return found.reshape(list(shape)).to(dtype)


def _encode_int8(tensor: Tensor, found: Tensor) -> None:
    """Write scales and values of a float32 tensor with elements."""
    last = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.reshape(-1, last)
    width = min(last, BLOCK)
    if last % width:
        rows = torch.nn.functional.pad(rows, (0, width - last % width))
    grid = rows.reshape(rows.shape[0], -1, width)
    highest = grid.abs().amax(dim=2)
    bad = ~torch.isfinite(highest)
    scale = highest / LEVELS
    scale = torch.where(scale < SMALLEST, torch.zeros_like(scale), scale.clamp(max=LARGEST))
    if bool(bad.any()):
        scale = scale.masked_fill(bad, torch.nan)
        grid = grid.masked_fill(bad[:, :, None], 0.0)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = (grid / divisor[:, :, None]).round_().clamp_(-LEVELS, LEVELS)
    blocks = scale.numel()
    found[: SCALE_BYTES * blocks].view(torch.float32).copy_(scale.reshape(-1))
    values = found[SCALE_BYTES * blocks :].view(torch.int8).reshape(-1, last)
    values.copy_(levels.reshape(levels.shape[0], -1)[:, :last])


def rounded(tensor: Tensor, codec: str) -> Tensor:
    """What a reader behind a coded edge gets: decoded from the bytes that would travel. Never the tensor itself."""
    if codec == BF16 and tensor.dtype == torch.bfloat16:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return decode(encode(tensor, codec), codec, tensor.dtype, tensor.shape)


class Rounded(torch.autograd.Function):
    """A coded group whose bytes do not travel: the value rounded, and on the way back the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, codec: str) -> Tensor:
        ctx.codec = codec
        return rounded(value, codec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return rounded(gradient, ctx.codec), None


def round_in_place_of_travel(value: Tensor, codec: str) -> Tensor:
    """`value` as the readers of a coded group get it, with gradients coded as they would be."""
    found: Tensor = Rounded.apply(value, codec)  # type: ignore[no-untyped-call]
    return found
