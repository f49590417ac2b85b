"""The recipe: how a network is trained. Read from the `train` section of its file, overridden by `--set train.…`.

All models are frozen, refuse unknown keys, and are strict: text never becomes a number, and no number is infinite.
`lr_at` is the one place that knows the learning rate of a step.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**12)]
CountOrZero = Annotated[int, Field(ge=0, le=10**12)]


class Section(BaseModel):
    """Base of every model that a person fills in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataRecipe(Section):
    """Where samples come from and how text becomes tokens. Exactly one of `text` and `dataset` is given."""

    text: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="'python-stdlib' (the source of Python's standard library), a text file, a folder, a .jsonl file, "
        "or a .bin file of tokens; a path is looked up from where the command runs",
    )
    dataset: Literal["digits"] | None = Field(
        default=None, description="a built-in data set: 'digits' (8x8 images, needs the extra 'digits')"
    )
    tokenizer: Literal["char", "bpe", "bytes"] | None = Field(
        default=None, description="how text becomes tokens; 'char' unless given; data sets have none"
    )
    vocab_size: int | None = Field(
        default=None, ge=257, le=1_000_000, description="size of the vocabulary to train ('bpe')"
    )
    special_tokens: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        default=(), max_length=64, description="texts that are always one token"
    )
    split: float = Field(
        default=0.9, gt=0, lt=1, description="the share of the data, from its start, that is trained on"
    )
    sampler: Literal["random", "shuffle"] = Field(
        default="shuffle", description="'random': windows at random places; 'shuffle': each sample once an epoch"
    )
    context: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="tokens in a sample; the length of the input 'tokens' unless given",
    )
    limit_bytes: int | None = Field(default=None, ge=1, description="read at most so many bytes of text")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.text is None) == (self.dataset is None):
            raise ValueError("give exactly one of 'text' and 'dataset'")
        if self.dataset is not None and (self.tokenizer or self.vocab_size or self.special_tokens or self.context):
            raise ValueError("tokenizer, vocab_size, special_tokens and context belong to 'text'")
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise ValueError("'vocab_size' is needed by tokenizer 'bpe', and by no other")
        return self

    @property
    def tokenizer_kind(self) -> str | None:
        """The tokenizer of a text, with the default filled in; None for a data set."""
        return None if self.text is None else (self.tokenizer or "char")


