"""`dcnr-orchestrator`: the orchestrator of a cluster. Ends in good order on SIGTERM and SIGINT, within `END_S`.

A second signal ends it at once. When it is ready it writes `<home>/orchestrator.json` with its address. It also ends
when its home folder is removed, so that a cluster whose folder is gone leaves no process behind.

Exit codes: 0, 1 superseded or failed, 2 usage, 69 address or store can't be had, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from orchestrator.lifecycle import AWAY_S, RECOVER_S
from wire.ending import end_in_time
from wire.errors import DCNRError, UsageError

if TYPE_CHECKING:
    import structlog

    from orchestrator.guests import Guests
    from orchestrator.service import Service
    from wire.keys import KeyPair
    from wire.messages import Admitted

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
NAME = "orchestrator"
READY = "orchestrator.json"
HOME_CHECK_S = 2.0
TOKEN_S = 86_400.0
LOCK_S = 2.0
"""So long is another's lock waited for: one that was killed keeps it until the system has ended its last thread."""


class HomeTakenError(DCNRError):
    """Another orchestrator uses this home folder."""

    exit_code = 69


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="dcnr-orchestrator --help")


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = _Parser(prog="dcnr-orchestrator", description="Knows a cluster: its PNodes, networks and sessions.")
    parser.add_argument(
        "--bind", default="tcp://127.0.0.1:7700", metavar="ADDRESS", help="where to listen (%(default)s)"
    )
    parser.add_argument("--advertise", action="append", default=[], metavar="ADDRESS",
                        help="where others reach it, if not at the bound address; may be repeated")  # fmt: skip
    parser.add_argument("--store", default="", metavar="URL", help="the cluster's store (<home>/store)")
    parser.add_argument("--advertise-store", default="", metavar="URL",
                        help="where PNodes and commands reach the store, if not at --store: dcnr://…")  # fmt: skip
    parser.add_argument("--home", type=Path, default=None, metavar="DIR", help="for the registry and the address file")
    parser.add_argument("--lease", type=float, default=10.0, metavar="SECONDS",
                        help="a PNode without a sign of life for so long is suspected (%(default)g)")  # fmt: skip
    parser.add_argument("--recover-limit", type=float, default=RECOVER_S, metavar="SECONDS",
                        help="how long a session waits for room after a loss (%(default)g)")  # fmt: skip
    parser.add_argument("--keys", action="store_true",
                        help="let in only who has an admitted key, at a loopback address too; makes the keys, and "
                        "prints the command that joins a PNode")  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=tuple(LEVELS))
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run an orchestrator and exit."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run an orchestrator; the exit code. Every foreseen error is one line."""
    try:
        return asyncio.run(_serve(make_parser().parse_args(argv)))
    except DCNRError as error:
        print(f"dcnr-orchestrator: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


async def _serve(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    from orchestrator.guests import Guests
    from orchestrator.service import Service
    from storage.open import open_store
    from wire.admission import Admission
    from wire.endpoint import check_address
    from wire.zmq_bus import ZmqBus, is_loopback

    check_limits(arguments.lease, arguments.recover_limit)
    for address in arguments.advertise:
        check_address(address)
    home = _home(arguments.home)
    log = open_log(arguments.log_level)
    with _lock_file(home) as lock:
        await _lock(home, lock)
        store = open_store(arguments.store or (home / "store").as_uri())
        if arguments.advertise_store:
            open_store(arguments.advertise_store)  # it can be one
        keyed = arguments.keys or not is_loopback(arguments.bind)
        keys, clients = _keys(home, make=arguments.keys) if keyed else (None, [])
        admission = Admission() if keys is not None else None
        bus = ZmqBus(NAME, bind=arguments.bind, advertise=arguments.advertise, keys=keys, admission=admission)
        bus.on_refusal(lambda text: log.warning("refused", text=text))
        service = Service(
            bus, store, home, log, lease_s=arguments.lease, recover_s=arguments.recover_limit, version=version("dcnr"),
            store_url=arguments.advertise_store,
        )  # fmt: skip
        if keys is not None and admission is not None:
            service.guests = Guests(service, admission, keys, clients)
        signals = _watch_signals(service)
        try:
            await _load_what_is_needed(service)
            await service.open()
            mark = _announce(home, service)
            if service.guests is not None:
                await _invite(service.guests)
            watch = asyncio.ensure_future(_watch_home(home, mark, service))
            try:
                await service.run()
            finally:
                watch.cancel()
                _withdraw(home, mark)
        finally:
            await bus.close()
            await store.close()
    log.info("ended")
    return 130 if signal.SIGINT in signals else 0


async def _load_what_is_needed(service: Service) -> None:
    """Before the address is bound: it stalls this process for seconds, in which nobody would be answered."""
    from orchestrator.catalog import load_reader
    from storage.store import StoreError

    with contextlib.suppress(StoreError):  # `open` tells what is wrong with the store
        if await service.truth.any_networks():
            await asyncio.to_thread(load_reader)


def check_limits(lease_s: float, recover_s: float) -> None:
    """Raises UsageError for a limit out of its bounds, or below what has to happen within it."""
    if not 0.5 <= lease_s <= 3600:
        raise UsageError(f"--lease is {lease_s:g}, but is 0.5 to 3600 seconds")
    if not 2 * lease_s <= recover_s <= AWAY_S:
        raise UsageError(
            f"--recover-limit is {recover_s:g} s, but is two leases ({2 * lease_s:g} s) to {AWAY_S:g} s: "
            "a PNode that restarts needs that long to be known again",
            hint="raise --recover-limit or lower --lease",
        )


def _keys(home: Path, *, make: bool) -> tuple[KeyPair | None, list[Admitted]]:
    """This orchestrator's keys, if it is to have any, and the client of the same home folder."""
    from wire.joining import client_id
    from wire.keys import load, load_or_make
    from wire.messages import Admitted
    from wire.roles import CLIENT

    keys = load_or_make(home) if make else load(home)
    if keys is None:
        return None, []
    client = load_or_make(home / "client").public
    return keys, [Admitted(client, client_id(client), CLIENT)]


async def _invite(guests: Guests) -> None:
    """Print how a PNode joins: a secret, so it goes to whoever started this, and into no log."""
    invitation = await guests.invite("pnode", -1, TOKEN_S)
    print(f"dcnr pnode --join {invitation.token}", flush=True)


def _home(given: Path | None) -> Path:
    if given is None:
        given = Path(os.environ.get("DCNR_HOME") or Path.home() / ".dcnr")
    home = given.expanduser().absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't use {home} as home: {error.strerror}", hint="give another --home") from error
    return home


async def _lock(home: Path, file: IO[bytes]) -> None:
    """One orchestrator per home folder. Raises `HomeTakenError`."""
    deadline = time.monotonic() + LOCK_S
    while not _taken(file):
        if time.monotonic() > deadline:
            raise HomeTakenError(
                f"another orchestrator runs in {home}", hint="dcnr down ends it; or give another --home"
            )
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def _lock_file(home: Path) -> Iterator[IO[bytes]]:
    with open(home / "orchestrator.lock", "a+b") as file:
        yield file


def _taken(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _announce(home: Path, service: Service) -> dict[str, Any]:
    """Write the address file, whole or not at all; what was written."""
    me = service.bus.me
    mark = {
        "address": me.addresses[0] if me.addresses else "",
        "addresses": me.addresses,
        "pid": os.getpid(),
        "boot": me.boot,
        "key": me.key,
        "term": service.term,
        "cluster": service.truth.term.cluster,
        "store": service.store.url,
        "version": service.version,
        "started": service.started,
    }
    temporary = home / f".{READY}.{os.getpid()}"
    temporary.write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
    temporary.replace(home / READY)
    return mark


def _withdraw(home: Path, mark: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, ValueError):
        if json.loads((home / READY).read_text(encoding="utf-8")).get("boot") == mark["boot"]:
            (home / READY).unlink()


async def _watch_home(home: Path, mark: dict[str, Any], service: Service) -> None:
    """End with the home folder: its registry is there, and nobody could find this process any more."""
    inode = _inode(home)
    while True:
        await asyncio.sleep(HOME_CHECK_S)
        if _inode(home) != inode:
            service.logger.error("home folder is gone, ending", home=str(home), boot=mark["boot"])
            service.stop()
            return


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except OSError:
        return -1


def _watch_signals(service: Service) -> set[int]:
    """SIGTERM and SIGINT end in good order; the signals that came."""
    seen: set[int] = set()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if seen:
            os._exit(128 + number)
        seen.add(number)
        end_in_time("dcnr-orchestrator")
        service.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return seen


def open_log(level: str) -> structlog.typing.FilteringBoundLogger:
    """Lines on stderr: plain on a terminal, JSON elsewhere."""
    import structlog

    on_terminal = sys.stderr.isatty()
    render: Any = structlog.dev.ConsoleRenderer() if on_terminal else structlog.processors.JSONRenderer()
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if on_terminal else "iso", utc=not on_terminal)
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return logger


if __name__ == "__main__":
    main()
