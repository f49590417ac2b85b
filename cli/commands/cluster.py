"""`dcnr up`, `down`, and the two daemons in the foreground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption
from wire.ending import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cli.cluster import Cluster
    from cli.reviving import Done
    from cli.terminal import Terminal

AdvertiseOption = Annotated[
    list[str] | None, typer.Option(metavar="ADDRESS", help="Where others reach it, if not at the bound address.")
]
JOIN_TIMEOUT_S = 120.0
"""A PNode imports torch and measures itself first; on a busy machine that takes its time."""


def up(
    pnodes: Annotated[
        int | None,
        typer.Option("--pnodes", "-n", min=0, max=64, help="How many PNode processes; default: 3, or as there are."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Where checkpoints go: a folder, or s3://bucket/prefix?endpoint=…")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where the orchestrator listens; default: a port of loopback.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=0, help="Threads of each PNode; default or 0: cores / PNodes.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: cpu.")] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            "--lease", metavar="SECONDS", help="A PNode without a sign of life for so long is suspected; default: 10."
        ),
    ] = None,
    store_service: Annotated[
        bool | None,
        typer.Option("--store-service", help="PNodes reach the store through a storage service, not by themselves."),
    ] = None,
    home: HomeOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Start a cluster on this machine: an orchestrator and some PNodes.

    If there is one already, only what has ended is started again, the orchestrator at its old address; more --pnodes
    than there are adds the rest. What runs is left alone.
    """
    from cli.cluster import LEASE_S, Cluster, start, stop
    from cli.context import home_folder
    from cli.reviving import Wanted, revive, undo
    from cli.running import run
    from cli.terminal import Terminal
    from cli.units import plural

    terminal, folder = Terminal(output.form), home_folder(home)
    found = Cluster.read(folder)
    if found is not None:
        wanted = Wanted(pnodes, store, bind, threads, device, lease, store_service)
        granted = run(_incarnations(found, terminal))
        with terminal.waiting("starting what has ended"):
            cluster, done = revive(found, wanted)
            try:
                run(wait_until_joined(cluster, terminal, after=granted), grace_s=None)
            except BaseException:
                undo(done)
                raise
        _say_up(terminal, cluster, "up" if done.changed else "already up", done)
        return
    count = 3 if pnodes is None else pnodes
    with terminal.waiting(f"starting the orchestrator and {plural(count, 'PNode')}"):
        cluster = start(
            folder, pnodes=count, store=store or "", bind=bind or "tcp://127.0.0.1:0", threads=threads or 0,
            device=device or "cpu", lease_s=lease or LEASE_S, store_service=bool(store_service),
        )  # fmt: skip
        try:
            run(wait_until_joined(cluster, terminal), grace_s=None)
        except BaseException:
            stop(cluster)
            raise
    _say_up(terminal, cluster, "up")


async def _incarnations(cluster: Cluster, terminal: Terminal) -> dict[str, int]:
    """The PNodes that have ended, with the incarnation that the orchestrator still knows of each."""
    from cli.client import Client
    from wire.errors import DCNRError

    ended = [process.name for process in cluster.pnodes if not process.alive()]
    if not ended or not cluster.orchestrator.alive():
        return {}
    try:
        async with Client(cluster.address, terminal, timeout_s=5.0) as client:
            return {info.pnode: info.incarnation for info in await client.pnodes() if info.pnode in ended}
    except DCNRError:
        return {}


async def wait_until_joined(
    cluster: Cluster, terminal: Terminal, timeout_s: float = JOIN_TIMEOUT_S, after: Mapping[str, int] | None = None
) -> None:
    """Wait until all PNodes of a local cluster are members, those in `after` under a later incarnation.

    Raises `DCNRError` naming those that are not.
    """
    import asyncio
    import time

    from cli.client import Client
    from cli.processes import reap
    from wire.errors import DCNRError

    deadline = time.monotonic() + timeout_s
    async with Client(cluster.address, terminal) as client:
        while True:
            known = [info for info in await client.pnodes(quiet=True) if info.state == "alive"]
            alive = {info.pnode for info in known if info.incarnation > (after or {}).get(info.pnode, 0)}
            missing = [process for process in cluster.pnodes if process.name not in alive]
            if not missing:
                return
            reap()
            for process in missing:
                if not process.alive():
                    last = process.tail(3) or "it wrote nothing"
                    raise DCNRError(f"{process.name} ended while starting: {last}", hint=f"its log: {process.log}")
            if time.monotonic() > deadline:
                names = ", ".join(process.name for process in missing)
                raise DCNRError(f"{names} did not join within {timeout_s:.0f} s", hint=f"logs: {missing[0].log}")
            await asyncio.sleep(0.05)