class AdamW(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch computes it."""

    type: Literal["adamw"] = Field(default="adamw", description="the optimizer")
    lr: Positive = Field(description="learning rate at its highest")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="decay of the running mean and of the running square"
    )
    eps: Positive = Field(default=1e-8, description="added to the root of the running square")
    weight_decay: NotNegative = Field(default=0.0, description="decoupled decay, times lr, at each update")
    decay: Literal["matrices", "all"] = Field(
        default="matrices", description="which parameters decay: those with two and more dimensions, or all"
    )
    clip: Positive | None = Field(default=None, description="largest norm of the whole gradient; none: no clipping")
    clip_local: Positive | None = Field(default=None, description="largest norm of each node's gradient")


class SGD(Section):
    """Stochastic gradient descent, with momentum if given, as torch computes it."""

    type: Literal["sgd"] = Field(description="the optimizer")
    lr: Positive = Field(description="learning rate at its highest")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of the last update that is kept"
    )
    nesterov: bool = Field(default=False, description="Nesterov's form of momentum")
    weight_decay: NotNegative = Field(default=0.0, description="added to the gradient, times the parameter")
    decay: Literal["matrices", "all"] = Field(
        default="matrices", description="which parameters decay: those with two and more dimensions, or all"
    )
    clip: Positive | None = Field(default=None, description="largest norm of the whole gradient; none: no clipping")
    clip_local: Positive | None = Field(default=None, description="largest norm of each node's gradient")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("'nesterov' needs a momentum above 0")
        return self


class Constant(Section):
    """The same learning rate in every step, after the warm-up."""

    type: Literal["constant"] = Field(default="constant", description="the schedule")
    warmup: CountOrZero = Field(default=0, description="steps in which the rate rises to lr")


class Linear(Section):
    """A straight line from lr down to min_lr."""

    type: Literal["linear"] = Field(description="the schedule")
    warmup: CountOrZero = Field(default=0, description="steps in which the rate rises to lr")
    min_lr: NotNegative = Field(default=0.0, description="the rate at the end")
    decay_steps: Count | None = Field(
        default=None, description="the step at which min_lr is reached; 'steps' unless given"
    )


class Cosine(Section):
    """Half a cosine wave from lr down to min_lr (nanoGPT's)."""

    type: Literal["cosine"] = Field(description="the schedule")
    warmup: CountOrZero = Field(default=0, description="steps in which the rate rises to lr")
    min_lr: NotNegative = Field(default=0.0, description="the rate at the end")
    decay_steps: Count | None = Field(
        default=None, description="the step at which min_lr is reached; 'steps' unless given"
    )


class Step(Section):
    """The rate falls by a factor every so many steps."""

    type: Literal["step"] = Field(description="the schedule")
    warmup: CountOrZero = Field(default=0, description="steps in which the rate rises to lr")
    every: Count = Field(description="steps between two falls")
    factor: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1, description="what the rate is multiplied by at each fall"
    )
    min_lr: NotNegative = Field(default=0.0, description="the rate never falls below this")


class CheckpointRecipe(Section):
    """When the state is saved."""

    every: CountOrZero = Field(default=0, description="steps between two checkpoints; 0: only at the end")
    keep: Annotated[int, Field(ge=1, le=10_000)] = Field(default=3, description="how many checkpoints are kept")


Optimizer = Annotated[AdamW | SGD, Field(discriminator="type")]
Schedule = Annotated[Constant | Linear | Cosine | Step, Field(discriminator="type")]


class Recipe(Section):
    """How a network is trained."""

    data: DataRecipe | None = Field(default=None, description="the samples")
    batch: Annotated[int, Field(ge=1, le=1_000_000)] = Field(description="samples in a step, all microbatches together")
    microbatches: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="parts that a batch is split into (as evenly as possible, the first ones larger)"
    )
    steps: CountOrZero = Field(description="optimizer updates in the whole run")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="seed of weights, data order and dropout"
    )
    optimizer: Optimizer = Field(default=AdamW(type="adamw", lr=1e-3), description="the optimizer")
    schedule: Schedule = Field(default=Constant(type="constant"), description="the learning rate over the steps")
    precision: Literal["float32", "bf16"] = Field(
        default="float32", description="'bf16': autocast, with float32 master weights"
    )
    recompute: bool = Field(default=False, description="compute activations again in the backward pass, to save memory")
    codec: Literal["none", "bf16", "int8", "auto"] = Field(
        default="none",
        description="how activations and gradients travel between PNodes: as they are, or smaller and rounded; "
        "'auto': by measured link. An edge may say its own: 'a -int8-> b'",
    )
    checkpoint: CheckpointRecipe = Field(default=CheckpointRecipe(), description="when the state is saved")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.microbatches > self.batch:
            raise ValueError(f"{self.microbatches} microbatches of a batch of {self.batch} would be empty")
        floor = getattr(self.schedule, "min_lr", 0.0)
        if floor > self.optimizer.lr:
            raise ValueError(f"the schedule's min_lr {floor:g} is above the optimizer's lr {self.optimizer.lr:g}")
        return self


def lr_at(recipe: Recipe, step: int) -> float:
    """The learning rate of update `step` (0 is the first).

    Warm-up and cosine follow nanoGPT (`train.py`, `get_lr`): lr * (step + 1) / (warmup + 1) while step < warmup.
    """
    lr, schedule = recipe.optimizer.lr, recipe.schedule
    if step < schedule.warmup:
        return lr * (step + 1) / (schedule.warmup + 1)
    match schedule:
        case Constant():
            return lr
        case Step():
            return max(schedule.min_lr, lr * schedule.factor ** ((step - schedule.warmup) // schedule.every))
        case Linear() | Cosine():
            last = schedule.decay_steps if schedule.decay_steps is not None else recipe.steps
            if step >= last:
                return schedule.min_lr
            share = (step - schedule.warmup) / (last - schedule.warmup)
            rest = 1.0 - share if isinstance(schedule, Linear) else 0.5 * (1.0 + math.cos(math.pi * share))
            return schedule.min_lr + rest * (lr - schedule.min_lr)
