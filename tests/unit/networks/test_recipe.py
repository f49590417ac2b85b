"""Learning-rate schedules against formulas, and what a recipe refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from networks.load import load
from networks.recipe import AdamW, Constant, Cosine, Linear, Recipe, Step, lr_at


def recipe(schedule: Any, *, lr: float = 1e-3, steps: int = 2000) -> Recipe:
    return Recipe(batch=1, steps=steps, optimizer=AdamW(lr=lr), schedule=schedule)


def nano_gpt(it: int) -> float:
    """nanoGPT's schedule as its paper-thin source states it, for lr 1e-3, 100 steps of warm-up, 2000 steps, 1e-4."""
    if it < 100:
        return 1e-3 * (it + 1) / 101
    if it > 2000:
        return 1e-4
    return 1e-4 + 0.5 * (1.0 + math.cos(math.pi * (it - 100) / 1900)) * 9e-4


def test_cosine_is_nano_gpts() -> None:
    mine = load("gpt-char", vars={"vocab": 65}).recipe
    for step in (0, 1, 50, 99, 100, 101, 1000, 1999, 2000, 5000):
        assert lr_at(mine, step) == pytest.approx(nano_gpt(step), rel=1e-12)


def test_linear_and_constant_and_step() -> None:
    line = recipe(Linear(type="linear", warmup=10, min_lr=1e-4, decay_steps=110))
    assert [lr_at(line, step) for step in (10, 60, 110, 200)] == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4])
    flat = recipe(Constant(warmup=4))
    assert [lr_at(flat, step) for step in range(6)] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3])
    stairs = recipe(Step(type="step", every=10, factor=0.5, min_lr=2e-4))
    assert [lr_at(stairs, step) for step in (0, 9, 10, 20, 30, 99)] == pytest.approx(
        [1e-3, 1e-3, 5e-4, 2.5e-4, 2e-4, 2e-4]
    )


def test_step_agrees_with_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.3)
    mine = recipe(Step(type="step", every=7, factor=0.3))
    for step in range(40):
        assert lr_at(mine, step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_a_warm_up_longer_than_the_run() -> None:
    short = recipe(Cosine(type="cosine", warmup=100, min_lr=1e-4), steps=10)
    assert lr_at(short, 9) == pytest.approx(1e-3 * 10 / 101)
    assert lr_at(short, 100) == 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": 1.0},
        {"batch": "8"},
        {"batch": True},
        {"steps": -1},
        {"seed": -1},
        {"microbatches": 9},
        {"optimizer": {"type": "adamw", "lr": 0.0}},
        {"optimizer": {"type": "adamw", "lr": float("nan")}},
        {"optimizer": {"type": "adamw", "lr": float("inf")}},
        {"optimizer": {"type": "adamw", "lr": "1e-3"}},
        {"optimizer": {"type": "adamw", "lr": 1e-3, "betas": (0.9, 1.0)}},
        {"optimizer": {"type": "sgd", "lr": 1e-3, "nesterov": True}},
        {"schedule": {"type": "cosine", "min_lr": 1.0}},
        {"precision": "float16"},
        {"unknown": 1},
        {"data": {"text": "a", "dataset": "digits"}},
        {"data": {}},
        {"data": {"dataset": "digits", "tokenizer": "char"}},
        {"data": {"text": "a", "tokenizer": "bpe"}},
        {"data": {"text": "a", "vocab_size": 300}},
        {"data": {"text": "a", "split": 1.0}},
        {"checkpoint": {"keep": 0}},
        {"optimizer": {"type": "adamw", "lr": 1e-3, "clip": 0.0}},
    ],
)
def test_what_a_recipe_refuses(change: dict[str, object]) -> None:
    good = {"batch": 8, "steps": 10, "optimizer": {"type": "adamw", "lr": 1e-3}}
    Recipe.model_validate(good)
    with pytest.raises(ValidationError):
        Recipe.model_validate({**good, **change})


def test_every_field_has_a_description() -> None:
    from networks.recipe import SGD, CheckpointRecipe, DataRecipe

    for model in (Recipe, DataRecipe, AdamW, SGD, Constant, Linear, Cosine, Step, CheckpointRecipe):
        assert all(info.description for info in model.model_fields.values()), model
