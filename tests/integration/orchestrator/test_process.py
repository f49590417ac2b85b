"""`dcnr-orchestrator` as a process: how it starts, says that it is ready, and ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.orchestrator.cluster import Client, network_bytes
from wire.ids import new_request_id
from wire.messages import NetworkInfo, PutNetwork

STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every process that a test started has ended after it."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()
    STARTED.clear()


def start(home: Path, *more: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.main", "--bind", "tcp://127.0.0.1:0", "--home", str(home), *more],
        stderr=subprocess.PIPE,
    )
    STARTED.append(process)
    return process


def ready(home: Path, process: subprocess.Popen[bytes], timeout_s: float = 20) -> dict[str, Any]:
    """What the address file says once it is there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            found: dict[str, Any] = json.loads((home / "orchestrator.json").read_text())
        except FileNotFoundError:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
            continue
        if found["pid"] == process.pid:
            return found
    raise AssertionError("not ready")


def ended(process: subprocess.Popen[bytes], timeout_s: float = 10) -> tuple[int, str]:
    """Exit code and the last line it wrote."""
    _, errors = process.communicate(timeout=timeout_s)
    lines = errors.decode().strip().splitlines()
    return process.returncode, lines[-1] if lines else ""


@pytest.mark.e2e
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_starts_says_so_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path)
    mark = ready(tmp_path, process)
    assert mark["address"].startswith("tcp://")
    assert mark["term"] == 1
    assert mark["store"].startswith("file:///")
    process.send_signal(number)
    assert ended(process)[0] == code
    assert not (tmp_path / "orchestrator.json").exists()


@pytest.mark.e2e
def test_a_killed_one_is_followed_by_a_higher_term(tmp_path: Path) -> None:
    first = start(tmp_path)
    boot = ready(tmp_path, first)["boot"]
    first.kill()
    first.wait(10)
    second = start(tmp_path)
    mark = ready(tmp_path, second)
    assert mark["term"] == 2
    assert mark["boot"] != boot
    second.terminate()
    assert ended(second)[0] == 0


async def registered(folder: Path, address: str) -> None:
    """Register a network."""
    client = Client(address)
    await client.bus.start()
    try:
        message = PutNetwork(str(new_request_id()), "toy")
        await client.ask(message, NetworkInfo, [network_bytes(folder)], 60)
    finally:
        await client.bus.close()


def loads_torch_before_it_listens(process: subprocess.Popen[bytes], timeout_s: float = 60) -> bool:
    """Wait until it can be reached; whether torch was loaded by then."""
    found = psutil.Process(process.pid)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(one.status == psutil.CONN_LISTEN for one in found.net_connections("tcp")):
            return any("libtorch" in mapped.path for mapped in found.memory_maps())
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    raise AssertionError("it does not listen")


@pytest.mark.e2e
def test_torch_is_loaded_before_it_can_be_reached_if_there_are_networks(tmp_path: Path) -> None:
    """Loading it later would stall its loop for seconds: in a take-over, when all PNodes wait to be answered."""
    first = start(tmp_path)
    assert not loads_torch_before_it_listens(first), "a new cluster starts quickly"
    asyncio.run(registered(tmp_path, ready(tmp_path, first)["address"]))
    first.kill()
    first.wait(10)
    second = start(tmp_path)
    assert loads_torch_before_it_listens(second)
    ready(tmp_path, second)
    second.terminate()
    assert ended(second)[0] == 0


@pytest.mark.e2e
def test_one_per_home(tmp_path: Path) -> None:
    first = start(tmp_path)
    ready(tmp_path, first)
    code, text = ended(start(tmp_path))
    assert code == 69
    assert "another orchestrator runs in" in text
    assert "dcnr down" in text
    assert first.poll() is None
    first.terminate()
    ended(first)


@pytest.mark.e2e
def test_the_lock_of_one_that_is_just_dying_is_waited_for(tmp_path: Path) -> None:
    """After kill -9 a lock stays until the system has ended the last thread (seen on a crowded machine)."""
    with (tmp_path / "orchestrator.lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(tmp_path)
        tried = f"{tmp_path}/orchestrator.lock"
        deadline = time.monotonic() + 20
        while tried not in [file.path for file in psutil.Process(process.pid).open_files()]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
    ready(tmp_path, process)
    process.terminate()
    assert ended(process)[0] == 0


@pytest.mark.e2e
def test_ends_when_its_home_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = start(home, "--store", str(tmp_path / "store"))
    ready(home, process)
    shutil.rmtree(home)
    assert ended(process)[0] == 0


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--lease", "0"], 2, "--lease is 0"),
        (["--nonsense"], 2, "unrecognized arguments"),
        (["--store", "ftp://x"], 2, "no store of the kind"),
        (["--bind", "tcp://192.0.2.1:1"], 69, "can't listen on tcp://192.0.2.1:1"),
        (["--store", "/dev/null/store"], 69, "/dev/null/store"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, options: list[str], code: int, text: str) -> None:
    process = start(tmp_path, *options)
    found = ended(process, 20)
    assert found[0] == code, found
    assert text in found[1]
    assert found[1].startswith("dcnr-orchestrator: ")
    assert "Traceback" not in found[1]


@pytest.mark.e2e
def test_idle_it_costs_nearly_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    ready(tmp_path, process)
    time.sleep(0.5)
    seen = psutil.Process(process.pid)
    before = sum(seen.cpu_times()[:2])
    time.sleep(4)
    assert sum(seen.cpu_times()[:2]) - before <= 0.04
    assert seen.memory_info().rss < 150 << 20, "torch is imported by the first network only"
    assert len(seen.open_files()) < 20
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process)[0] == 0
