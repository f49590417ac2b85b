"""How many places of storage operations the tests made to fail, told at the end of a run, over all its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

TRIED: Counter[str] = Counter()
"""By operation, how many of its calls were made to fail, or its process killed there, in this run of the tests."""


def show_tried(write: Callable[[str], None]) -> None:
    """One line of it."""
    if TRIED:
        each = ", ".join(f"{name} {count:,}" for name, count in TRIED.most_common())
        write(f"places of storage operations at which they were made to fail: {TRIED.total():,} ({each})")
