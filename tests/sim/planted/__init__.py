"""Bugs that are planted into the shipped code, to see the checker find them.

Each is a change of a few words in a function's own source, made while a run lasts. Words that are not there any more,
or not once, are an error: a bug that plants nothing would be found by nobody and prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.sim.planted.bugs import BUGS, MASKED, Bug
from tests.sim.planted.edit import MovedError, planted

__all__ = ["BUGS", "MASKED", "Bug", "MovedError", "bug", "patch_of"]


def bug(name: str) -> Bug:
    """The bug of that name. Raises KeyError."""
    return next(found for found in [*BUGS, *MASKED] if found.name == name)


def patch_of(name: str) -> Callable[[], AbstractContextManager[object]]:
    """A bug as `tests.sim.world.run` takes it."""
    return lambda: planted(bug(name).edits())
