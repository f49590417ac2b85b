"""A cluster on this machine: one orchestrator and some PNode processes, described by `cluster.json` in a home folder.

The file is written after each start, so whatever dies later, `down` finds all of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli import processes
from cli.context import parse_address, read_json, write_json
from cli.processes import Process
from cli.running import undisturbed
from wire.ending import GRACE_S
from wire.errors import BadFileError, DCNRError, UsageError

START_TIMEOUT_S = 60.0
LEASE_S = 10.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes of a local cluster and how to reach its orchestrator."""

    home: Path
    store: str
    orchestrator: Process
    address: str
    pnodes: tuple[Process, ...]
    threads: int
    device: str = "cpu"
    lease_s: float = LEASE_S
    storage: Process | None = None
    """The storage service, if PNodes are to reach the store through one."""
    storage_address: str = ""

    @staticmethod
    def file(home: Path) -> Path:
        """Where it is described."""
        return home / "cluster.json"

    @staticmethod
    def read(home: Path) -> Cluster | None:
        """From its file; None if there is none. Raises `BadFileError`."""
        raw = read_json(Cluster.file(home))
        if raw is None:
            return None
        try:
            return Cluster(
                home,
                str(raw["store"]),
                Process.from_json(raw["orchestrator"]),
                str(raw["address"]),
                tuple(Process.from_json(entry) for entry in raw["pnodes"]),
                int(raw["threads"]),
                str(raw.get("device", "cpu")),
                float(raw.get("lease_s", LEASE_S)),
                Process.from_json(raw["storage"]) if raw.get("storage") else None,
                str(raw.get("storage_address", "")),
            )
        except (TypeError, KeyError, ValueError) as problem:
            raise BadFileError(f"{Cluster.file(home)} does not describe a cluster", hint="delete it") from problem

    def write(self) -> None:
        """To its file."""
        write_json(Cluster.file(self.home), self.to_json())

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "store": self.store,
            "address": self.address,
            "threads": self.threads,
            "device": self.device,
            "lease_s": self.lease_s,
            "orchestrator": self.orchestrator.to_json(),
            "pnodes": [process.to_json() for process in self.pnodes],
            **self._storage_json(),
        }

    def _storage_json(self) -> dict[str, Any]:
        if self.storage is None:
            return {}
        return {"storage": self.storage.to_json(), "storage_address": self.storage_address}

    def processes(self) -> tuple[Process, ...]:
        """PNodes first: the order to stop them in."""
        return (*self.pnodes, self.orchestrator, *([self.storage] if self.storage is not None else []))

    def alive(self) -> list[Process]:
        """Those that run."""
        return [process for process in self.processes() if process.alive()]


ANY_PORT = "tcp://127.0.0.1:0"
NOBODY = Process("orchestrator", 0, "not started", "")
"""Stands for an orchestrator that is still to be started."""


def threads_per_pnode(pnodes: int, cores: int | None = None) -> int:
    """How many threads each of `pnodes` processes on one machine should compute with."""
    return max(1, (cores or available_cores()) // max(1, pnodes))


def available_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def start(
    home: Path,
    *,
    pnodes: int,
    store: str = "",
    bind: str = "tcp://127.0.0.1:0",
    threads: int = 0,
    device: str = "cpu",
    lease_s: float = LEASE_S,
    store_service: bool = False,
    timeout_s: float = START_TIMEOUT_S,
    said: Callable[[str], None] = lambda text: None,
) -> Cluster:
    """Start a cluster in `home` and wait until its orchestrator answers and its PNode processes run.

    If anything fails or interrupts, all of it is ended again. Raises `DCNRError`.
    """
    if pnodes < 0:
        raise UsageError("a cluster can't have fewer than 0 PNodes")
    found = Cluster.read(home)
    if found is not None and found.alive():
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in found.alive())
        raise DCNRError(f"a cluster already runs in {home}: {names}", hint="dcnr down")
    home.mkdir(parents=True, exist_ok=True)
    store = store_url(store or str(home / "store"))
    cluster = Cluster(home, store, NOBODY, bind, (), threads or threads_per_pnode(pnodes), device, lease_s)
    try:
        if store_service:
            cluster = start_storage(replace(cluster, storage_address=ANY_PORT), timeout_s)
            said("storage")
        cluster = start_orchestrator(cluster, timeout_s)
        said("orchestrator")
        for index in range(pnodes):
            cluster = add_pnode(cluster, f"p{index + 1}")
            said(f"p{index + 1}")
    except BaseException:
        stop(Cluster.read(home) or cluster)
        raise
    return cluster


