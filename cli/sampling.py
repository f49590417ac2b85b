"""Choosing the next token from logits; pure numpy, the same for every way the logits were made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wire.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: temperature 0 takes the likeliest; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def check(self) -> None:
        """Raises `UsageError` for values that make no sense."""
        if not 0 <= self.temperature < 100:
            raise UsageError(f"--temperature {self.temperature} is not between 0 and 100")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k} is negative")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p} is not above 0 and at most 1")


def probabilities(logits_V: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """What each token is drawn with; sums to 1. float64 in, so that the choice doesn't hang on rounding.

    top-p keeps the smallest set of likeliest tokens whose probability reaches p (Holtzman et al., arXiv 1904.09751).
    """
    scores = np.asarray(logits_V, dtype=np.float64).reshape(-1)
    if sampling.temperature == 0:
        chosen = np.zeros(scores.shape)
        chosen[int(np.argmax(scores))] = 1.0
        return chosen
    scores = scores / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(scores):
        scores[order[sampling.top_k :]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if sampling.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p]] = 0.0
        weights /= weights.sum()
    return np.asarray(weights, dtype=np.float64)


def choose(logits_V: NDArray[np.float32], sampling: Sampling, draw: np.random.Generator) -> int:
    """One token."""
    weights = probabilities(logits_V, sampling)
    if sampling.temperature == 0:
        return int(np.argmax(weights))
    place = int(np.searchsorted(np.cumsum(weights), draw.random(), side="right"))
    return min(len(weights) - 1, place)
