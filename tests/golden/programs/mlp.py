"""Three linear layers with relu and tanh."""

import torch
from torch import nn


class Model(nn.Module):
    """x (B, 12) -> logits (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


NAMES = {"fc1": "net.0", "fc2": "net.2", "head": "net.4"}
