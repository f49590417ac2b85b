"""How far apart two runs are: losses, gradients and weights, step by step. Pure, on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wire.errors import DCNRError

if TYPE_CHECKING:
    from torch import Tensor

Traced = Mapping[str, Mapping[str, "Tensor"]]
"""VNode -> "param.…", "buffer.…", "grad.…" -> tensor, after one step."""

LOSS, GRADIENT, WEIGHT = "loss", "gradient", "weight"
KINDS = (LOSS, GRADIENT, WEIGHT)
_KIND_OF = {"grad": GRADIENT, "param": WEIGHT, "buffer": WEIGHT}


@dataclass(slots=True)
class Gap:
    """The largest difference of one kind: absolute, and relative to the norm of the tensor; where it was."""

    absolute: float = 0.0
    relative: float = 0.0
    where: str = ""

    def take(self, absolute: float, relative: float, where: str) -> None:
        """One more difference; anything that is not a number counts as infinitely far."""
        absolute = absolute if absolute == absolute else float("inf")
        relative = relative if relative == relative else float("inf")
        if absolute > self.absolute:
            self.absolute, self.where = absolute, where
        self.relative = max(self.relative, relative)


@dataclass(slots=True)
class Comparison:
    """All differences of one run against the reference."""

    gaps: dict[str, Gap] = field(default_factory=lambda: {kind: Gap() for kind in KINDS})
    steps: int = 0
    tensors: int = 0

    @property
    def exact(self) -> bool:
        """Nothing differs, and something was compared."""
        return self.steps > 0 and self.tensors > 0 and all(gap.absolute == 0.0 for gap in self.gaps.values())

    @property
    def relative(self) -> float:
        """The largest relative difference of any kind."""
        return max(gap.relative for gap in self.gaps.values())

    def loss(self, step: int, mine: float, reference: float) -> None:
        """Compare a step's loss."""
        gap = abs(mine - reference)
        self.gaps[LOSS].take(gap, gap / max(abs(reference), 1e-30), f"step {step}")
        self.steps += 1

    def tensors_of(self, step: int, mine: Traced, reference: Traced) -> None:
        """Compare all tensors of a step. Raises `DCNRError` if the two don't hold the same ones."""
        if mine.keys() != reference.keys():
            odd = sorted(mine.keys() ^ reference.keys())
            raise DCNRError(f"step {step}: the two runs don't have the same VNodes: {', '.join(odd[:5])}")
        for vnode, tensors in reference.items():
            theirs = mine[vnode]
            if theirs.keys() != tensors.keys():
                odd = sorted(theirs.keys() ^ tensors.keys())
                raise DCNRError(f"step {step}, {vnode}: the two runs don't hold the same tensors: {', '.join(odd[:5])}")
            for key, expected in tensors.items():
                self._tensor(f"step {step}, {vnode}.{key}", key, theirs[key], expected)

    def _tensor(self, where: str, key: str, mine: Tensor, expected: Tensor) -> None:
        if mine.shape != expected.shape or mine.dtype != expected.dtype:
            raise DCNRError(
                f"{where}: expected {expected.dtype} {tuple(expected.shape)}, got {mine.dtype} {tuple(mine.shape)}"
            )
        kind = _KIND_OF[key.partition(".")[0]]
        self.tensors += 1
        if mine.equal(expected):
            return
        gap = (mine.double() - expected.double()).abs()
        norm = float(expected.double().norm())
        relative = float(gap.norm()) / norm if norm > 0 else float("inf")
        self.gaps[kind].take(float(gap.max()), relative, where)
