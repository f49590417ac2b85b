"""Scoring a whole split: windows of rows in flight through the stages, summed in row order. Pure but for the calls."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 4
"""Requests in flight: enough to keep all stages busy."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What one request found: the loss summed over its targets, and how many of them were right (None: unknown)."""

    loss_sum: float
    targets: int
    right: int | None
    step: int


@dataclass(frozen=True, slots=True)
class Score:
    """The loss over a split, per target."""

    session: str
    split: str
    samples: int
    targets: int
    loss: float
    perplexity: float | None
    accuracy: float | None
    step: int
    seconds: float

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


async def score(
    ask: Callable[[int, int], Awaitable[Rows]],
    session: str,
    split: str,
    samples: int,
    *,
    rows_each: int,
    text: bool,
    moved: Callable[[int], None] = lambda done: None,
) -> Score:
    """Ask for all rows, at most WINDOW requests at once. `text`: the loss is per token, so perplexity makes sense."""
    began = time.perf_counter()
    gate = asyncio.Semaphore(WINDOW)
    done = 0

    async def one(start: int) -> Rows:
        nonlocal done
        async with gate:
            count = min(rows_each, samples - start)
            found = await ask(start, count)
            done += count
            moved(done)
            return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(start)) for start in range(0, samples, rows_each)]
    parts = [task.result() for task in tasks]
    targets = sum(part.targets for part in parts)
    loss = math.fsum(part.loss_sum for part in parts) / max(1, targets)
    known = [part.right for part in parts if part.right is not None]
    accuracy = sum(known) / max(1, targets) if len(known) == len(parts) and parts else None
    perplexity = math.exp(min(loss, 700.0)) if text else None
    steps = max((part.step for part in parts), default=0)
    return Score(session, split, samples, targets, loss, perplexity, accuracy, steps, time.perf_counter() - began)


def right_answers(logits_BC: NDArray[Any], targets_B: NDArray[Any]) -> int:
    """How many rows have their likeliest class right."""
    return int((np.asarray(logits_BC).argmax(axis=-1) == np.asarray(targets_B)).sum())
