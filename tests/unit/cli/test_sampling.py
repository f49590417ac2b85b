"""Choosing tokens, against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from cli.generation import generate
from cli.sampling import Sampling, choose, probabilities
from wire.errors import UsageError

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))


def test_temperature_one_gives_the_softmax() -> None:
    assert probabilities(LOGITS, Sampling(1.0)) == pytest.approx([0.1, 0.4, 0.2, 0.3])


def test_temperature_sharpens() -> None:
    squares = np.array([0.01, 0.16, 0.04, 0.09])
    assert probabilities(LOGITS, Sampling(0.5)) == pytest.approx(squares / squares.sum(), rel=1e-5)


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    assert probabilities(LOGITS, Sampling(0.0)).tolist() == [0, 1, 0, 0]
    assert choose(np.zeros(5, dtype=np.float32), Sampling(0.0), np.random.default_rng(0)) == 0


def test_top_k_keeps_the_k_likeliest() -> None:
    assert probabilities(LOGITS, Sampling(1.0, top_k=2)) == pytest.approx([0, 4 / 7, 0, 3 / 7])


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert probabilities(LOGITS, Sampling(1.0, top_p=0.69)) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(LOGITS, Sampling(1.0, top_p=0.71)) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert probabilities(LOGITS, Sampling(1.0, top_p=1e-9)).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    draw = np.random.default_rng(7)
    counts = np.bincount([choose(LOGITS, Sampling(1.0), draw) for _ in range(4000)], minlength=4)
    assert counts / 4000 == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)


@pytest.mark.parametrize("bad", [Sampling(-1), Sampling(1, -1), Sampling(1, 0, 0.0), Sampling(1, 0, 1.5)])
def test_nonsense_is_refused(bad: Sampling) -> None:
    with pytest.raises(UsageError):
        bad.check()


class Toy:
    """Logits that depend on the last `context` tokens, with a cache like that of the VNodes."""

    VOCAB = 11

    def __init__(self, context: int) -> None:
        self.context = context
        self.kept: list[int] = []
        self.calls: list[tuple[int, int, bool]] = []

    async def __call__(self, tokens_1T: np.ndarray, position: int, keep: bool) -> np.ndarray:
        self.calls.append((tokens_1T.shape[1], position, keep))
        seen = [*self.kept[:position], *tokens_1T[0].tolist()]
        assert len(self.kept[:position]) == position, "a position that the cache doesn't hold"
        assert len(seen) <= self.context
        if keep:
            self.kept = seen
        rows = np.random.default_rng(seen).normal(size=self.VOCAB)
        return np.tile(rows, (1, tokens_1T.shape[1], 1)).astype(np.float32)


async def ids(toy: Toy, cache: bool, seed: int = 3) -> list[int]:
    found = generate(toy, [1, 2, 3], context=8, max_tokens=20, sampling=Sampling(1.0), seed=seed, cache=cache)
    return [token.id async for token in found]


async def test_the_cache_changes_nothing_but_the_work() -> None:
    cached, plain = Toy(8), Toy(8)
    assert await ids(cached, True) == await ids(plain, False)
    assert cached.calls[0] == (3, 0, True)
    assert cached.calls[1:6] == [(1, position, True) for position in range(3, 8)]
    assert cached.calls[6:] == [(8, 0, False)] * 14
    assert all(not keep for _, _, keep in plain.calls)


async def test_seeds_decide() -> None:
    assert await ids(Toy(8), True, seed=1) == await ids(Toy(8), True, seed=1)
    assert await ids(Toy(8), True, seed=1) != await ids(Toy(8), True, seed=2)
