"""Samplers: pure, repeatable, complete; the same samples whatever the number of microbatches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pnode.data.samplers import RandomSampler, ShuffleSampler, microbatch_rows, permutation


@given(st.integers(1, 60), st.integers(1, 60))
def test_microbatches_are_cut_as_torch_cuts(batch: int, microbatches: int) -> None:
    rows = [list(microbatch_rows(batch, microbatches, number)) for number in range(microbatches)]
    assert rows == [part.tolist() for part in torch.tensor_split(torch.arange(batch), microbatches)]


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 5))
def test_shuffle_takes_each_sample_once_an_epoch(size: int, batch: int, seed: int) -> None:
    sampler = ShuffleSampler(size, batch, seed, "train")
    epochs = 3
    steps = -(-size * epochs // batch)
    stream = [number for step in range(steps) for number in sampler.ids(step, 0)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_each_epoch_replica_seed_and_split_has_an_order_of_its_own() -> None:
    base = ShuffleSampler(100, 100, 1, "train")
    orders = [
        base.ids(0, 0), base.ids(1, 0), base.ids(0, 1), ShuffleSampler(100, 100, 2, "train").ids(0, 0),
        ShuffleSampler(100, 100, 1, "val").ids(0, 0),
    ]  # fmt: skip
    assert len({tuple(order) for order in orders}) == len(orders)


def test_draws_are_even_and_independent() -> None:
    """Chi-square of 40,000 draws over 20 cells: 19 degrees of freedom, 99.99 % below 50.8."""
    sampler = RandomSampler(20, 40, 3, "train")
    counts = Counter(number for step in range(1000) for number in sampler.ids(step, 0))
    assert sum((counts[cell] - 2000) ** 2 / 2000 for cell in range(20)) < 50.8
    assert sampler.ids(7, 0) == sampler.ids(7, 0) != sampler.ids(8, 0)
    assert sampler.ids(7, 0) != sampler.ids(7, 1)


def test_permutations_are_even() -> None:
    """Where number 0 goes in 6,000 orders of 6: chi-square, 5 degrees of freedom, 99.99 % below 25.7."""
    counts = Counter(int((permutation(6, f"k{n}") == 0).nonzero()[0][0]) for n in range(6000))
    assert sum((counts[place] - 1000) ** 2 / 1000 for place in range(6)) < 25.7


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(1000, 4, 1337, "train"), [562, 783, 670, 891]),
        (ShuffleSampler(10, 4, 1337, "train"), [4, 0, 6, 2]),
    ],
)
def test_the_numbers_never_change(sampler: RandomSampler | ShuffleSampler, expected: list[int]) -> None:
    """A stored run must go on with the same samples under every later version: these lists are frozen."""
    assert sampler.ids(5, 0) == expected
