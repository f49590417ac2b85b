"""Small networks, as files, and data in memory, for the tests of compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from networks.load import load
from networks.network import Network

MLP = """
version: 1
name: mlp
inputs:
  x: {dtype: float32, shape: [batch, 12]}
  targets: {dtype: int64, shape: [batch]}
nodes:
  - {id: fc1, type: linear, in: 12, out: 33}
  - {id: act1, type: relu}
  - {id: fc2, type: linear, in: 33, out: 17}
  - {id: act2, type: tanh}
  - {id: head, type: linear, in: 17, out: 5}
  - {id: loss, type: cross_entropy}
edges:
  - x -> fc1 -> act1 -> fc2 -> act2 -> head -> loss.logits
  - targets -> loss.targets
outputs: {logits: head, loss: loss}
train:
  batch: 7
  steps: 8
  optimizer: {type: adamw, lr: 1e-2, weight_decay: 0.1, clip: 1.0}
"""

CNN = """
version: 1
name: cnn
inputs:
  x: {dtype: float32, shape: [batch, 1, 8, 8]}
  targets: {dtype: int64, shape: [batch]}
nodes:
  - {id: conv1, type: conv2d, in: 1, out: 6, padding: 1, bias: false}
  - {id: bn1, type: batchnorm2d, dim: 6}
  - {id: act1, type: relu}
  - {id: conv2, type: conv2d, in: 6, out: 6, padding: 1, bias: false}
  - {id: bn2, type: batchnorm2d, dim: 6}
  - {id: res, type: add}
  - {id: act2, type: silu}
  - {id: max, type: maxpool2d}
  - {id: avg, type: avgpool2d}
  - {id: cat, type: concat, dim: 1}
  - {id: mix, type: conv2d, in: 12, out: 7, kernel: 3}
  - {id: pool, type: mean, dim: [2, 3]}
  - {id: head, type: linear, in: 7, out: 5}
  - {id: loss, type: cross_entropy}
edges:
  - x -> conv1 -> bn1 -> act1 -> conv2 -> bn2 -> res -> act2 -> max -> cat -> mix -> pool -> head -> loss.logits
  - act1 -> res
  - act2 -> avg -> cat
  - targets -> loss.targets
outputs: {logits: head, loss: loss}
train:
  batch: 8
  steps: 8
  optimizer: {type: sgd, lr: 5e-2, momentum: 0.9, nesterov: true, weight_decay: 1e-3, clip: 2.0}
"""

GPT = """
version: 1
name: gpt
vars: {ctx: 16, d: 24, heads: 3, kv: 3, layers: 2, drop: 0.0, vocab: 29, rotary: false}
inputs:
  tokens: {dtype: int64, shape: [batch, $ctx]}
  targets: {dtype: int64, shape: [batch, $ctx]}
blocks:
  transformer:
    inputs: [x]
    nodes:
      - {id: ln1, type: layernorm, dim: $d, bias: false}
      - {id: attn, type: attention, dim: $d, heads: $heads, kv_heads: $kv, causal: true, bias: false,
         rotary: $rotary, dropout: $drop}
      - {id: drop1, type: dropout, p: $drop}
      - {id: add1, type: add}
      - {id: ln2, type: layernorm, dim: $d, bias: false}
      - {id: up, type: linear, in: $d, out: $(4*d), bias: false, init: {type: normal, std: 0.02}}
      - {id: act, type: gelu}
      - {id: down, type: linear, in: $(4*d), out: $d, bias: false}
      - {id: drop2, type: dropout, p: $drop}
      - {id: add2, type: add}
    edges:
      - x -> ln1 -> attn -> drop1 -> add1 -> ln2 -> up -> act -> down -> drop2 -> add2
      - x -> add1
      - add1 -> add2
    output: add2
nodes:
  - {id: tok, type: embedding, num: $vocab, dim: $d, init: {type: normal, std: 0.02}}
  - {id: pos, type: position, num: $ctx, dim: $d, init: {type: normal, std: 0.02}}
  - {id: emb, type: add}
  - {id: drop, type: dropout, p: $drop}
  - {id: h, type: block, block: transformer, repeat: $layers}
  - {id: ln_f, type: layernorm, dim: $d, bias: false}
  - {id: head, type: linear, in: $d, out: $vocab, bias: false, tie: tok}
  - {id: loss, type: cross_entropy}
edges:
  - tokens -> tok -> emb -> drop -> h -> ln_f -> head -> loss.logits
  - tokens -> pos -> emb
  - targets -> loss.targets
outputs: {logits: head, loss: loss}
train:
  batch: 6
  steps: 8
  optimizer: {type: adamw, lr: 1e-2, betas: [0.9, 0.99], weight_decay: 0.1, clip: 1.0}
  schedule: {type: cosine, warmup: 3, min_lr: 1e-3}
"""

MOE = """
version: 1
name: moe
inputs:
  x: {dtype: float32, shape: [batch, 12]}
  targets: {dtype: int64, shape: [batch]}
