"""The optimizer of all VNodes of one device: torch.optim with one group per decay, its state known by VNode.

State is made eagerly and kept in exact dtypes: a checkpoint of any step has the same keys, and loading one never
casts (torch's own `load_state_dict` casts to the parameter's dtype).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from networks.recipe import SGD, AdamW

_warm: set[str] = set()


def warm_up(device: torch.device) -> None:
    """Take one step on one number: the first optimizer of a process imports torch's compiler, which costs 2 s."""
    if device.type not in _warm:
        _warm.add(device.type)
        parameter = nn.Parameter(torch.zeros(1, device=device))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


class Optimizer:
    """AdamW or SGD over the owned parameters; `step` uses their `.grad` as it is."""

    def __init__(self, recipe: AdamW | SGD, parameters: Sequence[nn.Parameter]) -> None:
        matrices = [p for p in parameters if p.dim() >= 2 or recipe.decay == "all"]
        others = [p for p in parameters if p.dim() < 2 and recipe.decay != "all"]
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in ((matrices, recipe.weight_decay), (others, 0.0))
            if group
        ]
        self.names: tuple[str, ...] = ()
        self._torch: torch.optim.Optimizer | None = None
        if isinstance(recipe, AdamW):
            self.names = ("exp_avg", "exp_avg_sq", "step")
            if groups:
                self._torch = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
        else:
            self.names = ("momentum_buffer",) if recipe.momentum else ()
            if groups:
                self._torch = torch.optim.SGD(
                    groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True
                )
        for parameter in parameters:
            for name in self.names:
                self.set_state(parameter, name, self.blank(parameter, name))

    def blank(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The state tensor `name` of a parameter before its first update."""
        if name == "step":
            return torch.zeros((), dtype=torch.float32, device=parameter.device)
        return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)

    def state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The state tensor itself."""
        assert self._torch is not None
        tensor: Tensor = self._torch.state[parameter][name]
        return tensor

    def set_state(self, parameter: nn.Parameter, name: str, tensor: Tensor) -> None:
        """Replace a state tensor; never casts."""
        assert self._torch is not None
        self._torch.state[parameter][name] = tensor

    def step(self, lr: float) -> None:
        """One update of every parameter that has a gradient."""
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._torch.step()
