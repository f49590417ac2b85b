"""A small convolutional network with a residual branch and two poolings side by side."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    """x (B, 1, 8, 8) -> logits (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.mix = nn.Conv2d(12, 7, 3)
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = F.silu(self.norm2(self.second(x)) + x)
        x = torch.cat([F.max_pool2d(x, 2), F.avg_pool2d(x, 2)], 1)
        return self.head(self.mix(x).mean((2, 3)))


NAMES = {"conv1": "first", "bn1": "norm1", "conv2": "second", "bn2": "norm2", "mix": "mix", "head": "head"}
