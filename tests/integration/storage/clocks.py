"""A process whose wall clock a test moves while it runs. Its monotonic clock is right, as it is on a real machine.

By libfaketime (Debian's package `faketime`) where it is installed, and by replacing the two places at which the process
asks for the time. Both read the offset in seconds from a file, each time they are asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = [
    *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    *Path("/usr/local/lib/faketime").glob("libfaketime.so.1"),
]
WAYS = ["injected", *(["faketime"] if LIBRARIES else [])]

INJECTION = """
import datetime, os, time
import botocore.auth

_wall = time.time

def _now():
    with open(os.environ["DCNR_TEST_OFFSET"]) as file:
        return _wall() + float(file.read() or 0)

class _Shifted(datetime.datetime):
    @classmethod
    def utcnow(cls):
        return datetime.datetime.fromtimestamp(_now(), datetime.timezone.utc).replace(tzinfo=None)

time.time = _now
if hasattr(botocore.auth, "get_current_datetime"):
    botocore.auth.get_current_datetime = lambda remove_tzinfo=True: _Shifted.utcnow()
else:
    botocore.auth.datetime.datetime = _Shifted
"""


class MovedClock:
    """`set` moves the clock of the processes that were started with `environment` and `preamble`."""

    def __init__(self, way: str, folder: Path) -> None:
        self._file = folder / "offset"
        self._way = way
        self.set(0)

    def set(self, ahead_s: float) -> None:
        """Ahead of the true time by so much; negative: behind."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(f"{ahead_s:+.0f}\n")
        temporary.replace(self._file)

    @property
    def environment(self) -> Mapping[str, str]:
        """For the process."""
        if self._way == "injected":
            return os.environ | {"DCNR_TEST_OFFSET": str(self._file)}
        return os.environ | {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    @property
    def preamble(self) -> str:
        """What its program begins with."""
        return INJECTION if self._way == "injected" else ""

    def command(self, program: str, *arguments: str) -> list[str]:
        """To run a program with that clock."""
        return [sys.executable, "-c", self.preamble + program, *arguments]
