"""A local DCNR cluster for measurements: real processes in a home of their own, ended at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil


class LocalCluster:
    """`dcnr up` in a temporary home; use it as a context manager."""

    def __init__(self, pnodes: int, threads: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dcnr-bench-")
        self.home = Path(self._folder.name)
        self.environment = os.environ | {"DCNR_HOME": str(self.home)}
        self._extra: list[subprocess.Popen[bytes]] = []
        """PNodes started by hand."""
        self._size = (pnodes, threads)

    def __enter__(self) -> LocalCluster:
        pnodes, threads = self._size
        self.dcnr("up", "--pnodes", str(pnodes), "--threads", str(threads))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._extra:
            process.terminate()
            process.wait(20)
        self.dcnr("down")
        self._folder.cleanup()

    def dcnr(self, *arguments: str) -> str:
        """Run one command; its standard output."""
        command = [sys.executable, "-m", "cli.main", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"dcnr {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Run one command with `-o json`; what it printed."""
        return json.loads(self.dcnr(*arguments, "-o", "json"))

    def train(self, network: str | Path, *arguments: str) -> list[dict[str, Any]]:
        """Train and wait; one record for each step (step, loss, seconds, targets)."""
        lines = self.dcnr("train", str(network), *arguments, "-o", "json").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == "step"]

    def session(self, name: str) -> dict[str, Any]:
        """One session as `dcnr ps -o json` shows it."""
        found: dict[str, Any] = next(entry for entry in self.json("ps") if entry["session"] == name)
        return found

    def wait(self, name: str, step: int, timeout_s: float = 600.0) -> None:
        """Until a session has applied so many steps."""
        end = time.monotonic() + timeout_s
        while (seen := self.session(name))["step"] < step:
            if seen["state"] == "failed" or time.monotonic() > end:
                raise SystemExit(f"{name} is at step {seen['step']}, {seen['state']}: {seen['error']}")
            time.sleep(0.2)

    def processes(self) -> dict[str, psutil.Process]:
        """The cluster's processes by name."""
        raw = json.loads((self.home / "cluster.json").read_text())
        entries = [raw["orchestrator"], *raw["pnodes"]]
        return {entry["name"]: psutil.Process(entry["pid"]) for entry in entries}

    def add_pnode(self, name: str, *arguments: str, program: Sequence[str] = ("pnode.main",)) -> psutil.Process:
        """Start one more PNode by hand and wait until it is a member. `program`: a module and its first arguments."""
        address = json.loads((self.home / "cluster.json").read_text())["address"]
        command = [sys.executable, "-m", *program, "--name", name, "--orchestrator", address]
        command += ["--home", str(self.home / name), *arguments]
        process = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)
        self._extra.append(process)
        end = time.monotonic() + 60
        while all(entry["pnode"] != name or entry["state"] != "alive" for entry in self.json("status")["pnodes"]):
            if time.monotonic() > end:
                raise SystemExit(f"{name} did not join")
            time.sleep(0.3)
        return psutil.Process(process.pid)


def metric(port: int, name: str) -> float:
    """One sample of a PNode's Prometheus metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name) and not line.startswith("#"):
                return float(line.rsplit(" ", 1)[1])
    raise SystemExit(f"no metric {name}")
