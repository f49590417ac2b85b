"""The tiny networks of the simulator: their files, their data, and the same networks as programs in plain torch.

A program takes its weights as a mapping `(VNode, parameter) -> tensor` and gives the sum of the losses of a microbatch.
Fan-outs beyond two are summed in the order of the edges, as the file says them; everything else is torch as it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from networks.load import load
from networks.network import Network
from pnode.data.packed import encode_packed

Weights = Mapping[tuple[str, str], Tensor]
Mask = Callable[[str, tuple[int, ...], float], Tensor]
"""A dropout mask by VNode, shape and rate."""
Program = Callable[[Weights, Weights, dict[str, Tensor], Mask], Tensor]
"""(parameters, buffers, microbatch, mask) -> summed loss; buffers are changed in place."""

BATCH, MICROBATCHES, SEED = 4, 2, 11

HEAD = """
version: 1
name: {name}
inputs:
  x: {{dtype: float32, shape: [batch, {shape}]}}
  targets: {{dtype: int64, shape: [batch]}}
"""
TRAIN = """
outputs: {{logits: head, loss: loss}}
train:
  data: {{{data}}}
  batch: 4
  microbatches: 2
  steps: 8
  seed: 11
  optimizer: {{{optimizer}}}
  schedule: {{{schedule}}}
"""

CHAIN = """
nodes:
  - {id: fc1, type: linear, in: 4, out: 6}
  - {id: act1, type: tanh}
  - {id: fc2, type: linear, in: 6, out: 6}
  - {id: drop, type: dropout, p: 0.25}
  - {id: act2, type: gelu}
  - {id: head, type: linear, in: 6, out: 3}
  - {id: loss, type: cross_entropy}
edges:
  - x -> fc1 -> act1 -> fc2 -> drop -> act2 -> head -> loss.logits
  - targets -> loss.targets
"""

MERGE = """
nodes:
  - {id: fc0, type: linear, in: 4, out: 6}
  - {id: act0, type: relu}
  - {id: left, type: linear, in: 6, out: 6}
  - {id: right, type: linear, in: 6, out: 6, bias: false}
  - {id: bend, type: tanh}
  - {id: meet, type: add}
  - {id: head, type: linear, in: 6, out: 3}
  - {id: loss, type: cross_entropy}
edges:
  - x -> fc0 -> act0
  - act0 -> left -> meet
  - act0 -> right -> bend -> meet
  - act0 -> meet
  - meet -> head -> loss.logits
  - targets -> loss.targets
"""

TIED = """
version: 1
name: tied
inputs:
  tokens: {dtype: int64, shape: [batch, 4]}
  targets: {dtype: int64, shape: [batch, 4]}
nodes:
  - {id: tok, type: embedding, num: 9, dim: 6, init: {type: normal, std: 0.5}}
  - {id: norm, type: layernorm, dim: 6}
  - {id: up, type: linear, in: 6, out: 8}
  - {id: act, type: silu}
  - {id: down, type: linear, in: 8, out: 6}
  - {id: head, type: linear, in: 6, out: 9, bias: false, tie: tok}
  - {id: loss, type: cross_entropy}
edges:
  - tokens -> tok -> norm -> up -> act -> down -> head -> loss.logits
  - targets -> loss.targets
"""

NORM = """
nodes:
  - {id: conv, type: conv2d, in: 1, out: 2, kernel: 3, padding: 1, bias: false}
  - {id: bn, type: batchnorm2d, dim: 2}
  - {id: act, type: relu}
  - {id: flat, type: flatten}
  - {id: head, type: linear, in: 32, out: 3}
  - {id: loss, type: cross_entropy}
edges:
  - x -> conv -> bn -> act -> flat -> head -> loss.logits
  - targets -> loss.targets