def _say_up(terminal: Terminal, cluster: Cluster, word: str, done: Done | None = None) -> None:
    if terminal.json:
        record = {"home": str(cluster.home), **cluster.to_json()}
        lists = {"again": done.again, "added": done.added, "ran": done.ran} if done is not None else {}
        terminal.record({**record, **lists})
        return
    from cli.units import plural

    if done is not None and done.changed:
        terminal.line(done.sentence())
    names = " ".join(process.name for process in cluster.pnodes) or "no PNodes"
    terminal.line(
        f"{word}: orchestrator {cluster.address}, {names} ({plural(cluster.threads, 'thread')} each)", style="green"
    )
    through = f" through {cluster.storage_address.replace('tcp:', 'dcnr:')}" if cluster.storage else ""
    terminal.line(f"store {cluster.store}{through}, logs {cluster.home / 'logs'}")
    terminal.next("dcnr train mlp-digits", "dcnr status", "dcnr down")


def down(
    home: HomeOption = None,
    grace: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait before killing.")] = GRACE_S,
    output: OutputOption = Output.text,
) -> None:
    """End the local cluster; nothing of it stays but its store and logs."""
    from cli.cluster import Cluster, stop
    from cli.context import home_folder
    from cli.terminal import Terminal

    terminal, folder = Terminal(output.form), home_folder(home)
    cluster = Cluster.read(folder)
    if cluster is None:
        if terminal.json:
            terminal.record({"ended": [], "killed": []})
        terminal.line(f"no cluster is running in {folder}")
        return
    alive = cluster.alive()
    with terminal.waiting(f"ending {', '.join(process.name for process in alive)}"):
        killed = stop(cluster, grace_s=grace)
    if terminal.json:
        terminal.record({"ended": [p.name for p in alive], "killed": [p.name for p in killed]})
        return
    gone = [process.name for process in cluster.processes() if process not in alive]
    terminal.line(f"down: ended {', '.join(process.name for process in alive) or 'nothing, all had ended before'}")
    if gone and alive:
        terminal.warn(f"{', '.join(gone)} had ended before")
    if killed:
        terminal.warn(f"{', '.join(process.name for process in killed)} did not end when asked and was killed")
    terminal.next("dcnr up")


