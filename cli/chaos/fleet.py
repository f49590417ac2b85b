"""The processes of a cluster that is to be hurt: each known by pid and birth, each behind a gate.

A seat is what stays of a process when it dies: its name, its gate, its port, its home. `cluster.json` in the home names
all that run, after each start, so that even when this process is killed, `dcnr down --home …` finds them.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cli import cluster as clusters
from cli import processes
from cli.chaos.gate import Gate, Peek
from cli.cluster import Cluster
from cli.processes import Process
from wire.errors import DCNRError

ORCHESTRATOR = "orchestrator"
STORE = "store"
PORTS = (20_000, 32_000)
"""Below those that the system gives to outgoing connections."""


class Launch(Protocol):
    """`processes.start`, or whatever starts a process in its place."""

    def __call__(self, name: str, module: str, arguments: Sequence[str], *, log: Path, threads: int) -> Process:
        """Start it."""


class StoreServer(Protocol):
    """A store's server that may be killed and started again."""

    host: str
    port: int

    def kill(self) -> None:
        """SIGKILL, and wait until it has gone."""

    def start(self) -> None:
        """Start it on the same port and data, and wait until it answers."""


@dataclass(slots=True)
class Seat:
    """The place of one process."""

    name: str
    gate: Gate
    port: int
    home: Path
    process: Process | None = None
    paused: bool = False
    starts: int = 0
    logged: int = 0
    """Size of its log when its process was started."""

    @property
    def alive(self) -> bool:
        """Its process runs, or is paused."""
        return self.process is not None and self.process.alive()

    @property
    def able(self) -> bool:
        """Its process runs and is not paused."""
        return self.alive and not self.paused


@dataclass(frozen=True, slots=True)
class Shape:
    """What a fleet is made of. `store`: URL with the S3 server's own address, or "" for a folder in the home."""

    home: Path
    pnodes: int
    lease_s: float = 10.0
    store: str = ""
    threads: int = 1
    seed: int = 0
    server: StoreServer | None = None
    disk: Path | None = None
    """A folder on a small file system of its own that may be filled to the last byte."""
    orchestrator_options: tuple[str, ...] = ()
    pnode_options: tuple[str, ...] = ()
    peek: Peek | None = None
    launch: Launch = processes.start


