"""The optimizer has torch.optim's bits, and state tensors that are never cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from networks.recipe import SGD, AdamW
from pnode.optimize import Optimizer, warm_up

SHAPES = [(7, 33), (33,), (5, 4, 3, 3), (1,), (300, 20)]


def twins(seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(t.clone()) for t in tensors], [nn.Parameter(t.clone()) for t in tensors]


def give_gradients(ours: list[nn.Parameter], theirs: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for a, b in zip(ours, theirs, strict=True):
        gradient = torch.randn(a.shape, generator=generator)
        a.grad, b.grad = gradient.clone(), gradient.clone()


RECIPES: list[AdamW | SGD] = [
    AdamW(lr=1e-2),
    AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    AdamW(lr=1e-2, weight_decay=0.3, decay="all"),
    SGD(type="sgd", lr=1e-2),
    SGD(type="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1),
    SGD(type="sgd", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, decay="all"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_equals_torch_to_the_last_bit(recipe: AdamW | SGD) -> None:
    ours, theirs = twins()
    optimizer = Optimizer(recipe, ours)
    decays = [p for p in theirs if p.dim() >= 2 or recipe.decay == "all"]
    others = [p for p in theirs if not (p.dim() >= 2 or recipe.decay == "all")]
    groups = [{"params": decays, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    peer: torch.optim.Optimizer
    if isinstance(recipe, AdamW):
        peer = torch.optim.AdamW(groups, lr=1.0, betas=recipe.betas, eps=recipe.eps, fused=True)
    else:
        peer = torch.optim.SGD(groups, lr=1.0, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)
    for step in range(6):
        give_gradients(ours, theirs, step)
        if step == 3:
            ours[1].grad = theirs[1].grad = None
        lr = 1e-2 / (step + 1)
        for group in peer.param_groups:
            group["lr"] = lr
        peer.step()
        optimizer.step(lr)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for name in optimizer.names:
            assert torch.equal(optimizer.state(a, name), peer.state[b][name]), name
            assert optimizer.state(a, name).dtype == peer.state[b][name].dtype


def test_state_of_low_precision_parameters_is_not_cast() -> None:
    """Field case B50: types and bits of every state tensor survive a save and a load."""
    parameter = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))
    optimizer = Optimizer(AdamW(lr=1e-2), [parameter])
    moments = {name: torch.randn(4, 4) for name in ("exp_avg", "exp_avg_sq")}
    for name, tensor in moments.items():
        assert optimizer.state(parameter, name).dtype == torch.float32
        optimizer.load(parameter, name, tensor)
    optimizer.load(parameter, "step", torch.tensor(7.0))
    for name, tensor in moments.items():
        assert optimizer.state(parameter, name).dtype == torch.float32
        assert torch.equal(optimizer.state(parameter, name), tensor)
    assert float(optimizer.state(parameter, "step")) == 7.0


def test_warm_up_leaves_torchs_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    warm_up(torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state())
