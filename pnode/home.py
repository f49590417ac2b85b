"""The PNode's home folder: it has to stay the same folder for as long as the PNode lives.

The folder is held open: so its number stays its own, and another folder that takes its place is seen to be another.
"""

from __future__ import annotations

import os
from pathlib import Path

from wire.errors import DCNRError, UsageError


class HomeGoneError(DCNRError):
    """The home folder was deleted or replaced under a running PNode."""


def make_home(path: Path) -> None:
    """Make the folder, unless it is there. Raises UsageError if it can't be had or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"no home folder at {path}: {error.strerror or error}", hint="give another --home") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"the home folder {path} can't be written to", hint="give another --home")


class Home:
    """See the module."""

    def __init__(self, path: Path) -> None:
        make_home(path)
        self._path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raises HomeGoneError."""
        try:
            there = os.stat(self._path)
            if os.path.samestat(there, os.fstat(self._folder)):
                return
            what = "replaced by another one"
        except OSError as error:
            what = f"deleted or moved away ({error.strerror or error})"
        raise HomeGoneError(
            f"the home folder {self._path} was {what}: log, data and memory can't be written there",
            hint="start this PNode again",
        )

    def close(self) -> None:
        """Let go of it."""
        os.close(self._folder)
