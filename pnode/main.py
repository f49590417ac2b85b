"""`dcnr-pnode`: one PNode. Ends in good order on SIGTERM and SIGINT, within `END_S`; a second signal ends it at once.

Exit codes: 0, 1 refused or failed, 2 usage, 69 address can't be had, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pnode.waiting import sleep_while_waiting
from wire.ending import end_in_time
from wire.errors import DCNRError, MisuseError, UsageError
from wire.loop import run as run_loop

if TYPE_CHECKING:
    from pnode.daemon import Daemon, Options
    from storage.open import Remote
    from wire.joining import Acquaintance
    from wire.keys import KeyPair

LEVELS = ("debug", "info", "warning", "error")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="dcnr-pnode --help")


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = _Parser(prog="dcnr-pnode", description="A PNode: computes the VNodes that an orchestrator places here.")
    parser.add_argument("--name", required=True, help="the PNode's id: 1 to 63 of a-z 0-9 - _")
    parser.add_argument("--orchestrator", default="", metavar="ADDRESS", help="such as tcp://127.0.0.1:7700")
    parser.add_argument("--join", default="", metavar="TOKEN",
                        help="join this token's cluster, with keys (-: read it from stdin); needed once")  # fmt: skip
    parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dial-only", action="store_true", help="listen nowhere: this machine can only dial out")
    parser.add_argument("--relay", default="", metavar="ADDRESS|off",
                        help="where to join others that can only dial; off: not at all (a free port)")  # fmt: skip
    parser.add_argument("--bind", default="", metavar="ADDRESS",
                        help="where to listen (tcp://127.0.0.1:0, and with keys tcp://0.0.0.0:0)")  # fmt: skip
    parser.add_argument("--advertise", action="append", default=[], metavar="ADDRESS",
                        help="where others reach this PNode, if not at the bound address; may be repeated")  # fmt: skip
    parser.add_argument("--device", action="append", default=[], metavar="cpu|cuda|cuda:N",
                        help="a device to compute on; may be repeated (cpu)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (all cores of this process)")
    parser.add_argument("--home", type=Path, default=None, metavar="DIR", help="for logs and fetched files")
    parser.add_argument("--store", default="", metavar="URL", help="use this store instead of the orchestrator's")
    parser.add_argument("--cache", type=Path, default=None, metavar="DIR",
                        help="for what a storage service gave; PNodes of a machine share it (a user's)")  # fmt: skip
    parser.add_argument("--cache-limit", type=float, default=20.0, metavar="GIB",
                        help="what is kept there; 0: nothing (%(default)g)")  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=LEVELS)
    parser.add_argument("--metrics-port", type=int, default=0, metavar="PORT", help="Prometheus metrics (off)")
    parser.add_argument("--wait-limit", type=float, default=900.0, metavar="SECONDS",
                        help="how long a run waits for a peer or the store (%(default)g)")  # fmt: skip
    parser.add_argument("--compute-limit", type=float, default=900.0, metavar="SECONDS",
                        help="how long one action may compute (%(default)g)")  # fmt: skip
    parser.add_argument("--away-limit", type=float, default=86_400.0, metavar="SECONDS",
                        help="how long a run waits while store or orchestrator is away (%(default)g)")  # fmt: skip
    parser.add_argument("--cut-memory", type=float, default=1024.0, metavar="MIB",
                        help="memory per run for checkpoints that the store does not have yet; two are always allowed "
                        "(%(default)g)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a PNode and exit. Everything is closed by then; taking torch apart would cost another second."""
    code = run(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a PNode; the exit code. Every foreseen error is one line."""
    sleep_while_waiting()
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        arguments = make_parser().parse_args(given)
        if arguments.join:
            run_loop(_join(arguments))
            _begin_anew(given)
        return run_loop(_serve(arguments))
    except DCNRError as error:
        print(f"dcnr-pnode: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


async def _join(arguments: argparse.Namespace) -> None:
    from wire.joining import join
    from wire.tokens import read_token

    token = read_token(sys.stdin.readline() if arguments.join == "-" else arguments.join)
    if token.role != "pnode":
        raise UsageError(f"this token is for a {token.role}", hint="dcnr node invite makes one for a PNode")
    home = _home(arguments)
    await join(home, token, arguments.name)


def _begin_anew(given: list[str]) -> NoReturn:
    """As a member, without the token: a command line can be read by everybody on the machine."""
    rest: list[str] = []
    skip = False
    for part in given:
        if not skip and part != "--join" and not part.startswith("--join="):
            rest.append(part)
        skip = part == "--join" and not skip
    os.execv(sys.executable, [sys.executable, "-m", "pnode.main", *rest, "--joined"])


def _home(arguments: argparse.Namespace) -> Path:
    import platformdirs

    from pnode.home import make_home

    given: Path | None = arguments.home
    if given is None:
        given = Path(os.environ.get("DCNR_HOME") or platformdirs.user_data_path("dcnr")) / "pnodes" / arguments.name
    make_home(given)
    return given


def _known(arguments: argparse.Namespace, home: Path) -> Acquaintance | None:
    """The cluster that this home folder has joined, if that is the one that is meant."""
    from wire.joining import remembered

    known = remembered(home)
    if arguments.joined or not arguments.orchestrator:
        if known is None:
            raise UsageError("which cluster?", hint="--join TOKEN, or --orchestrator ADDRESS")
    elif known is None or arguments.orchestrator not in known.addresses:
        return None
    if known.id != arguments.name:
        raise UsageError(f"{home} has joined as {known.id}, not as {arguments.name}", hint="give another --home")
    return known


def _devices(names: Sequence[str]) -> tuple[str, ...]:
    import torch

    found = tuple(dict.fromkeys(names)) or ("cpu",)
    for name in found:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise UsageError(f"there is no device {name!r}", hint="cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"device {name!r} is not supported", hint="cpu, cuda or cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"this machine has {torch.cuda.device_count()} CUDA devices, no {name}")
    return found


def _options(arguments: argparse.Namespace) -> Options:
    from importlib.metadata import version

    from pnode.daemon import Options
    from pnode.hub import Bounds
    from pnode.limits import check_order
    from pnode.measure import default_threads
    from pnode.relays import OFF
    from wire.endpoint import check_address
    from wire.ids import checked_id

    try:
        checked_id(arguments.name, "PNode id")
        for address in (*filter(None, [arguments.orchestrator]), *arguments.advertise):
            check_address(address)
        if arguments.relay and arguments.relay != OFF:
            check_address(arguments.relay)
    except MisuseError as error:
        raise UsageError(error.message, hint=error.hint) from error
    sizes = (arguments.cut_memory, arguments.cache_limit)
    if arguments.threads < 0 or not all(0 <= size < float("inf") for size in sizes):
        raise UsageError("--threads, --cut-memory and --cache-limit are 0 or more")
    for name in ("wait_limit", "compute_limit", "away_limit"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is above 0")
    bounds = Bounds(
        wait_s=arguments.wait_limit, compute_s=arguments.compute_limit, away_s=arguments.away_limit,
        stalled_s=min(Bounds().stalled_s, arguments.compute_limit / 2), cut_bytes=int(arguments.cut_memory * 2**20),
    )  # fmt: skip
    check_order(bounds)
    home = _home(arguments)
    known = _known(arguments, home)
    return Options(
        name=arguments.name, orchestrator=arguments.orchestrator, home=home, devices=_devices(arguments.device),
        threads=arguments.threads or default_threads(), store=arguments.store, version=version("dcnr"),
        bounds=bounds, told=known.peer() if known is not None else None,
        admission=known.admission() if known is not None else None,
    )  # fmt: skip


async def _serve(arguments: argparse.Namespace) -> int:
    from pnode.daemon import Daemon
    from pnode.logs import open_log
    from pnode.measure import tune_process
    from pnode.relays import Relays
    from storage.open import open_store
    from wire.keys import load
    from wire.zmq_bus import ZmqBus

    options = _options(arguments)
    tune_process()
    log = open_log(options.home, arguments.name, arguments.log_level)
    keys = load(options.home) if options.admission is not None else None
    if options.admission is not None and keys is None:
        raise UsageError(f"the key of {options.home} is gone", hint="join anew: delete keys/cluster.json there")
    bind = arguments.bind or (f"tcp://{'127.0.0.1' if keys is None else '0.0.0.0'}:0")
    if arguments.dial_only:
        bind = "" if keys is None else "tcp://127.0.0.1:0"  # for what a relay leads here
    bus = ZmqBus(
        options.name, bind=bind or None, advertise=arguments.advertise, keys=keys, admission=options.admission,
        reachable=not arguments.dial_only,
    )  # fmt: skip
    bus.on_refusal(lambda text: log.warning("refused", text=text))
    relays = Relays(bus, options.admission, log, bind=arguments.relay) if options.admission is not None else None
    remote = _remote(arguments, options.name, keys)
    daemon = Daemon(options, bus, log, open_store=lambda url: open_store(url, remote), relays=relays)
    if arguments.metrics_port:
        from pnode.metrics import serve

        serve(daemon, arguments.metrics_port)
    _watch_signals(daemon)
    log.info("starting", pid=os.getpid(), orchestrator=daemon.hub.orchestrator.addresses, threads=options.threads)
    await daemon.run()
    log.info("ended")
    return 0


def _remote(arguments: argparse.Namespace, name: str, keys: KeyPair | None) -> Remote:
    """How this PNode reaches a storage service: as itself, and what it fetches is kept on this machine."""
    import platformdirs

    from storage.open import Remote, keyed_bus
    from storage.remote.cache import BlobCache

    folder = arguments.cache or Path(os.environ.get("DCNR_HOME") or platformdirs.user_cache_path("dcnr")) / "cache"
    limit = int(arguments.cache_limit * 2**30)
    return Remote(lambda key: keyed_bus(name, keys, key), BlobCache(folder.absolute(), limit) if limit else None)


def _watch_signals(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def stop(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        end_in_time("dcnr-pnode")
        daemon.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)


if __name__ == "__main__":
    main()
