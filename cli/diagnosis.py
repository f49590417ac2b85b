"""The checks of `dcnr doctor`. Each is one function that gives one `Finding` and never raises for what it looks for."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from cli.client import Client, store_of
from cli.cluster import Cluster, available_cores
from cli.context import orchestrator_address
from cli.terminal import Terminal
from cli.units import plural, size
from wire.errors import DCNRError

State = Literal["ok", "warn", "bad", "skip"]

PACKAGES = ("torch", "pyzmq", "msgspec", "numpy", "pydantic", "aioboto3", "tokenizers")
MIN_DISK_BYTES, MIN_MEMORY_BYTES = 2_000_000_000, 1_000_000_000
MAX_CLOCK_DRIFT_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: how it is, and if it isn't well, how to mend it."""

    what: str
    state: State
    text: str
    mend: str = ""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


async def examine(
    home: Path, orchestrator: str | None, store: str, terminal: Terminal, timeout_s: float
) -> list[Finding]:
    """All findings, local ones first."""
    found = [_python(), *_packages(), _cores(), _memory(), _disk(home), _home(home), _port(), _leftovers(home)]
    found += [finding async for finding in _cluster(home, orchestrator, store, terminal, timeout_s)]
    return found


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.flags.optimize:
        return Finding("Python", "warn", f"{text}, with -O", "run it without -O: checks are left out")
    return Finding("Python", "ok", text)


def _packages() -> list[Finding]:
    found: list[Finding] = []
    wanted = {_name(line): line for line in (requires("dcnr") or []) if "extra ==" not in line}
    for name in PACKAGES:
        try:
            text = version(name)
        except PackageNotFoundError:
            found.append(Finding(name, "bad", "not installed", f"pip install '{wanted.get(name, name)}'"))
            continue
        found.append(Finding(name, "ok", text))
    return found


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower() if match else requirement


def _cores() -> Finding:
    cores = available_cores()
    return Finding("cores", "ok", f"{plural(cores, 'core')}, load {os.getloadavg()[0]:.1f}")


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    if free < MIN_MEMORY_BYTES:
        return Finding("memory", "warn", f"{size(free)} free", "end other programs, or use fewer PNodes")
    return Finding("memory", "ok", f"{size(free)} free")


def _disk(home: Path) -> Finding:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < MIN_DISK_BYTES:
        return Finding("disk", "warn", f"{size(free)} free at {place}", "make room, or: dcnr gc")
    return Finding("disk", "ok", f"{size(free)} free at {place}")


def _home(home: Path) -> Finding:
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe = home / f".doctor-{os.getpid()}"
        probe.write_text("x")
        probe.unlink()
    except OSError as problem:
        return Finding("home", "bad", f"{home}: {problem.strerror}", "choose another with DCNR_HOME or --home")
    return Finding("home", "ok", str(home))


def _port() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Finding("ports", "ok", f"loopback can be listened on (got {probe.getsockname()[1]})")
    except OSError as problem:
        return Finding("ports", "bad", f"can't listen on loopback: {problem.strerror}", "does a sandbox forbid it?")


def _leftovers(home: Path) -> Finding:
    try:
        cluster = Cluster.read(home)
    except DCNRError as problem:
        return Finding("local cluster", "warn", problem.message, problem.hint)
    if cluster is None:
        return Finding("local cluster", "skip", "none is up")
    alive = cluster.alive()
    gone = [process.name for process in cluster.processes() if process not in alive]
    if gone:
        return Finding(
            "local cluster", "warn", f"{', '.join(gone)} ended unasked", "dcnr up starts it again; see its log"
        )
    return Finding("local cluster", "ok", ", ".join(f"{process.name} {process.pid}" for process in alive))


async def _cluster(
    home: Path, orchestrator: str | None, store: str, terminal: Terminal, timeout_s: float
) -> AsyncIterator[Finding]:
    try:
        address = orchestrator_address(orchestrator, home)
    except DCNRError as problem:
        yield Finding("orchestrator", "skip", problem.message, "" if orchestrator is None else problem.hint)
        if store:
            yield await _store(store, timeout_s)
        return
    try:
        async with Client(address, terminal, timeout_s=timeout_s) as client:
            before = time.time()
            info = await client.cluster()
            took = time.time() - before
            yield Finding("orchestrator", "ok", f"{address}, version {info.version}, {took * 1000:.0f} ms")
            yield _same_version(info.version)
            for node in await client.pnodes():
                text = f"{node.state}, {node.compute}, torch {node.profile.torch}, {node.profile.threads} threads"
                text += f", unhealthy: {node.health}" if node.health else ""
                good = node.state == "alive" and not node.health
                mend = "" if good else f"look at its machine {node.profile.host} and its log; start it anew"
                yield Finding(f"PNode {node.pnode}", "ok" if good else "warn", text, mend)
    except DCNRError as problem:
        yield Finding("orchestrator", "bad", problem.message, problem.hint)
        if store:
            yield await _store(store, timeout_s)
        return
    yield await _store(store or info.store, timeout_s)


def _same_version(other: str) -> Finding:
    mine = version("dcnr")
    if other != mine:
        return Finding("version", "warn", f"here {mine}, orchestrator {other}", "install the same version everywhere")
    return Finding("version", "ok", mine)


async def _store(url: str, timeout_s: float) -> Finding:
    try:
        async with asyncio.timeout(max(timeout_s, 10.0)), store_of(url) as store:
            await store.probe()
            drift = await _clock_drift(store)
    except TimeoutError:
        return Finding("store", "bad", f"{url} does not answer", "is it reachable from here?")
    except DCNRError as problem:
        return Finding("store", "bad", problem.message, problem.hint or "check the URL and the credentials")
    if abs(drift) > MAX_CLOCK_DRIFT_S:
        way = "behind" if drift > 0 else "ahead of"
        return Finding("store", "warn", f"this clock is {abs(drift):.0f} s {way} the store's", "turn on NTP here")
    return Finding("store", "ok", f"{url} can be read and written, clocks agree within {max(1, round(abs(drift)))} s")


async def _clock_drift(store: Any) -> float:
    key = f"doctor/{os.getpid()}-{time.time_ns()}"
    await store.put(key, b"x")
    now = time.time()
    entry = await store.head(key)
    await store.delete(key)
    return float(entry.modified_s - now)
