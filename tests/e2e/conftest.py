"""`dcnr` as a person runs it: real processes, a home of its own for each test, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

TIMEOUT_S = 120.0


@dataclass
class Dcnr:
    """The command with a home, and what it started."""

    home: Path
    extra: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """What a person's shell gives: nothing of ours, no terminal, and Python's own buffering."""
        dropped = ("TERM", "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONIOENCODING")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DCNR_") and key not in dropped}
        return {**kept, "DCNR_HOME": str(self.home), "OMP_NUM_THREADS": "1", **self.extra}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "cli.main", *arguments]

    def run(self, *arguments: str, timeout: float = TIMEOUT_S, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout, env={**self.env, **extra},
            stdin=subprocess.DEVNULL, cwd=self.home,
        )  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0, timeout: float = TIMEOUT_S, **extra: str) -> str:
        """Run, check the exit code, give standard output."""
        done = self.run(*arguments, timeout=timeout, **extra)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """The JSON document that a command writes."""
        return json.loads(self(*arguments, "-o", "json"))

    def events(self, *arguments: str) -> list[dict[str, Any]]:
        """The JSON lines that a command writes."""
        return [json.loads(line) for line in self(*arguments, "-o", "json").splitlines()]

    def start(self, *arguments: str, stdout: Any = subprocess.PIPE, **extra: str) -> subprocess.Popen[bytes]:
        """Start and go on."""
        child = subprocess.Popen(
            self.command(*arguments), stdout=stdout, stderr=subprocess.STDOUT, env={**self.env, **extra},
            stdin=subprocess.DEVNULL, cwd=self.home,
        )  # fmt: skip
        self.started.append(child)
        return child

    def record(self) -> dict[str, Any]:
        """What `cluster.json` says."""
        found: dict[str, Any] = json.loads((self.home / "cluster.json").read_text())
        return found

    def gone(self, pid: int) -> bool:
        """No such process any more (a zombie is gone)."""
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return True

    def pids(self) -> dict[str, int]:
        """The local cluster's processes by name."""
        record = self.record()
        return {entry["name"]: entry["pid"] for entry in [record["orchestrator"], *record["pnodes"]]}

    def kill_everything(self) -> None:
        """SIGKILL for all daemons at once."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def session(self, name: str) -> dict[str, Any]:
        """One session as `ps` shows it."""
        return next(info for info in self.json("ps") if info["session"] == name)

    def wait_for(self, ready: Callable[[], bool], timeout: float = 60.0) -> None:
        """Poll."""
        deadline = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.1)

    def daemons(self) -> list[psutil.Process]:
        """Every living process whose command line names this home."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.home) in word for word in line):
                    found.append(process)
        return found

    def close(self) -> None:
        """End whatever still runs."""
        for child in self.started:
            if child.poll() is None:
                child.kill()
            child.wait(timeout=10)
            if child.stdout is not None:
                child.stdout.close()
        for process in self.daemons():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def dcnr(tmp_path: Path) -> Iterator[Dcnr]:
    """The command with an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    made = Dcnr(home)
    yield made
    made.close()
    assert made.daemons() == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dcnr]:
    """A running cluster of three PNodes for a whole module; ended by `dcnr down`, which must leave nothing."""
    home = tmp_path_factory.mktemp("cluster")
    made = Dcnr(home)
    try:
        made("up", "--pnodes", "3")
        yield made
        made("down")
        assert made.daemons() == []
    finally:
        made.close()


def read_until(child: subprocess.Popen[bytes], word: str, timeout: float = 60.0) -> str:
    """What a child writes, up to a line that holds `word`."""
    assert child.stdout is not None
    timer = threading.Timer(timeout, child.kill)
    timer.start()
    lines = []
    try:
        for line in child.stdout:
            lines.append(line.decode())
            if word in lines[-1]:
                return "".join(lines)
    finally:
        timer.cancel()
    raise AssertionError(f"{word!r} never came:\n{''.join(lines)[-3000:]}")
