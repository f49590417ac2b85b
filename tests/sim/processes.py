"""The machines of the world and the processes on them: start, kill -9, SIGSTOP and SIGCONT, restart, a good end.

A process is the shipped service or daemon with a bus, a log and a view of the store of its own. A machine keeps its
disk from one process to the next, until it is wiped, and its clock may be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import sqlite3
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from orchestrator.service import Service
from pnode.compute_thread import ComputeThread
from pnode.daemon import Daemon, Options
from pnode.hub import Bounds
from tests.sim.compute import SimCompute
from tests.sim.life import Life, Stand
from tests.sim.network import WorldBus, nobody
from tests.sim.store import URL, Handle
from wire.errors import DCNRError
from wire.messages import Profile

if TYPE_CHECKING:
    from tests.sim.world import World

ORCHESTRATOR = "orchestrator"
RESTART_S = 3.0
"""After so long a process that ended by itself is started again, as a service manager does."""

DEATH = re.compile("ThreadDiedError|ComputeDeadError")
"""What a compute thread that is killed leaves in the log: that is foreseen."""

torch.set_num_threads(1)


class Log:
    """A process's log: for the trace; what nobody foresaw is an error of the run."""

    def __init__(self, world: World, name: str) -> None:
        self._recorder = world.recorder
        self._name = name

    def _line(self, level: str, text: str, fields: dict[str, Any]) -> None:
        if self._recorder.trace is not None:
            told = " ".join(f"{key}={value}" for key, value in fields.items() if key != "exc_info")
            self._recorder.say(f"{self._name:14} {level}: {text} {told}"[:1500])

    def debug(self, text: str, /, **fields: Any) -> None:
        """See structlog."""
        self._line("debug", text, fields)

    def info(self, text: str, /, **fields: Any) -> None:
        """See structlog."""
        self._line("info", text, fields)

    def warning(self, text: str, /, **fields: Any) -> None:
        """See structlog."""
        self._line("warning", text, fields)
        if fields.get("exc_info"):
            self._recorder.error(f"{self._name}: {text} {fields}")

    def error(self, text: str, /, **fields: Any) -> None:
        """See structlog."""
        self._line("error", text, fields)
        if text in ("core", "compute") and not DEATH.search(str(fields)):
            self._recorder.error(f"{self._name}: {text} {fields}")

    def exception(self, text: str, /, **fields: Any) -> None:
        """See structlog."""
        import traceback

        self._recorder.error(f"{self._name}: {text} {fields}\n{traceback.format_exc(limit=-6)}")


@dataclass(slots=True)
class Machine:
    """A place for one process at a time. `wanted`: it is to run, so it is started again when it ends by itself."""

    name: str
    id: str
    kind: str
    home: Path
    life: Life | None = None
    bus: WorldBus | None = None
    body: Service | Daemon | None = None
    computes: list[SimCompute] = field(default_factory=list)
    clock_off_s: float = 0.0
    wanted: bool = False
    ended: str = ""
    slowness: float = 1.0

    @property
    def runs(self) -> bool:
        """A process lives here, frozen or not."""
        return self.life is not None and not self.life.over

    @property
    def frozen(self) -> bool:
        """It stands still."""
        return self.life is not None and self.life.stand is Stand.FROZEN

    @property
    def address(self) -> str:
        """Where its process listens."""
        return f"tcp://{self.name}:7700"


