"""`init:` of a node: how its weights start. Each kind draws from the generator it is given and nothing else."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn


class _Init(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Set `tensor` in place."""
        raise NotImplementedError


class Normal(_Init):
    """Gaussian."""

    type: Literal["normal"]
    mean: float = 0.0
    std: float = Field(default=0.02, ge=0)

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(tensor, self.mean, self.std, generator=generator)


class TruncatedNormal(_Init):
    """Gaussian without what lies beyond two standard deviations."""

    type: Literal["trunc_normal"]
    mean: float = 0.0
    std: float = Field(default=0.02, gt=0)

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        low, high = self.mean - 2 * self.std, self.mean + 2 * self.std
        nn.init.trunc_normal_(tensor, self.mean, self.std, low, high, generator=generator)


class Uniform(_Init):
    """Uniform between low and high."""

    type: Literal["uniform"]
    low: float = -0.1
    high: float = 0.1

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.uniform_(tensor, self.low, self.high, generator=generator)


class Kaiming(_Init):
    """He et al., arXiv 1502.01852, for the layer's fan-in."""

    type: Literal["kaiming_uniform", "kaiming_normal"]
    nonlinearity: Literal["relu", "linear", "tanh", "sigmoid"] = "relu"

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        if self.type == "kaiming_uniform":
            nn.init.kaiming_uniform_(tensor, nonlinearity=self.nonlinearity, generator=generator)
        else:
            nn.init.kaiming_normal_(tensor, nonlinearity=self.nonlinearity, generator=generator)


class Xavier(_Init):
    """Glorot and Bengio, AISTATS 2010."""

    type: Literal["xavier_uniform", "xavier_normal"]
    gain: float = Field(default=1.0, gt=0)

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        if self.type == "xavier_uniform":
            nn.init.xavier_uniform_(tensor, self.gain, generator=generator)
        else:
            nn.init.xavier_normal_(tensor, self.gain, generator=generator)


class Constant(_Init):
    """Every element the same."""

    type: Literal["constant"]
    value: float

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.constant_(tensor, self.value)


class Zeros(_Init):
    """Every element 0."""

    type: Literal["zeros"]

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.zeros_(tensor)


class Ones(_Init):
    """Every element 1."""

    type: Literal["ones"]

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.ones_(tensor)


Init = Annotated[
    Normal | TruncatedNormal | Uniform | Kaiming | Xavier | Constant | Zeros | Ones, Field(discriminator="type")
]


def fill_fan_in(tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """torch's default for linear and convolution layers, weight and bias alike: uniform within ±1/√fan_in."""
    bound = fan_in**-0.5 if fan_in else 0.0
    nn.init.uniform_(tensor, -bound, bound, generator=generator)
