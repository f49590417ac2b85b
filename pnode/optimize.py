"""The optimizer of all VNodes of one device: torch's fused AdamW and SGD kernels, called on flat lists.

The kernels are those behind `torch.optim.AdamW(fused=True)` and `torch.optim.SGD(fused=True)`, with equal bits (tests
hold it to that). Going round the classes saves their work per parameter and step, and the 2 s that importing them
costs at start (docs/decisions/0022).

State is made eagerly and kept in exact dtypes: a checkpoint of any step has the same keys, and loading one never
casts. A parameter without a gradient is left alone, its step count included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from networks.recipe import SGD, AdamW


def warm_up(device: torch.device) -> None:
    """One small forward, backward and update: what torch sets up at first use is set up before the first step."""
    parameter = nn.Parameter(torch.zeros(8, 8, device=device))
    torch.nn.functional.linear(torch.ones(4, 8, device=device), parameter).sum().backward()  # type: ignore[no-untyped-call]
    Optimizer(AdamW(lr=1e-3), [parameter]).step(1e-3)


class Optimizer:
    """AdamW or SGD over the owned parameters; `step` uses their `.grad` as it is."""

    def __init__(self, recipe: AdamW | SGD, parameters: Sequence[nn.Parameter]) -> None:
        self.recipe, self.parameters = recipe, list(parameters)
        if isinstance(recipe, AdamW):
            self.names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step")
        else:
            self.names = ("momentum_buffer",) if recipe.momentum else ()
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._moments = {
            name: [
                torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
                for p in self.parameters
            ]
            for name in self.names
            if name != "step"
        }
        self._steps = [0] * len(self.parameters)
        self._groups: list[tuple[float, list[int]]] = []
        for decays in (True, False):
            places = [i for i, p in enumerate(self.parameters) if (p.dim() >= 2 or recipe.decay == "all") == decays]
            if places:
                self._groups.append((recipe.weight_decay if decays else 0.0, places))

    def state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """One state tensor: the moment itself, or the step count as float32."""
        place = self._place[id(parameter)]
        if name == "step":
            return torch.tensor(float(self._steps[place]), dtype=torch.float32)
        return self._moments[name][place]

    def load(self, parameter: nn.Parameter, name: str, tensor: Tensor) -> None:
        """Replace one state tensor's values; its dtype and shape have been checked."""
        place = self._place[id(parameter)]
        if name == "step":
            self._steps[place] = int(tensor)
        else:
            self._moments[name][place].copy_(tensor)

    def step(self, lr: float) -> None:
        """One update of every parameter that has a gradient."""
        with torch.no_grad():
            for weight_decay, places in self._groups:
                by_count: dict[int, list[int]] = {}
                for place in places:
                    if self.parameters[place].grad is not None:
                        count = self._steps[place] = self._steps[place] + 1
                        by_count.setdefault(count, []).append(place)
                for count, active in by_count.items():
                    self._apply(lr, weight_decay, count, active)

    def _apply(self, lr: float, weight_decay: float, count: int, active: Sequence[int]) -> None:
        parameters: list[Tensor] = [self.parameters[place] for place in active]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        recipe = self.recipe
        if isinstance(recipe, AdamW):
            means, squares = ([self._moments[name][place] for place in active] for name in ("exp_avg", "exp_avg_sq"))
            number = torch.tensor(float(count), dtype=torch.float32, device=parameters[0].device)
            torch._fused_adamw_(
                parameters, gradients, means, squares, [], [number] * len(active),
                lr=lr, beta1=recipe.betas[0], beta2=recipe.betas[1], weight_decay=weight_decay, eps=recipe.eps,
                amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
        else:
            buffers = [self._moments["momentum_buffer"][place] for place in active] if recipe.momentum else []
            torch._fused_sgd_(
                parameters, gradients, buffers, weight_decay=weight_decay, momentum=recipe.momentum, lr=lr,
                dampening=0.0, nesterov=recipe.nesterov, maximize=False, is_first_step=False,
                grad_scale=None, found_inf=None,
            )  # fmt: skip
