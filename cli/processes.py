"""Processes that this command starts and must later find, and end, again.

A process is known by its pid *and* its start time, so a pid that the system gave to somebody else is never touched.
Each runs in a session of its own: a Ctrl-C in the terminal does not reach it, and its whole group can be ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wire.ending import GRACE_S
from wire.errors import BadFileError, DCNRError


@dataclass(frozen=True, slots=True)
class Process:
    """A started process: what it is for people, its pid, its birth (see `birth_of`), and where it logs."""

    name: str
    pid: int
    birth: str
    log: str

    @staticmethod
    def from_json(raw: Any) -> Process:
        """Back from `to_json`. Raises `BadFileError`."""
        try:
            return Process(str(raw["name"]), int(raw["pid"]), str(raw["birth"]), str(raw["log"]))
        except (TypeError, KeyError, ValueError) as problem:
            raise BadFileError(f"not the record of a process: {raw!r}", hint="delete cluster.json") from problem

    def to_json(self) -> dict[str, Any]:
        """For cluster.json."""
        return asdict(self)

    def alive(self) -> bool:
        """The very process that was started still runs (a zombie does not)."""
        return birth_of(self.pid) == self.birth

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it (or its group), if it is still the same process."""
        if not self.alive():
            return
        try:
            if group and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log."""
        try:
            text = Path(self.log).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])


def start(name: str, module: str, arguments: Sequence[str], *, log: Path, threads: int) -> Process:
    """Run one of our own modules in the background, in its own session, with its output in `log`.

    `threads` bounds what the numerical libraries may use. The current folder is not on its import path.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment["PYTHONUNBUFFERED"] = "1"
    with log.open("ab") as sink:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            close_fds=True,
            env=environment,
        )
    _children[child.pid] = child
    return Process(name, child.pid, birth_of(child.pid) or "ended", str(log))


def birth_of(pid: int) -> str | None:
    """What tells this process from any other that has or will have its pid; None if it is gone or a zombie.

    On Linux the boot and the kernel's start tick, which no change of the clock moves; elsewhere the start time.
    """
    try:
        # The command's name, in parentheses, may hold spaces; state is the 3rd field and the start tick the 22nd.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    import psutil

    try:
        found = psutil.Process(pid)
        return None if found.status() == psutil.STATUS_ZOMBIE else f"{found.create_time():.2f}"
    except psutil.Error:
        return None


_children: dict[int, subprocess.Popen[bytes]] = {}


def reap() -> None:
    """Collect children of ours that have ended, so that none stays as a zombie."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def collect(processes: Iterable[Process], timeout_s: float = 2.0) -> None:
    """Collect children that have ended: one whose threads still end is a zombie that can't be collected yet."""
    pids = {process.pid for process in processes}
    deadline = time.monotonic() + timeout_s
    while pids & _children.keys() and time.monotonic() < deadline:
        reap()
        time.sleep(0.01)


def stop(processes: Iterable[Process], *, grace_s: float = GRACE_S, kill_after_s: float = 5.0) -> list[Process]:
    """End all of them: SIGTERM, then SIGKILL to the group for those that are still there. Returns the ones killed.

    Raises `DCNRError` naming those that not even SIGKILL ended.
    """
    everyone = list(processes)
    for process in everyone:
        process.signal(signal.SIGTERM)
    left = wait_until_gone(everyone, grace_s)
    killed = list(left)
    for process in left:
        process.signal(signal.SIGKILL, group=True)
    left = wait_until_gone(left, kill_after_s)
    if left:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in left)
        raise DCNRError(
            f"could not end {names}", hint="the system keeps it in an uninterruptible wait; look at its disk"
        )
    return killed


def wait_until_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Those that still run at the deadline."""
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while left:
        reap()
        left = [process for process in left if process.alive()]
        if time.monotonic() > deadline:
            break
        if left:
            time.sleep(0.02)
    return left


def wait_for(ready: Callable[[], bool], processes: Sequence[Process], what: str, timeout_s: float) -> None:
    """Poll until `ready()`. Raises `DCNRError` at the deadline, or at once if one of the processes has ended."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        reap()
        for process in processes:
            if not process.alive():
                last = process.tail(3) or "it wrote nothing"
                raise DCNRError(f"{process.name} ended while starting: {last}", hint=f"its log: {process.log}")
        if time.monotonic() > deadline:
            raise DCNRError(f"{what} was not ready within {timeout_s:.0f} s", hint=f"logs: {processes[0].log}")
        time.sleep(0.02)
