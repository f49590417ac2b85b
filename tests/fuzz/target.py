"""What a target of the fuzzers is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Target:
    """A reader of foreign bytes.

    `make`: valid inputs; `run`: reads one, and raises a `DCNRError` for what it refuses; `change`: another input from a
    valid one (the third argument: all of them).
    """

    name: str
    what: str
    make: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    change: Callable[[Random, bytes, Sequence[bytes]], bytes]
    max_bytes: int = 1 << 20

    def valid(self) -> list[bytes]:
        """The valid inputs, made once."""
        return _made(self.make)


@functools.cache
def _made(make: Callable[[], list[bytes]]) -> list[bytes]:
    return make()
