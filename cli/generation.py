"""Text, token by token: the loop of `dcnr generate`, for any way to get logits.

While the text fits the context, keys and values stay in the attention VNodes and each call sends one token. Beyond it
the last `context` tokens are computed anew for each token, exactly as a plain model with learned positions does.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cli.sampling import Sampling, choose
from wire.errors import DCNRError

Logits = Callable[[NDArray[np.int64], int, bool], Awaitable[NDArray[Any]]]
"""(tokens [1, T], position, cache) -> logits [1, T, V]; `position` tokens are in the cache already."""


class PrefixLostError(DCNRError):
    """Keys and values of the positions before this call are gone: send the whole prefix, at position 0."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token and the seconds it took; `first` where the prompt was read with it."""

    id: int
    seconds: float
    first: bool


async def generate(
    logits: Logits,
    prompt: Sequence[int],
    *,
    context: int,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    cache: bool = True,
) -> AsyncIterator[Token]:
    """Yield `max_tokens` tokens after `prompt` (at least one token). Equal arguments give equal tokens.

    Where `logits` raises `PrefixLostError`, the same token is asked for again, with the whole prefix.
    """
    draw = np.random.default_rng(seed)
    ids = list(prompt)
    cached = 0
    for index in range(max_tokens):
        began = time.perf_counter()
        fits = len(ids) <= context
        keep = cache and fits
        while True:
            fresh, position = (ids[cached:], cached) if keep else (ids[-context:], 0)
            try:
                value_1TV = await logits(np.asarray([fresh], dtype=np.int64), position, keep)
                break
            except PrefixLostError:
                cached = 0
        cached = len(ids) if keep else 0
        chosen = choose(value_1TV[0, -1], sampling, draw)
        ids.append(chosen)
        yield Token(chosen, time.perf_counter() - began, index == 0)
