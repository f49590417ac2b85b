"""Which samples make up a step: pure functions of (seed, split, replica, step), so a replay is exact.

The numbers come from hashes, not from a library's generator, so they are the same on every machine and version.
A microbatch takes its rows of the step's one batch (as `torch.tensor_split` cuts it), so a different number of
microbatches sees the same samples in the same order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Sampler(Protocol):
    """Sample ids of a step, all microbatches together."""

    def ids(self, step: int, replica: int) -> list[int]:
        """`batch` ids from 0 to `size` - 1."""


def draw(key: str, below: int) -> int:
    """A number from 0 to `below` - 1 that depends on `key` alone (BLAKE2b; the bias is below 2^-64 * below)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % below


@lru_cache(maxsize=4)
def permutation(size: int, key: str) -> NDArray[np.int64]:
    """An order of 0 … size - 1 that depends on `key` alone: by the SplitMix64 (Steele et al. 2014) of each number."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        mixed = start + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    order = np.argsort(mixed, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


@dataclass(frozen=True, slots=True)
class RandomSampler:
    """nanoGPT's: each row is drawn for itself, with replacement."""

    size: int
    batch: int
    seed: int
    split: str

    def ids(self, step: int, replica: int) -> list[int]:
        """See Sampler."""
        key = f"random/{self.seed}/{self.split}/{replica}/{step}"
        return [draw(f"{key}/{row}", self.size) for row in range(self.batch)]


@dataclass(frozen=True, slots=True)
class ShuffleSampler:
    """Each sample once an epoch, in an order of its own in each epoch; a batch may span the end of an epoch."""

    size: int
    batch: int
    seed: int
    split: str

    def ids(self, step: int, replica: int) -> list[int]:
        """See Sampler."""
        found: list[int] = []
        position = step * self.batch
        while len(found) < self.batch:
            epoch, start = divmod(position, self.size)
            order = permutation(self.size, f"shuffle/{self.seed}/{self.split}/{replica}/{epoch}")
            taken = order[start : start + self.batch - len(found)]
            found += taken.tolist()
            position += len(taken)
        return found


def make_sampler(kind: str, *, size: int, batch: int, seed: int, split: str) -> Sampler:
    """The sampler of that name."""
    match kind:
        case "random":
            return RandomSampler(size, batch, seed, split)
        case "shuffle":
            return ShuffleSampler(size, batch, seed, split)
    raise ValueError(kind)


def microbatch_rows(batch: int, microbatches: int, microbatch: int) -> range:
    """The rows of a batch that microbatch number `microbatch` takes: equal shares, the first ones one larger."""
    share, more = divmod(batch, microbatches)
    start = microbatch * share + min(microbatch, more)
    return range(start, start + share + (microbatch < more))
