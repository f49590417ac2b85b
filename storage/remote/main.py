"""`dcnr-storage`: the storage service. Ends in good order on SIGTERM and SIGINT; a second signal ends it at once.

When it is ready it writes `<home>/storage.json` with its address and its URL for others.

Beyond loopback, or with --keys, it has a key pair in `<home>/storage` and lets in whom the cluster's allow-list names,
which it reads in the store it gives.

Exit codes: 0, 1 failed, 2 usage, 69 address or store can't be had, 130 Ctrl-C.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from wire.errors import DCNRError, UsageError

if TYPE_CHECKING:
    import structlog

    from storage.remote.service import StorageService
    from wire.bus import Bus

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
READY = "storage.json"


class HomeTakenError(DCNRError):
    """Another storage service uses this home folder."""

    exit_code = 69


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="dcnr-storage --help")


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = _Parser(prog="dcnr-storage", description="Gives a store to PNodes that reach neither its disk nor S3.")
    parser.add_argument(
        "--bind", default="tcp://127.0.0.1:7701", metavar="ADDRESS", help="where to listen (%(default)s)"
    )
    parser.add_argument("--advertise", action="append", default=[], metavar="ADDRESS",
                        help="where others reach it, if not at the bound address; may be repeated")  # fmt: skip
    parser.add_argument("--store", default="", metavar="URL", help="the store it stands on (<home>/store)")
    parser.add_argument("--home", type=Path, default=None, metavar="DIR", help="for its spool and the address file")
    parser.add_argument("--quota", action="append", default=[], metavar="[NETWORK=]SIZE",
                        help="the most that each network, or the one named, may store, such as 10g; shared=SIZE for "
                        "blobs; may be repeated (no limits)")  # fmt: skip
    parser.add_argument("--truth", action="store_true",
                        help="also take writes of what orchestrators write: registry, manifests, heads")  # fmt: skip
    parser.add_argument("--keys", action="store_true",
                        help="let in only admitted keys at a loopback address too; elsewhere it is so")  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=tuple(LEVELS))
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a storage service and exit."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run a storage service; the exit code. Every foreseen error is one line."""
    from wire.loop import run as run_loop

    try:
        return run_loop(_serve(make_parser().parse_args(argv)))
    except DCNRError as error:
        print(f"dcnr-storage: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


async def _serve(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    from storage.open import open_ranged_store
    from storage.remote import SERVICE_ID
    from storage.remote.admitted import follow, look
    from storage.remote.quota import parse_quotas
    from storage.remote.service import StorageService
    from storage.remote.spool import Spool
    from wire.admission import Admission
    from wire.endpoint import check_address
    from wire.keys import load_or_make
    from wire.zmq_bus import ZmqBus, is_loopback

    for address in arguments.advertise:
        check_address(address)
    quotas = parse_quotas(arguments.quota)
    home = _home(arguments.home)
    log = open_log(arguments.log_level)
    with _locked(home):
        store = open_ranged_store(arguments.store or (home / "store").as_uri())
        keyed = arguments.keys or not is_loopback(arguments.bind)
        keys = load_or_make(home / "storage") if keyed else None
        admission = Admission() if keyed else None
        bus = ZmqBus(SERVICE_ID, bind=arguments.bind, advertise=arguments.advertise, keys=keys, admission=admission)
        bus.on_refusal(lambda text: log.warning("refused", text=text))
        service = StorageService(
            bus, store, Spool(home / "spool"), log, quotas=quotas, truth=arguments.truth, version=version("dcnr")
        )
        seen = _watch_signals(service)
        following: asyncio.Task[None] | None = None
        try:
            if admission is not None:
                await look(store, admission)
                following = asyncio.create_task(follow(store, admission, log))
            await service.open()
            _announce(home, bus, store.url)
            log.info("serving", store=store.url, at=bus.me.addresses, url=_url(bus), pid=os.getpid())
            await service.run()
        finally:
            _withdraw(home)
            if following is not None:
                following.cancel()
                await asyncio.wait([following])
            await bus.close()
            await store.close()
    log.info("ended")
    return 130 if signal.SIGINT in seen else 0


def _home(given: Path | None) -> Path:
    if given is None:
        given = Path(os.environ.get("DCNR_HOME") or Path.home() / ".dcnr")
    home = given.expanduser().absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't use {home} as home: {error.strerror}", hint="give another --home") from error
    return home


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One storage service per home folder. Raises `HomeTakenError`."""
    with open(home / "storage.lock", "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HomeTakenError(
                f"another storage service runs in {home}", hint="end that one; or give another --home"
            ) from error
        yield


def _announce(home: Path, bus: Bus, store: str) -> None:
    """Write the address file, whole or not at all."""
    me = bus.me
    mark = {
        "address": me.addresses[0], "addresses": me.addresses, "pid": os.getpid(), "boot": me.boot, "store": store,
        "url": _url(bus),
    }  # fmt: skip
    temporary = home / f".{READY}.{os.getpid()}"
    temporary.write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
    temporary.replace(home / READY)


def _url(bus: Bus) -> str:
    """How others name it, with its public key."""
    from storage.open import service_url

    return service_url(bus.me.addresses[0], bus.me.key)


def _withdraw(home: Path) -> None:
    with contextlib.suppress(OSError):
        (home / READY).unlink()


def _watch_signals(service: StorageService) -> set[int]:
    """SIGTERM and SIGINT end in good order; the signals that came."""
    seen: set[int] = set()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if seen:
            os._exit(128 + number)
        seen.add(number)
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
    steps = [structlog.processors.add_log_level, stamp, structlog.processors.format_exc_info, render]
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return logger


if __name__ == "__main__":
    main()
