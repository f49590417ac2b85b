"""What `dcnr up` does about a cluster that has lost processes, or is to have more PNodes: start those, and no others.

The orchestrator comes back at its address, PNodes under their names, all with the options of the first start. What
runs is left alone, also when this is interrupted or fails: then only what it started itself is ended again.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace

from cli import processes
from cli.cluster import ANY_PORT, Cluster, add_pnode, start_orchestrator, start_storage, store_url
from cli.processes import Process
from cli.running import undisturbed
from wire.errors import DCNRError, UsageError


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of `dcnr up` as they were given; None: not given, so as it was."""

    pnodes: int | None = None
    store: str | None = None
    bind: str | None = None
    threads: int | None = None
    device: str | None = None
    lease_s: float | None = None
    store_service: bool | None = None


@dataclass(slots=True)
class Done:
    """What was done: the processes that ran on, those that had ended and were started again, those that are new."""

    ran: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    started: list[Process] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Anything was started."""
        return bool(self.started)

    def sentence(self) -> str:
        """In words."""
        parts = [f"started {', '.join(self.again)} again (had ended)"] if self.again else []
        parts += [f"added {', '.join(self.added)}"] if self.added else []
        parts += [f"left {', '.join(self.ran)} alone"] if self.ran else []
        return "; ".join(parts)


def revive(cluster: Cluster, wanted: Wanted) -> tuple[Cluster, Done]:
    """Start what has ended and what is missing. Raises `UsageError` for options that need another cluster."""
    alive = cluster.alive()
    cluster = _agreed(cluster, wanted) if alive else _changed(cluster, wanted)
    names = _names(cluster, wanted.pnodes)
    done = Done(ran=[process.name for process in alive])
    try:
        if cluster.storage_address and (cluster.storage is None or not cluster.storage.alive()):
            again = cluster.storage is not None
            cluster = start_storage(cluster)
            assert cluster.storage is not None
            done.started.append(cluster.storage)
            (done.again if again else done.added).append("storage")
        if not cluster.orchestrator.alive():
            if not _free(cluster.address):
                _give_address_up(cluster, alive)
                cluster = replace(cluster, address=f"{cluster.address.rpartition(':')[0]}:0")
            cluster = start_orchestrator(cluster)
            done.started.append(cluster.orchestrator)
            done.again.append("orchestrator")
        known = {process.name: process for process in cluster.pnodes}
        for name in names:
            if name in known and known[name].alive():
                continue
            cluster = add_pnode(cluster, name)
            done.started.append(next(process for process in cluster.pnodes if process.name == name))
            (done.again if name in known else done.added).append(name)
    except BaseException:
        undo(done)
        raise
    cluster = replace(cluster, pnodes=tuple(process for process in cluster.pnodes if process.name in names))
    cluster.write()
    return cluster, done


def undo(done: Done) -> None:
    """End what was started; the record keeps naming it, as something that has ended."""
    with undisturbed():
        processes.stop(done.started)


def _agreed(cluster: Cluster, wanted: Wanted) -> Cluster:
    """A running cluster keeps its options. Raises `UsageError` for any other."""
    differing = [
        f"--{name} {have}"
        for name, given, have in (
            ("store", store_url(wanted.store) if wanted.store else None, cluster.store),
            ("threads", wanted.threads or None, cluster.threads),
            ("device", wanted.device, cluster.device),
            ("lease", wanted.lease_s, cluster.lease_s),
            ("store-service", wanted.store_service, bool(cluster.storage_address)),
        )
        if given not in (None, have)
    ]
    if wanted.bind not in (None, cluster.address) and not str(wanted.bind).endswith(":0"):
        differing.append(f"--bind {cluster.address}")
    if differing:
        raise UsageError(
            f"the cluster in {cluster.home} runs with {', '.join(differing)}",
            hint="leave the option out, or dcnr down first",
        )
    return cluster


def _changed(cluster: Cluster, wanted: Wanted) -> Cluster:
    """A cluster of which nothing runs takes every option."""
    return replace(
        cluster,
        store=store_url(wanted.store) if wanted.store else cluster.store,
        address=wanted.bind or cluster.address,
        threads=wanted.threads or cluster.threads,
        device=wanted.device or cluster.device,
        lease_s=wanted.lease_s or cluster.lease_s,
        storage_address=cluster.storage_address or (ANY_PORT if wanted.store_service else ""),
    )


def _names(cluster: Cluster, number: int | None) -> list[str]:
    """The PNodes that the cluster is to have: those that run, then those that ended, then new ones."""
    known = [process.name for process in cluster.pnodes]
    if number is None or number == len(known):
        return known
    running = [process.name for process in cluster.pnodes if process.alive()]
    if number < len(running):
        raise UsageError(
            f"{len(running)} PNodes run in {cluster.home}, and dcnr up ends none of them",
            hint=f"dcnr down, then dcnr up --pnodes {number}",
        )
    fresh = (f"p{index}" for index in range(1, number + len(known) + 1) if f"p{index}" not in known)
    chosen = [*running, *(name for name in known if name not in running), *fresh][:number]
    return sorted(chosen, key=lambda name: (known.index(name) if name in known else len(known), len(name), name))


def _free(address: str) -> bool:
    """Whether the orchestrator's address can be listened on again; a port 0 always can."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port == "0":
        return True
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError:
        return False
    return True


def _give_address_up(cluster: Cluster, alive: list[Process]) -> None:
    """Somebody else has the address. Raises `DCNRError` where PNodes that run look for the orchestrator there."""
    if alive:
        raise DCNRError(
            f"the orchestrator can't come back at {cluster.address}: another process listens there",
            hint=f"end that one, or dcnr down and dcnr up: {', '.join(process.name for process in alive)} would not "
            "find it elsewhere",
        )