class Machines:
    """Starts and ends the processes of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pick = random.Random(f"machines/{world.seed}")
        self._context = nobody()
        self._serial = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.by_name: dict[str, Machine] = {}
        self.lives: list[Life] = []

    def add(self, name: str, kind: str, id_: str = "") -> Machine:
        """A machine without a process."""
        machine = Machine(name, id_ or name, kind, self._world.folder / name)
        self.by_name[name] = machine
        return machine

    # ------------------------------------------------------------ what happens to processes

    def start(self, machine: Machine) -> None:
        """A new process, with a new boot."""
        if machine.runs or self._world.over:
            return
        world = self._world
        self._serial += 1
        boot = int(self.wall(machine)) * 1000 + self._serial
        life = machine.life = Life(machine.id, boot, machine.name)
        self.lives.append(life)
        machine.bus = WorldBus(world.network, life, "" if machine.kind == "client" else machine.address)
        machine.computes, machine.ended = [], ""
        machine.home.mkdir(parents=True, exist_ok=True)
        world.recorder.process(life, "start")
        world.recorder.say(f"{machine.name:14} starts, boot {boot}")
        main = {"orchestrator": self._orchestrator, "pnode": self._pnode, "client": world.client.run}[machine.kind]
        self._spawn(self._main(machine, life, main(machine)), life)

    def kill(self, machine: Machine) -> None:
        """kill -9: nothing of it runs any more, and nobody is told."""
        life = machine.life
        if life is None or life.over:
            return
        life.stand = Stand.OVER
        self._gone(machine)
        self._world.recorder.process(life, "kill")
        self._world.recorder.say(f"{machine.name:14} is killed")

    def freeze(self, machine: Machine) -> None:
        """SIGSTOP."""
        if machine.life is not None and machine.life.stand is Stand.RUNS:
            machine.life.stand = Stand.FROZEN
            self._world.recorder.process(machine.life, "freeze")
            self._world.recorder.say(f"{machine.name:14} stands still")

    def thaw(self, machine: Machine) -> None:
        """SIGCONT."""
        if machine.life is not None and machine.life.stand is Stand.FROZEN:
            machine.life.stand = Stand.RUNS
            self._world.recorder.process(machine.life, "thaw")
            self._world.recorder.say(f"{machine.name:14} goes on")
            self._world.loop.thaw(machine.life)

    def stop(self, machine: Machine) -> None:
        """SIGTERM."""
        if machine.runs and machine.body is not None and machine.life is not None:
            self._world.recorder.say(f"{machine.name:14} is asked to end")
            self._world.loop.call_soon(machine.body.stop, context=machine.life.context)

    def wipe(self, machine: Machine) -> None:
        """Its disk is empty."""
        shutil.rmtree(machine.home, ignore_errors=True)

    def wall(self, machine: Machine) -> float:
        """What its clock shows."""
        return 1_000_000.0 + self._world.loop.time() + machine.clock_off_s

    # ------------------------------------------------------------ inside

    def _spawn(self, work: Coroutine[Any, Any, None], life: Life) -> None:
        context = life.context.copy()
        task = self._world.loop.create_task(work, context=context)
        self._tasks.add(task)

    async def _main(self, machine: Machine, life: Life, work: Coroutine[Any, Any, None]) -> None:
        """A process from its first line to its exit code."""
        detail = ""
        try:
            await work
        except DCNRError as error:
            detail = str(error)
        except asyncio.CancelledError:
            return
        except Exception as error:
            import traceback

            detail = f"{type(error).__name__}: {error}"
            self._world.recorder.error(f"{machine.name} ended with {detail}\n{traceback.format_exc(limit=-6)}")
        if life.over:
            return
        life.stand = Stand.OVER
        self._gone(machine)
        machine.ended = detail
        self._world.recorder.process(life, "exit", detail)
        self._world.recorder.say(f"{machine.name:14} ended: {detail or 'in good order'}")
        final = "superseded" in detail or "changed by another orchestrator" in detail or "already held" in detail
        if machine.wanted and not final:
            self._world.loop.call_later(RESTART_S, self._again, machine, context=self._context)

    def _again(self, machine: Machine) -> None:
        if machine.wanted:
            self.start(machine)

    def _gone(self, machine: Machine) -> None:
        """What the system takes back: connections, and the locks of an open database."""
        assert machine.bus is not None
        self._world.network.crash(machine.bus)
        if isinstance(machine.body, Service) and hasattr(machine.body, "registry"):
            with contextlib.suppress(sqlite3.Error):
                machine.body.registry._db.rollback()
                machine.body.registry._db.close()
        machine.body = None

    # ------------------------------------------------------------ the programs

    async def _orchestrator(self, machine: Machine) -> None:
        world, bus = self._world, machine.bus
        assert bus is not None
        store = Handle(world.store)
        service = Service(
            bus, store, machine.home, cast(Any, Log(world, machine.name)), lease_s=world.plan.lease_s, version="sim",
            clock=world.loop.time, wall=lambda: self.wall(machine),
        )  # fmt: skip
        machine.body = service
        try:
            await service.open()
            await service.run()
        finally:
            await bus.close()

    async def _pnode(self, machine: Machine) -> None:
        world, bus = self._world, machine.bus
        assert bus is not None

        def make_compute(name: str) -> ComputeThread:
            compute = SimCompute(name, world.loop, self._pick, world.plan.compute_s, options.bounds.stalled_s)
            compute.slowness = machine.slowness
            machine.computes.append(compute)
            return cast(ComputeThread, compute)

        options = Options(
            name=machine.id, orchestrator=f"tcp://{ORCHESTRATOR}:7700", home=machine.home, version="sim",
            store=URL if world.plan.store_given else "",
            bounds=Bounds(compute_s=world.plan.compute_limit_s, stalled_s=world.plan.compute_limit_s / 2),
        )  # fmt: skip
        profile = Profile(
            host=machine.name, device="cpu", threads=1, flops=1e9 / machine.slowness, memory_bytes=1 << 30,
            link_bytes_s=1e8, link_latency_s=1e-4, torch="sim", cpu="sim", version="sim",
        )  # fmt: skip
        daemon = Daemon(
            options, bus, cast(Any, Log(world, machine.name)), clock=world.loop.time, open_store=self._open_store,
            make_compute=make_compute, profile=profile,
        )  # fmt: skip
        machine.body = daemon
        await daemon.run()

    def _open_store(self, url: str) -> Handle:
        return Handle(self._world.store)
