"""The undisturbed run, computed apart from the system: plain torch, one process, no stage, link, schedule or store.

Initial weights, samples, dropout masks and learning rates are worked out here once more from their descriptions, so
that a mistake of the product can't hide in what it is measured by. Computed once per network and process.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from tests.sim.history import Truth
from tests.sim.nets import BATCH, MICROBATCHES, SEED, Built, Shape, built

Key = tuple[str, str]


def _number(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(_number(key) >> 1)


def _initial(made: Built) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Parameters and buffers as they start; tied ones are the owner's."""
    parameters: dict[Key, Tensor] = {}
    buffers: dict[Key, Tensor] = {}
    graph = made.network.graph
    tied = dict(made.shape.tied)
    for node in graph.nodes:
        values: dict[str, Any] = node.params.model_dump(by_alias=True)
        name = str(node.id)
        if node.type in ("linear", "conv2d"):
            kernel = values.get("kernel", 1)
            fan_in = values["in"] * kernel * kernel
            shape = (values["out"], values["in"], *((kernel, kernel) if node.type == "conv2d" else ()))
            for part, extent in (("weight", shape), ("bias", (values["out"],))):
                if part == "weight" or values["bias"]:
                    bound = fan_in**-0.5
                    drawn = torch.empty(extent).uniform_(
                        -bound, bound, generator=_generator(f"init/{SEED}/{name}/{part}")
                    )
                    parameters[name, part] = drawn
        elif node.type == "embedding":
            drawn = torch.empty(values["num"], values["dim"])
            parameters[name, "weight"] = drawn.normal_(0.0, 0.5, generator=_generator(f"init/{SEED}/{name}/weight"))
        elif node.type in ("layernorm", "batchnorm2d"):
            parameters[name, "weight"] = torch.ones(values["dim"])
            parameters[name, "bias"] = torch.zeros(values["dim"])
            if node.type == "batchnorm2d":
                buffers[name, "running_mean"] = torch.zeros(values["dim"])
                buffers[name, "running_var"] = torch.ones(values["dim"])
    for user, owner in tied.items():
        parameters[user, "weight"] = parameters[owner, "weight"]
    return parameters, buffers


def _permutation(size: int, key: str) -> list[int]:
    """By the SplitMix64 of each number (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    start = _number(key)
    mixed = []
    for place in range(1, size + 1):
        z = (start + place * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        mixed.append(z ^ (z >> 31))
    return sorted(range(size), key=lambda place: (mixed[place], place))


def _samples(shape: Shape, size: int, step: int) -> list[int]:
    if shape.sampler == "random":
        return [_number(f"random/{SEED}/train/0/{step}/{row}") % size for row in range(BATCH)]
    order = [(step * BATCH + row) % size for row in range(BATCH)]
    epochs = [(step * BATCH + row) // size for row in range(BATCH)]
    return [
        _permutation(size, f"shuffle/{SEED}/train/0/{epoch}")[place] for place, epoch in zip(order, epochs, strict=True)
    ]


def _rows(made: Built, ids: list[int]) -> dict[str, Tensor]:
    if made.shape.features:
        return {
            "x": torch.from_numpy(made.arrays["train.features"][ids]),
            "targets": torch.from_numpy(made.arrays["train.targets"][ids]),
        }
    tokens = made.arrays["train.tokens"].astype(np.int64)
    windows = np.stack([tokens[start : start + 5] for start in ids])
    return {
        "tokens": torch.from_numpy(windows[:, :-1].copy()),
        "targets": torch.from_numpy(windows[:, 1:].copy()),
    }


def _size(made: Built) -> int:
    return len(made.arrays["train.targets"]) if made.shape.features else len(made.arrays["train.tokens"]) - 4


def learning_rate(shape: Shape, step: int) -> float:
    """Of update `step`, 0 is the first."""
    if step < shape.warmup:
        return shape.lr * (step + 1) / (shape.warmup + 1)
    if shape.schedule == "constant":
        return shape.lr
    share = (step - shape.warmup) / (shape.steps - shape.warmup)
    rest = 1.0 - share if shape.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return shape.min_lr + rest * (shape.lr - shape.min_lr)


def digest_of_weights(tensors: dict[str, Tensor]) -> str:
    """Of a VNode's parameters and buffers by name: SHA-256 over their bytes, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].detach().numpy().tobytes())
    return found.hexdigest()


