"""A file system of its own, small enough to be filled to the last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 96 << 20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A tmpfs in a new folder; None where it can't be mounted (it takes root)."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "dcnr-chaos", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no disk will be full: {done.stderr.strip()}")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