class Fleet:
    """See the module's docstring. Use: `await open()`, and in the end `await close()`, whatever happened."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.home = shape.home
        self.seats: dict[str, Seat] = {}
        self.clients: list[Process] = []
        self.ended: list[Process] = []
        """Processes that lost their seat to another and have to end by themselves."""
        self.started: list[Process] = []
        """All that ever had a seat."""
        self.store_gate: Gate | None = None
        self.store = shape.store or clusters.store_url(str(shape.home / "store"))
        self._draw = random.Random(f"{shape.seed}/gates")
        self._moves = 0

    # ------------------------------------------------------------ life

    async def open(self, said: Callable[[str], None] = lambda text: None) -> None:
        """Start everything and wait until the orchestrator listens. `said` is told what is being done."""
        self.home.mkdir(parents=True, exist_ok=True)
        server = self.shape.server
        if server is not None:
            self.store_gate = Gate(STORE, draw=self._draw, plain=True)
            self.store_gate.aim(server.host, server.port)
            await self.store_gate.open()
            own, other = f"{server.host}:{server.port}", f"127.0.0.1:{self.store_gate.port}"
            self.store = self.store.replace(own, other)
        for name in (ORCHESTRATOR, *(f"p{index + 1}" for index in range(self.shape.pnodes))):
            gate = Gate(name, draw=self._draw, peek=self.shape.peek)
            await gate.open()
            seat = self.seats[name] = Seat(name, gate, free_port(), self.home / name)
            gate.aim("127.0.0.1", seat.port)
        self.start(ORCHESTRATOR)
        said("starting the orchestrator")
        await self.listening(ORCHESTRATOR)
        for seat in self.pnodes():
            self.start(seat.name)
            said(f"starting {seat.name}")

    async def close(self, grace_s: float = 0.0) -> list[str]:
        """End every process (at once, unless given time) and all gates; what could not be ended."""
        left = [seat.process for seat in self.seats.values() if seat.process is not None]
        problem = ""
        try:
            await asyncio.shield(asyncio.to_thread(self._end, [*left, *self.clients, *self.ended], grace_s))
        except DCNRError as error:
            problem = error.message
        for gate in self.gates():
            await gate.close()
        Cluster.file(self.home).unlink(missing_ok=True)
        return [problem] if problem else []

    def _end(self, running: list[Process], grace_s: float) -> None:
        for process in running:
            process.signal(signal.SIGCONT)
        processes.stop(running, grace_s=grace_s)
        processes.collect(running)

    async def answers(self, name: str) -> bool:
        """Whether it takes connections now."""
        return await _answers(self.seats[name].port)

    async def listening(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until a process takes connections. Raises `DCNRError` if it ends instead, or at the deadline."""
        seat = self.seats[name]
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await _answers(seat.port):
            processes.reap()
            if seat.process is None or not seat.process.alive():
                last = seat.process.tail(3) if seat.process is not None else "it was killed"
                raise DCNRError(f"{name} ended while starting: {last}")
            if asyncio.get_running_loop().time() > deadline:
                raise DCNRError(f"{name} was not ready within {timeout_s:.0f} s: {seat.process.tail(3)}")
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------ who is there

    @property
    def orchestrator(self) -> Seat:
        """The orchestrator's seat."""
        return self.seats[ORCHESTRATOR]

    @property
    def direct(self) -> str:
        """The orchestrator's own address, past its gate: for the watcher, who is not to be hurt."""
        return f"tcp://127.0.0.1:{self.orchestrator.port}"

    def pnodes(self) -> list[Seat]:
        """The seats of all PNodes."""
        return [seat for name, seat in self.seats.items() if name != ORCHESTRATOR]

    def able(self) -> list[str]:
        """PNodes whose process runs and is not paused."""
        return [seat.name for seat in self.pnodes() if seat.able]

    def gates(self) -> list[Gate]:
        """All gates."""
        return [*(seat.gate for seat in self.seats.values()), *([self.store_gate] if self.store_gate else [])]

    # ------------------------------------------------------------ what can be done

    def start(self, name: str) -> None:
        """Start the process of a seat (again)."""
        seat, shape = self.seats[name], self.shape
        if seat.alive:
            return
        shared = ["--bind", f"tcp://127.0.0.1:{seat.port}", "--advertise", seat.gate.address, "--home", str(seat.home)]
        if name == ORCHESTRATOR:
            module = "orchestrator.main"
            arguments = [*shared, "--store", self.store, "--lease", f"{shape.lease_s:g}", *shape.orchestrator_options]
        else:
            module = "pnode.main"
            arguments = [
                *shared, "--name", name, "--orchestrator", self.orchestrator.gate.address,
                "--threads", str(shape.threads), *shape.pnode_options,
            ]  # fmt: skip
        log = self.home / "logs" / f"{name}.log"
        seat.logged = log.stat().st_size if log.exists() else 0
        seat.process = shape.launch(name, module, arguments, log=log, threads=shape.threads)
        self.started.append(seat.process)
        seat.paused = False
        seat.starts += 1
        self._remember()

    def kill(self, name: str, *, wipe: bool = False) -> None:
        """kill -9; with `wipe` its home is deleted too."""
        seat = self.seats[name]
        if seat.process is not None:
            seat.process.signal(signal.SIGKILL)
            processes.wait_until_gone([seat.process], 5.0)
        seat.paused = False
        if wipe:
            shutil.rmtree(seat.home, ignore_errors=True)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        seat = self.seats[name]
        if seat.process is not None and seat.alive:
            seat.process.signal(signal.SIGSTOP)
            seat.paused = True

    def go_on(self, name: str, process: Process | None = None) -> None:
        """SIGCONT, for the process that was paused (it may have lost its seat since)."""
        seat = self.seats[name]
        target = process or seat.process
        if target is not None:
            target.signal(signal.SIGCONT)
        if target is seat.process:
            seat.paused = False

    def replace(self, name: str) -> Process | None:
        """Give a seat to a new process with a home and a port of its own, while the old one still exists."""
        seat = self.seats[name]
        old, seat.process, seat.paused = seat.process, None, False
        self._moves += 1
        seat.port, seat.home = free_port(), self.home / f"{name}-{self._moves}"
        if old is not None:
            self.ended.append(old)
        self.start(name)
        seat.gate.aim("127.0.0.1", seat.port)
        return old

    async def move(self, name: str) -> None:
        """Give a seat whose process is dead another address: a new gate, a new port."""
        seat = self.seats[name]
        await seat.gate.close()
        seat.gate = Gate(name, draw=self._draw, peek=self.shape.peek)
        await seat.gate.open()
        seat.port = free_port()
        seat.gate.aim("127.0.0.1", seat.port)

    def joined(self, name: str) -> bool:
        """Whether the process of a PNode's seat has ever been a member, so that it knows the store."""
        process = self.seats[name].process
        if process is None:
            return False
        with Path(process.log).open("rb") as log:
            log.seek(self.seats[name].logged)
            return b"] registered" in log.read()

    def command(self, *arguments: str) -> Process:
        """Start a `dcnr` command that talks to the orchestrator through its gate."""
        name = f"dcnr-{len(self.clients) + 1}"
        everything = [*arguments, "--orchestrator", self.orchestrator.gate.address]
        log = self.home / "logs" / "commands.log"
        process = processes.start(name, "cli.main", everything, log=log, threads=1)
        self.clients = [client for client in self.clients if client.alive()] + [process]
        self._remember()
        return process

    def _remember(self) -> None:
        """So that all can be found if this process dies."""
        chief = self.orchestrator.process
        if chief is None:
            return
        others = [seat.process for seat in self.pnodes() if seat.process is not None]
        everyone = (*others, *(process for process in (*self.clients, *self.ended) if process.alive()))
        Cluster(self.home, self.store, chief, self.orchestrator.gate.address, everyone, self.shape.threads).write()


def free_port() -> int:
    """A port that nobody uses now and that the system gives to nobody by itself."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


async def _answers(port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