nodes:
  - {id: stem, type: linear, in: 12, out: 16}
  - {id: gate, type: linear, in: 16, out: 3}
  - {id: share, type: softmax}
  - {id: part, type: split, parts: 3}
  - {id: a, type: linear, in: 16, out: 16}
  - {id: b1, type: linear, in: 16, out: 32}
  - {id: b2, type: gelu}
  - {id: b3, type: linear, in: 32, out: 16}
  - {id: c1, type: reshape, shape: [4, 4]}
  - {id: c2, type: transpose}
  - {id: c3, type: linear, in: 4, out: 4}
  - {id: c4, type: flatten}
  - {id: wa, type: mul}
  - {id: wb, type: mul}
  - {id: wc, type: mul}
  - {id: sum, type: add}
  - {id: unused, type: linear, in: 16, out: 4}
  - {id: dead, type: sigmoid}
  - {id: head, type: linear, in: 16, out: 5}
  - {id: loss, type: cross_entropy}
edges:
  - x -> stem -> gate -> share -> part
  - stem -> a -> wa -> sum -> head -> loss.logits
  - stem -> b1 -> b2 -> b3 -> wb -> sum
  - stem -> unused -> dead
  - stem -> c1 -> c2 -> c3 -> c4 -> wc -> sum
  - stem -> sum
  - part.0 -> wa
  - part.1 -> wb
  - part.2 -> wc
  - targets -> loss.targets
outputs: {logits: head, loss: loss, dead: dead}
train:
  batch: 8
  steps: 8
  optimizer: {type: adamw, lr: 1e-2, weight_decay: 0.1, clip: 1.0, clip_local: 0.5}
"""

VIEWS = """
version: 1
name: views
inputs:
  x: {dtype: float32, shape: [batch, 48]}
  targets: {dtype: int64, shape: [batch, 24]}
nodes:
  - {id: fc, type: linear, in: 48, out: 1920}
  - {id: grid, type: reshape, shape: [40, 48]}
  - {id: rows, type: linear, in: 48, out: 72}
  - {id: cut, type: split, parts: 3}
  - {id: t0, type: transpose}
  - {id: t1, type: transpose, dim0: 1, dim1: 2}
  - {id: mix0, type: linear, in: 40, out: 65}
  - {id: mix1, type: linear, in: 40, out: 65}
  - {id: third, type: linear, in: 24, out: 24}
  - {id: t2, type: transpose}
  - {id: mix2, type: linear, in: 40, out: 65}
  - {id: scale, type: mean, dim: -1, keepdim: true}
  - {id: scaled, type: mul}
  - {id: t3, type: transpose}
  - {id: means, type: mean, dim: 1, keepdim: true}
  - {id: weighed, type: mul}
  - {id: t4, type: transpose}
  - {id: sum, type: add}
  - {id: cat, type: concat, dim: -1}
  - {id: head, type: linear, in: 130, out: 31}
  - {id: loss, type: cross_entropy}
edges:
  - x -> fc -> grid -> rows -> cut
  - cut.0 -> t0 -> mix0 -> sum
  - cut.1 -> t1 -> mix1 -> scaled -> t3 -> weighed -> t4 -> sum
  - t3 -> means -> weighed
  - cut.2 -> third -> t2 -> mix2 -> scale -> scaled
  - mix2 -> cat
  - sum -> cat -> head -> loss.logits
  - targets -> loss.targets
outputs: {logits: head, loss: loss}
train:
  batch: 8
  steps: 8
  optimizer: {type: adamw, lr: 1e-2, clip: 1.0}
"""

FILES = {"mlp": MLP, "cnn": CNN, "gpt": GPT, "moe": MOE, "views": VIEWS}


def read(text: str, folder: Path, *sets: str) -> Network:
    """The network of a file's text."""
    path = folder / "network.yaml"
    path.write_text(text)
    return load(path, sets=list(sets))


@dataclass
class Memory:
    """A BatchSource over random samples, a pure function of (seed, step, microbatch)."""

    network: Network
    seed: int = 0
    ignored: float = 0.0
    given: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    def batch(self, split: str, step: int, microbatch: int, replica: int = 0) -> dict[str, Tensor]:
        """One microbatch, cut from the batch of the step as `torch.tensor_split` does."""
        if (step, microbatch) in self.given:
            return self.given[step, microbatch]
        parts = self.network.recipe.microbatches
        return {name: whole.tensor_split(parts)[microbatch] for name, whole in self.whole(step).items()}

    def whole(self, step: int) -> dict[str, Tensor]:
        """All samples of a step."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step)
        found = {}
        classes = self.network.graph.costs[self.network.graph.outputs["logits"].node].outputs["y"].shape[-1]
        for name, spec in self.network.graph.inputs.items():
            shape = [self.network.recipe.batch, *[int(extent) for extent in spec.shape[1:]]]
            if spec.dtype == "int64":
                found[name] = torch.randint(int(classes), shape, generator=generator)
            else:
                found[name] = torch.randn(shape, generator=generator)
        if self.ignored:
            hidden = torch.rand(found["targets"].shape, generator=generator) < self.ignored
            found["targets"] = found["targets"].masked_fill(hidden, -1)
        return found

    def rows(self, split: str, start: int, count: int) -> dict[str, Tensor]:
        """Not used by the tests of compute."""
        raise NotImplementedError

    def size(self, split: str) -> int:
        """Not used by the tests of compute."""
        raise NotImplementedError

    def sample_ids(self, step: int, replica: int = 0) -> list[int]:
        """The samples of a step."""
        return list(range(step * self.network.recipe.batch, (step + 1) * self.network.recipe.batch))

    def position(self, step: int) -> None:
        """Not used by the tests of compute."""
        raise NotImplementedError