def orchestrator(
    bind: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "tcp://127.0.0.1:7700",
    advertise: AdvertiseOption = None,
    store: Annotated[str, typer.Option(metavar="URL", help="Where checkpoints go; default: store in the home.")] = "",
    lease: Annotated[
        float,
        typer.Option("--lease", metavar="SECONDS", help="A PNode without a sign of life for so long is suspected."),
    ] = 10.0,
    recover_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a session waits for room after a loss.")
    ] = 3600.0,
    advertise_store: Annotated[
        str,
        typer.Option(metavar="URL", help="Where PNodes and commands reach the store, if not there: dcnr://host:port."),
    ] = "",
    keys: Annotated[
        bool, typer.Option("--keys", help="Let in only admitted keys at a loopback address too; elsewhere it is so.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Run an orchestrator here, in the foreground; beyond loopback it prints how PNodes join."""
    from cli.cluster import store_url
    from cli.context import home_folder, parse_address
    from orchestrator.main import run as run_orchestrator
    from wire.zmq_bus import is_loopback

    folder = home_folder(home)
    address = parse_address(bind) if not bind.endswith(":0") else bind
    arguments = ["--bind", address, "--store", store_url(store or str(folder / "store")), "--home", str(folder)]
    arguments += ["--lease", f"{lease:g}", "--recover-limit", f"{recover_limit:g}", *_advertised(advertise)]
    arguments += ["--advertise-store", store_url(advertise_store)] if advertise_store else []
    if keys or not is_loopback(address):
        arguments.append("--keys")
    raise typer.Exit(_daemon(run_orchestrator, arguments))


def pnode(
    name: Annotated[str, typer.Option(help="This PNode's id in the cluster; default: the host's name.")] = "",
    orchestrator: OrchestratorOption = None,
    join: Annotated[
        str, typer.Option(metavar="TOKEN", help="Join this token's cluster; -: read it from standard input.")
    ] = "",
    dial_only: Annotated[bool, typer.Option("--dial-only", help="Listen nowhere; this machine can only dial.")] = False,
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. [default: a free port, of loopback without keys]")
    ] = "",
    advertise: AdvertiseOption = None,
    relay: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Where to join others that can only dial; off: don't. [default: any port]"
        ),
    ] = "",
    device: Annotated[list[str] | None, typer.Option(help="cpu, cuda or cuda:1; repeatable. [default: cpu]")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads to compute with; 0: all cores.")] = 0,
    store: Annotated[
        str, typer.Option(metavar="URL", help="Reach the store here, if not where the orchestrator does.")
    ] = "",
    wait_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a run waits for a peer or the store.")
    ] = 900.0,
    compute_limit: Annotated[float, typer.Option(metavar="SECONDS", help="How long one action may compute.")] = 900.0,
    away_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a run waits while store or orchestrator is away.")
    ] = 86_400.0,
    cut_memory: Annotated[
        float, typer.Option(metavar="MIB", help="Memory of a run for checkpoints that are not stored yet.")
    ] = 1024.0,
    metrics_port: Annotated[int, typer.Option(metavar="PORT", help="Prometheus metrics; 0: none.")] = 0,
    cache: Annotated[
        str, typer.Option(metavar="FOLDER", help="For what a storage service gave; default: cache in the home.")
    ] = "",
    cache_limit: Annotated[float, typer.Option(min=0, metavar="GIB", help="What is kept there; 0: nothing.")] = 20.0,
    home: HomeOption = None,
) -> None:
    """Run a PNode here, in the foreground."""
    import re
    import socket

    from cli.cluster import available_cores, store_url
    from cli.context import home_folder, orchestrator_address
    from pnode.main import run as run_pnode
    from wire.joining import remembered

    folder = home_folder(home)
    name = name or re.sub(r"[^a-z0-9_-]+", "-", socket.gethostname().split(".")[0].lower()).strip("-") or "pnode"
    arguments = ["--name", name]
    if join:
        arguments += ["--join", join]
    elif orchestrator or remembered(folder / name) is None:
        arguments += ["--orchestrator", orchestrator_address(orchestrator, folder)]
    arguments += ["--bind", bind] if bind else []
    arguments += ["--dial-only"] if dial_only else []
    arguments += ["--relay", relay] if relay else []
    arguments += ["--threads", str(threads or available_cores()), "--home", str(folder / name)]
    arguments += _advertised(advertise)
    arguments += ["--store", store_url(store)] if store else []
    limits = {"--wait-limit": wait_limit, "--compute-limit": compute_limit, "--away-limit": away_limit}
    arguments += ["--cache", cache or str(folder / "cache")]
    sizes = {"--cut-memory": cut_memory, "--cache-limit": cache_limit, "--metrics-port": metrics_port}
    for option, value in {**limits, **sizes}.items():
        arguments += [option, f"{value:g}"]
    arguments += [part for one in device or ("cpu",) for part in ("--device", one)]
    raise typer.Exit(_daemon(run_pnode, arguments))


def storage(
    bind: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "tcp://127.0.0.1:7701",
    advertise: AdvertiseOption = None,
    store: Annotated[
        str, typer.Option(metavar="URL", help="The store it gives: a folder or s3://…; default: store in the home.")
    ] = "",
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NETWORK=]SIZE",
            help="The most that each network, or the one named, may store: 10g; shared=SIZE for blobs; repeatable.",
        ),
    ] = None,
    truth: Annotated[
        bool, typer.Option("--truth", help="Also take writes of what orchestrators write: registry, manifests, heads.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="Let in only admitted keys at a loopback address too; elsewhere it is so.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Give a store to PNodes that reach neither its disk nor S3, in the foreground."""
    from cli.cluster import store_url
    from cli.context import home_folder, parse_address
    from storage.remote.main import run as run_storage

    folder = home_folder(home)
    address = parse_address(bind) if not bind.endswith(":0") else bind
    arguments = ["--bind", address, "--store", store_url(store or str(folder / "store")), "--home", str(folder)]
    arguments += [*_advertised(advertise), *(["--truth"] if truth else []), *(["--keys"] if keys else [])]
    arguments += [part for one in quota or () for part in ("--quota", one)]
    raise typer.Exit(_daemon(run_storage, arguments))


def _advertised(addresses: list[str] | None) -> list[str]:
    return [part for address in addresses or () for part in ("--advertise", address)]


def _daemon(serve: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Hand this process over to a daemon, with its own handling of signals."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return serve(arguments)