class _Run:
    """The training itself."""

    def __init__(self, made: Built) -> None:
        self.made, self.shape = made, made.shape
        self.parameters, self.buffers = _initial(made)
        tied = {(user, "weight") for user, _ in self.shape.tied}
        self.owned = {key: tensor.requires_grad_() for key, tensor in self.parameters.items() if key not in tied}
        for user, owner in self.shape.tied:  # each use gathers a gradient of its own; they share the memory
            self.parameters[user, "weight"] = self.owned[owner, "weight"].detach().requires_grad_()
        matrices = [tensor for tensor in self.owned.values() if tensor.dim() >= 2]
        vectors = [tensor for tensor in self.owned.values() if tensor.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.shape.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if self.shape.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8, fused=True)
        else:
            self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=self.shape.momentum, nesterov=True, fused=True)
            for tensor in self.owned.values():
                self.optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)

    def step(self, step: int) -> tuple[float, str]:
        """Train one step: mean loss, and the digest of its sample ids."""
        ids = _samples(self.shape, _size(self.made), step)
        share = BATCH // MICROBATCHES
        loss, count = 0.0, 0
        self.optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            batch = _rows(self.made, ids[microbatch * share : (microbatch + 1) * share])

            def mask(vnode: str, shape: tuple[int, ...], rate: float, microbatch: int = microbatch) -> Tensor:
                generator = _generator(f"mask/{SEED}/0/{vnode}/{step}/{microbatch}")
                return torch.empty(shape).bernoulli_(1.0 - rate, generator=generator).mul_(1.0 / (1.0 - rate))

            summed = self.shape.program(self.parameters, self.buffers, batch, mask)
            summed.backward()  # type: ignore[no-untyped-call]
            loss += float(summed.detach())
            count += batch["targets"].numel()
        for user, owner in self.shape.tied:
            use = self.parameters[user, "weight"]
            weight = self.owned[owner, "weight"]
            assert weight.grad is not None
            assert use.grad is not None
            weight.grad, use.grad = weight.grad + use.grad, None
        self._scale(count)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.shape, step)
        self.optimizer.step()
        data = b"".join(number.to_bytes(8, "little", signed=True) for number in ids)
        return loss / count, hashlib.sha256(data).hexdigest()

    def _scale(self, count: int) -> None:
        gradients = [tensor.grad for tensor in self.owned.values() if tensor.grad is not None]
        total = sum(float(gradient.norm()) ** 2 for gradient in gradients)
        norm = math.sqrt(total) / count
        clip = self.shape.clip
        coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(coefficient / count)

    def weights(self) -> dict[str, str]:
        """Digest of each VNode's parameters and buffers."""
        found: dict[str, dict[str, Tensor]] = {}
        for (vnode, name), tensor in [*self.owned.items(), *self.buffers.items()]:
            found.setdefault(vnode, {})[name] = tensor
        return {vnode: digest_of_weights(tensors) for vnode, tensors in found.items()}

    def hash(self, step: int) -> str:
        """The hash of a checkpoint after `step` steps, from the description of its format."""
        states: dict[str, dict[str, Tensor]] = {}
        for (vnode, name), tensor in self.owned.items():
            state = states.setdefault(vnode, {})
            state[f"param.{name}"] = tensor.detach().clone()
            for what, value in self.optimizer.state[tensor].items():
                kept = value if isinstance(value, Tensor) else torch.tensor(float(value))
                state[f"optim.{what}.{name}"] = kept.detach().clone().contiguous()
        for (vnode, name), tensor in self.buffers.items():
            states.setdefault(vnode, {})[f"buffer.{name}"] = tensor.clone()
        parts = sorted(
            [vnode, hashlib.sha256(save({name: state[name] for name in sorted(state)})).hexdigest()]
            for vnode, state in states.items()
        )
        position = {
            "data_digest": hashlib.sha256(self.made.data).hexdigest(), "tokenizer_digest": "",
            "sampler": self.shape.sampler, "seed": SEED, "step": step, "samples": step * BATCH,
        }  # fmt: skip
        whole = {
            "network": hashlib.sha256(self.made.network_bytes).hexdigest(), "step": step, "parts": parts,
            "data": position, "counters": {"step": step},
        }  # fmt: skip
        return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@cache
def truth_of(name: str) -> Truth:
    """The undisturbed run of a network, by its name."""
    torch.set_num_threads(1)
    run = _Run(built(name))
    weights, samples, losses, hashes = {}, {}, {}, {}
    for step in range(run.shape.steps):
        losses[step + 1], samples[step + 1] = run.step(step)
        weights[step + 1] = run.weights()
        hashes[step + 1] = run.hash(step + 1)
    return Truth(run.shape.steps, weights, samples, losses, hashes)
