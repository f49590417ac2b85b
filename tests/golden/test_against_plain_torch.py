"""Against independent programs in plain torch: gradients, optimizer steps, clipping, learning rates.

Gradients are compared before clipping, within 1e-6 relative (norm of the difference), for a batch whole or in 2
or 4 microbatches, with targets that don't count spread unevenly (field case B52).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.network import Network
from networks.recipe import SGD, lr_at
from pnode.reference import Reference
from tests.golden.programs import cnn, gpt, mlp, moe
from tests.golden.samples import FILES, Memory, read

PROGRAMS: dict[str, ModuleType] = {"mlp": mlp, "cnn": cnn, "gpt": gpt, "moe": moe}


def pairs(name: str, model: nn.Module) -> dict[tuple[str, str], nn.Parameter]:
    """(our VNode, our parameter) -> their parameter."""
    program, found = PROGRAMS[name], {}
    for ours, theirs in program.NAMES.items():
        for parameter, tensor in model.get_submodule(theirs).named_parameters():
            found[ours, parameter] = tensor
    for ours, theirs in getattr(program, "ATTENTION", {}).items():
        found[ours, "qkv_weight"] = model.get_parameter(f"{theirs}.qkv.weight")
        found[ours, "out_weight"] = model.get_parameter(f"{theirs}.out.weight")
    return found


def same_start(name: str, reference: Reference) -> nn.Module:
    """The plain program with the reference's weights; every weight of it is set."""
    model: nn.Module = PROGRAMS[name].Model()
    mapped = pairs(name, model)
    with torch.no_grad():
        for (node, parameter), tensor in mapped.items():
            tensor.copy_(reference.vnodes.state(node)[f"param.{parameter}"])
    assert {id(tensor) for tensor in mapped.values()} == {id(tensor) for tensor in model.parameters()}
    return model


def plain_gradients(model: nn.Module, chunks: Sequence[dict[str, Tensor]], features: str) -> float:
    """Fill `.grad` with the gradient of the mean loss over all counted targets; the loss."""
    count = sum(int((chunk["targets"] != -1).sum()) for chunk in chunks)
    total = 0.0
    for chunk in chunks:
        logits = model(chunk[features])
        loss = F.cross_entropy(logits.flatten(0, -2), chunk["targets"].flatten(), ignore_index=-1, reduction="sum")
        (loss / count).backward()
        total += float(loss.detach())
    return total / count


def chunks_of(network: Network, source: Memory, step: int, whole: bool) -> list[dict[str, Tensor]]:
    """The batch of a step, whole or as the microbatches of the recipe."""
    if whole:
        return [source.whole(step)]
    return [source.batch("train", step, m) for m in range(network.recipe.microbatches)]


def in_double(chunk: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain program computes in double precision: what is left over is our own rounding."""
    return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in chunk.items()}


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str, microbatches: int, tmp_path: Path) -> None:
    network = read(FILES[name], tmp_path, f"train.microbatches={microbatches}")
    source = Memory(network, ignored=0.4)
    reference = Reference(network, source, seed=5, trace=True)
    model = same_start(name, reference)
    features = next(key for key in network.graph.inputs if key != "targets")
    chunks = chunks_of(network, source, 0, whole=name != "cnn")  # batch normalisation sees microbatches
    loss = plain_gradients(model.double(), [in_double(chunk) for chunk in chunks], features)
    done = reference.step(0)
    assert done.loss == pytest.approx(loss, rel=1e-6)
    for (node, parameter), tensor in pairs(name, model).items():
        assert tensor.grad is not None
        ours = reference.vnodes.gradients(node)[parameter]
        worst = float((ours - tensor.grad).norm() / tensor.grad.norm())
        assert worst <= 1e-6, (node, parameter, worst)


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_of_the_optimizer(name: str, tmp_path: Path) -> None:
    """Weights after five steps equal those of torch.optim with torch's clipping and nanoGPT's decay groups."""
    network = read(FILES[name], tmp_path, "train.microbatches=2", "train.optimizer.clip_local=null")
    recipe, source = network.recipe, Memory(network)
    reference = Reference(network, source, seed=5)
    model = same_start(name, reference)
    features = next(key for key in network.graph.inputs if key != "targets")
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if isinstance(recipe.optimizer, SGD):
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps)
    for step in range(5):
        optimizer.zero_grad()
        plain_gradients(model, chunks_of(network, source, step, whole=False), features)
        assert recipe.optimizer.clip is not None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(recipe, step)
        optimizer.step()
        done = reference.step(step)
        assert done.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    for (node, parameter), tensor in pairs(name, model).items():
        ours = reference.vnodes.state(node)[f"param.{parameter}"]
        torch.testing.assert_close(ours, tensor.detach(), rtol=2e-4, atol=2e-4)


def test_one_step_equals_torch_to_the_last_bit(tmp_path: Path) -> None:
    """From equal gradients, AdamW with clipping gives torch's own bits (fused, as we ask for it)."""
    network = read(FILES["mlp"], tmp_path, "train.optimizer.clip=0.05", "train.optimizer.decay=all")
    source = Memory(network)
    reference = Reference(network, source, seed=5)
    model = same_start("mlp", reference)
    assert not isinstance(network.recipe.optimizer, SGD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        batch = source.batch("train", step, 0)
        loss = F.cross_entropy(model(batch["x"]), batch["targets"], reduction="sum")
        loss.backward()
        count = len(batch["targets"])
        total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None)) / count
        assert total > 0.05
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, 0.05 / (total + 1e-6)) / count)
        optimizer.step()
        reference.step(step)
    for (node, parameter), tensor in pairs("mlp", model).items():
        assert torch.equal(reference.vnodes.state(node)[f"param.{parameter}"], tensor.detach())


def test_nanogpt_learning_rate(tmp_path: Path) -> None:
    """The formula of nanoGPT's train.py, written out again."""
    sets = ["train.steps=2000", "train.optimizer.lr=1e-3"]
    sets += ["train.schedule.warmup=100", "train.schedule.min_lr=1e-4", "train.schedule.decay_steps=2000"]
    recipe = read(FILES["gpt"], tmp_path, *sets).recipe
    for step in (0, 1, 50, 99, 100, 101, 1000, 1999, 2000):
        if step < 100:
            want = 1e-3 * (step + 1) / 101
        elif step > 2000:
            want = 1e-4
        else:
            ratio = (step - 100) / 1900
            want = 1e-4 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1e-3 - 1e-4)
        assert lr_at(recipe, step) == pytest.approx(want, rel=1e-12)
