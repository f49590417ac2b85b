"""Temporary files that never pile up: whoever writes one holds its lock, so what nobody holds was left by the dead.

No clock is asked: neither a slow writer nor a clock that jumps makes a file look abandoned. The kernel frees the lock
when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from io import BufferedRandom
from pathlib import Path

NAME = re.compile(r"\.?tmp-[0-9a-f]{32}")
TRIES = 100


def new_temporary(folder: Path, *, hidden: bool = False) -> tuple[Path, BufferedRandom]:
    """A new, empty, open and locked file in `folder`: its path, and the file. Close it to give up the lock."""
    for _ in range(TRIES):
        path = folder / f"{'.' if hidden else ''}tmp-{uuid.uuid4().hex}"
        file = open(path, "x+b")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return path, file
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        file.close()  # a sweep was faster: it had the lock between the two calls
    raise OSError(f"{folder}: temporary files vanish as soon as they are made")


def sweep(folder: Path) -> int:
    """Remove the temporary files that nobody writes any more; how many."""
    removed = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(folder)):
            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                removed += _remove_if_dead(Path(entry.path))
    return removed


def _remove_if_dead(path: Path) -> int:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return 1
    return 0