"""

DIGITS = "dataset: digits, sampler: shuffle"


def _chain(w: Weights, b: Weights, batch: dict[str, Tensor], mask: Mask) -> Tensor:
    x = torch.tanh(F.linear(batch["x"], w["fc1", "weight"], w["fc1", "bias"]))
    x = F.linear(x, w["fc2", "weight"], w["fc2", "bias"])
    x = F.gelu(x * mask("drop", tuple(x.shape), 0.25))
    return _loss(F.linear(x, w["head", "weight"], w["head", "bias"]), batch["targets"])


def _merge(w: Weights, b: Weights, batch: dict[str, Tensor], mask: Mask) -> Tensor:
    x = torch.relu(F.linear(batch["x"], w["fc0", "weight"], w["fc0", "bias"]))
    one, two, three = _Ordered.apply(x)  # type: ignore[no-untyped-call]
    left = F.linear(one, w["left", "weight"], w["left", "bias"])
    bend = torch.tanh(F.linear(two, w["right", "weight"]))
    return _loss(F.linear(left + bend + three, w["head", "weight"], w["head", "bias"]), batch["targets"])


def _tied(w: Weights, b: Weights, batch: dict[str, Tensor], mask: Mask) -> Tensor:
    x = F.embedding(batch["tokens"], w["tok", "weight"])
    x = F.layer_norm(x, (6,), w["norm", "weight"], w["norm", "bias"], 1e-5)
    x = F.silu(F.linear(x, w["up", "weight"], w["up", "bias"]))
    x = F.linear(x, w["down", "weight"], w["down", "bias"])
    return _loss(F.linear(x, w["head", "weight"]), batch["targets"])


def _norm(w: Weights, b: Weights, batch: dict[str, Tensor], mask: Mask) -> Tensor:
    x = F.conv2d(batch["x"], w["conv", "weight"], None, 1, 1)
    x = F.batch_norm(
        x, b["bn", "running_mean"], b["bn", "running_var"], w["bn", "weight"], w["bn", "bias"], True, 0.1, 1e-5
    )
    x = torch.relu(x).flatten(1)
    return _loss(F.linear(x, w["head", "weight"], w["head", "bias"]), batch["targets"])


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")


class _Ordered(torch.autograd.Function):
    """A value with three readers: their gradients are added in order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, ...]:
        return value.clone(), value.clone(), value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + gradients[1] + gradients[2]


@dataclass(frozen=True)
class Shape:
    """One network: its file, its program, and what an independent calculation has to know of its recipe."""

    name: str
    text: str
    program: Program
    optimizer: str
    lr: float
    schedule: str
    sampler: str
    warmup: int = 0
    min_lr: float = 0.0
    clip: float | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    features: tuple[int, ...] = ()
    classes: int = 3
    tied: tuple[tuple[str, str], ...] = ()
    """(user, owner) of tied weights."""
    buffers: tuple[str, ...] = ()
    steps: int = 8
    every: tuple[int, ...] = (2, 3)
    nodes: tuple[str, ...] = field(default=())


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            "chain",
            HEAD.format(name="chain", shape="4")
            + CHAIN
            + TRAIN.format(
                data=DIGITS,
                optimizer="type: adamw, lr: 0.02, weight_decay: 0.1, clip: 1.0",
                schedule="type: cosine, warmup: 2",
            ),
            _chain, "adamw", 0.02, "cosine", "shuffle",
            warmup=2, clip=1.0, weight_decay=0.1, features=(4,),
        ),
        Shape(
            "merge",
            HEAD.format(name="merge", shape="4")
            + MERGE
            + TRAIN.format(
                data=DIGITS,
                optimizer="type: sgd, lr: 0.05, momentum: 0.9, nesterov: true",
                schedule="type: linear, min_lr: 0.01",
            ),
            _merge, "sgd", 0.05, "linear", "shuffle", min_lr=0.01, momentum=0.9, features=(4,),
        ),
        Shape(
            "tied",
            TIED
            + TRAIN.format(
                data="text: a.txt, tokenizer: char, sampler: random",
                optimizer="type: adamw, lr: 0.02, clip: 0.5",
                schedule="type: constant",
            ),
            _tied, "adamw", 0.02, "constant", "random", clip=0.5, classes=9, tied=(("head", "tok"),),
        ),
        Shape(
            "norm",
            HEAD.format(name="norm", shape="1, 4, 4")
            + NORM
            + TRAIN.format(
                data=DIGITS,
                optimizer="type: adamw, lr: 0.01",
                schedule="type: constant, warmup: 1",
            ),
            _norm, "adamw", 0.01, "constant", "shuffle", warmup=1, features=(1, 4, 4), buffers=("bn",),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A network and its data, ready to be put into a store; made once per process."""

    shape: Shape
    network: Network
    network_bytes: bytes
    data: bytes
    arrays: dict[str, Any]


@cache
def built(name: str) -> Built:
    """The network of that name."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(shape.text, encoding="utf-8")
        network = load(path)
    pick = np.random.RandomState(7)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 10), ("val", 4)):
        if shape.features:
            arrays[f"{split}.features"] = pick.normal(size=(count, *shape.features)).astype(np.float32)
            arrays[f"{split}.targets"] = pick.randint(0, shape.classes, count).astype(np.int64)
            arrays[f"{split}.ids"] = np.arange(count, dtype=np.int64)
        else:
            arrays[f"{split}.tokens"] = pick.randint(0, shape.classes, 40 * count).astype(np.uint16)
    kind = "samples" if shape.features else "tokens"
    return Built(shape, network, network.to_bytes(), b"".join(encode_packed(kind, shape.classes, arrays)), arrays)
