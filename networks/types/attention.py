"""Self-attention (Vaswani et al., arXiv 1706.03762), multi-head and grouped-query (arXiv 2305.13245).

Shapes: B batch, T positions of this call, S positions with the cache, D width, H query heads, K key and value heads,
E width of a head. Rotary embedding (arXiv 2104.09864) turns the two halves of a head, as Llama does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from networks.types.base import (
    NodeType,
    ShapeError,
    Shapes,
    VNodeModule,
    WeightedParams,
    dims_text,
    need_last,
    numel,
)
from networks.types.initial import Init, fill_fan_in


class AttentionParams(WeightedParams):
    """Self-attention with a fused projection to queries, keys and values."""

    dim: int = Field(gt=0, description="size of the last dimension")
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int | None = Field(default=None, gt=0, description="key and value heads (default: as many as heads)")
    head_dim: int | None = Field(default=None, gt=0, description="width of a head (default: dim / heads)")
    causal: bool = Field(default=False, description="a position sees only itself and earlier ones")
    bias: bool = Field(default=True, description="biases on both projections")
    rotary: bool = Field(default=False, description="rotary position embedding")
    rotary_base: float = Field(default=10000.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of attention weights dropped while training")
    out_init: Init | None = Field(default=None, description="how the output projection starts (default: as init)")

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.dim // self.heads


class Attention(VNodeModule):
    """qkv_weight ((H + 2K)·E, D): queries, then keys, then values; out_weight (D, H·E); biases where asked for."""

    def __init__(self, params: AttentionParams) -> None:
        super().__init__()
        p = self.params = params
        inner, shared = p.heads * p.width, p.key_heads * p.width
        self.qkv_weight = nn.Parameter(torch.empty(inner + 2 * shared, p.dim))
        self.qkv_bias = nn.Parameter(torch.empty(inner + 2 * shared)) if p.bias else None
        self.out_weight = nn.Parameter(torch.empty(p.dim, inner))
        self.out_bias = nn.Parameter(torch.empty(p.dim)) if p.bias else None
        self._angles: tuple[Tensor, Tensor] | None = None

    def reset(self, initial: Callable[[str], torch.Generator]) -> None:
        p = self.params
        for name, weight, bias, init in (
            ("qkv", self.qkv_weight, self.qkv_bias, p.init),
            ("out", self.out_weight, self.out_bias, p.out_init or p.init),
        ):
            if init is not None:
                init.fill(weight, initial(f"{name}_weight"))
            else:
                fill_fan_in(weight, weight.shape[1], initial(f"{name}_weight"))
            if bias is not None:
                if init is not None:
                    nn.init.zeros_(bias)
                else:
                    fill_fan_in(bias, weight.shape[1], initial(f"{name}_bias"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        p, context = self.params, self.context
        b, t, _ = x_BTD.shape
        qkv = F.linear(x_BTD, self.qkv_weight, self.qkv_bias)
        if p.key_heads == p.heads:
            q_BHTE, k_BKSE, v_BKSE = qkv.view(b, t, 3, p.heads, p.width).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            heads = qkv.view(b, t, p.heads + 2 * p.key_heads, p.width).transpose(1, 2)
            q_BHTE, k_BKSE, v_BKSE = torch.split(heads, [p.heads, p.key_heads, p.key_heads], 1)
        if p.rotary:
            cos_TE, sin_TE = self._rotation(context.position, t, q_BHTE)
            q_BHTE, k_BKSE = _turn(q_BHTE, cos_TE, sin_TE), _turn(k_BKSE, cos_TE, sin_TE)
        if context.cache is not None:
            if not p.causal:
                raise ShapeError(f"'{self.vnode}' is not causal: its keys can't be cached")
            k_BKSE, v_BKSE = context.cache.extend(self.vnode, context.position, k_BKSE, v_BKSE)
        if p.key_heads != p.heads:
            k_BKSE = k_BKSE.repeat_interleave(p.heads // p.key_heads, 1)
            v_BKSE = v_BKSE.repeat_interleave(p.heads // p.key_heads, 1)
        y_BHTE = self._attend(q_BHTE, k_BKSE, v_BKSE)
        return F.linear(y_BHTE.transpose(1, 2).reshape(b, t, p.heads * p.width), self.out_weight, self.out_bias)

    def _attend(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor) -> Tensor:
        p, context = self.params, self.context
        t, s = q_BHTE.shape[2], k_BHSE.shape[2]
        if p.dropout > 0.0 and context.training:
            scores_BHTS = (q_BHTE @ k_BHSE.transpose(-2, -1)) * (1.0 / math.sqrt(p.width))
            if p.causal:
                later = torch.ones(t, s, dtype=torch.bool, device=scores_BHTS.device).triu(s - t + 1)
                scores_BHTS = scores_BHTS.masked_fill(later, float("-inf"))
            weights_BHTS = torch.softmax(scores_BHTS, -1)
            mask = context.mask(self.vnode, weights_BHTS.shape, p.dropout, weights_BHTS).to(weights_BHTS.dtype)
            return (weights_BHTS * mask) @ v_BHSE
        if not p.causal or t == 1:
            return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE)
        if t == s:
            return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, is_causal=True)
        seen = torch.ones(t, s, dtype=torch.bool, device=q_BHTE.device).tril(s - t)
        return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, attn_mask=seen)

    def _rotation(self, position: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        end = position + length
        if self._angles is None or self._angles[0].shape[0] < end or self._angles[0].device != like.device:
            width = self.params.width
            powers = torch.arange(0, width, 2, dtype=torch.float32) / width
            angles = torch.outer(torch.arange(max(end, 64), dtype=torch.float32), self.params.rotary_base**-powers)
            angles = torch.cat((angles, angles), -1)
            self._angles = angles.cos().to(like.device), angles.sin().to(like.device)
        cos_SE, sin_SE = self._angles
        return cos_SE[position:end].to(like.dtype), sin_SE[position:end].to(like.dtype)


def _turn(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    first, second = x_BHTE.chunk(2, -1)
    return x_BHTE * cos_TE + torch.cat((-second, first), -1) * sin_TE


def _check(p: AttentionParams, inputs: Shapes) -> None:
    if p.head_dim is None and p.dim % p.heads:
        raise ShapeError(f"dim {p.dim} must divide by heads {p.heads}")
    if p.heads % p.key_heads:
        raise ShapeError(f"heads {p.heads} must divide by kv_heads {p.key_heads}")
    if p.rotary and p.width % 2:
        raise ShapeError(f"rotary needs an even head width, got {p.width}")
    if len(inputs[0].shape) != 3:
        raise ShapeError(f"expects (batch, positions, {p.dim}), got {dims_text(inputs[0].shape)}")
    need_last(inputs[0], p.dim)


def _flops(p: AttentionParams, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    rows, t = numel(inputs[0][:-1]), inputs[0][1]
    projections = 2 * rows * p.dim * p.width * (2 * p.heads + 2 * p.key_heads)
    scores = rows * (t + 1) // 2 if p.causal else rows * t
    return projections + scores * p.heads * (4 * p.width + 5)


TYPES = [
    NodeType(
        name="attention", params=AttentionParams, module=Attention, family="attention",
        doc="self-attention: multi-head, grouped-query, causal, rotary", flops=_flops, check=_check,
        example={"dim": 64, "heads": 4, "causal": True},
    )
]  # fmt: skip