def start_storage(cluster: Cluster, timeout_s: float = START_TIMEOUT_S) -> Cluster:
    """Start the storage service, at the cluster's address of it, and wait until it answers."""
    ready = cluster.home / "storage.json"
    ready.unlink(missing_ok=True)
    process = processes.start(
        "storage",
        "storage.remote.main",
        ["--bind", cluster.storage_address, "--store", cluster.store, "--home", str(cluster.home)],
        log=fresh_log(cluster.home, "storage"),
        threads=1,
    )
    cluster = replace(cluster, storage=process)
    cluster.write()
    processes.wait_for(lambda: _address(ready) != "", [process], "the storage service", timeout_s)
    cluster = replace(cluster, storage_address=_address(ready))
    cluster.write()
    return cluster


def start_orchestrator(cluster: Cluster, timeout_s: float = START_TIMEOUT_S) -> Cluster:
    """Start the orchestrator, at the cluster's address, and wait until it answers; returns the cluster with it."""
    home = cluster.home
    ready = home / "orchestrator.json"
    ready.unlink(missing_ok=True)
    process = processes.start(
        "orchestrator",
        "orchestrator.main",
        [
            "--bind", cluster.address,
            "--store", cluster.store,
            "--home", str(home),
            "--lease", f"{cluster.lease_s:g}",
            *(["--advertise-store", cluster.storage_address.replace("tcp:", "dcnr:")] if cluster.storage else []),
        ],
        log=fresh_log(home, "orchestrator"),
        threads=1,
    )  # fmt: skip
    cluster = replace(cluster, orchestrator=process)
    cluster.write()
    processes.wait_for(lambda: _address(ready) != "", [process], "the orchestrator", timeout_s)
    cluster = replace(cluster, address=_address(ready))
    cluster.write()
    return cluster


def add_pnode(cluster: Cluster, name: str) -> Cluster:
    """Start one more PNode process, or one of these again; returns the cluster with it."""
    process = processes.start(
        name,
        "pnode.main",
        [
            "--name", name,
            "--orchestrator", cluster.address,
            "--bind", "tcp://127.0.0.1:0",
            "--device", cluster.device,
            "--threads", str(cluster.threads),
            "--home", str(cluster.home / name),
            "--cache", str(cluster.home / "cache"),
        ],
        log=fresh_log(cluster.home, name),
        threads=cluster.threads,
    )  # fmt: skip
    known = {other.name: other for other in cluster.pnodes} | {name: process}
    cluster = replace(cluster, pnodes=tuple(known.values()))
    cluster.write()
    return cluster


def stop(cluster: Cluster, *, grace_s: float = GRACE_S) -> list[Process]:
    """End every process of the cluster and forget it. Returns those that had to be killed."""
    with undisturbed():
        killed = processes.stop(cluster.processes(), grace_s=grace_s)
    Cluster.file(cluster.home).unlink(missing_ok=True)
    (cluster.home / "orchestrator.json").unlink(missing_ok=True)
    return killed


def store_url(text: str) -> str:
    """A store as the orchestrator takes it: URLs as they are, folders as absolute paths."""
    if "://" in text:
        return text
    return Path(text).expanduser().absolute().as_uri()


def fresh_log(home: Path, name: str) -> Path:
    """The log file of a process that is about to start; the previous one is kept as `.1`."""
    log = home / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))
    return log


def forget(home: Path, names: Iterable[str]) -> None:
    """Delete parts of a home folder (`store`, `logs`, …), for a fresh start."""
    for name in names:
        target = home / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _address(ready: Path) -> str:
    try:
        raw = read_json(ready)
    except BadFileError:  # still being written
        return ""
    address = str((raw or {}).get("address", ""))
    return parse_address(address) if address else ""
