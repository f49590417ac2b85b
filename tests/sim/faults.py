"""Faults: drawn from a seed beforehand, done to the world at their time, and all undone in the end.

Some come at a time, others when something is seen (a Prepare is handed over, a head is written, an update is applied):
those strike in the middle of what they are to disturb. `@` stands for the process that was seen doing it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pnode.remembered import memory_file
from tests.sim.history import Computed, Delivered, Event, Process, Wrote
from tests.sim.network import Loss, nobody
from tests.sim.plan import LOSABLE, Planned
from tests.sim.processes import ORCHESTRATOR, Machine
from tests.sim.store import StoreFault
from wire.sim import Hints, Line

if TYPE_CHECKING:
    from tests.sim.world import World

TWIN_S = 6.0


class Injector:
    """Does the planned faults to a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pick = random.Random(f"faults/{world.seed}")
        self._context = nobody()
        self._armed: list[tuple[Planned, int]] = []
        self._lines: dict[int, tuple[list[tuple[str, str]], dict[str, Any]]] = {}
        self._count = 0
        self._healed = False
        self._overdue: list[Machine] = []
        self.healed_s = world.plan.healed_s
        world.recorder.watch.append(self._see)

    # ------------------------------------------------------------ when

    def begin(self) -> None:
        """Set the times."""
        self._world.network.losses.extend(replace(loss) for loss in self._world.plan.losses)
        for planned in self._world.plan.faults:
            self._later(planned.at, self._due, planned)
        if self._world.plan.faults:
            self._later(self.healed_s, self.heal)

    def _later(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        self._world.loop.call_later(max(0.0, delay_s), what, *args, context=self._context)

    def _due(self, planned: Planned) -> None:
        if planned.on:
            self._armed.append((planned, planned.nth))
        else:
            self._inject(planned)

    def _see(self, event: Event) -> None:
        if not self._armed:
            return
        name = self._name(event)
        if not name:
            return
        left: list[tuple[Planned, int]] = []
        for planned, count in self._armed:
            if planned.on not in name:
                left.append((planned, count))
            elif count > 1:
                left.append((planned, count - 1))
            else:
                who = event.by if isinstance(event, Wrote) else getattr(event, "dst", "") or getattr(event, "pnode", "")
                found = replace(planned, on="", where=who if planned.where == "@" else planned.where)
                self._later(planned.delay, self._inject, found)
        self._armed = left

    @staticmethod
    def _name(event: Event) -> str:
        match event:
            case Delivered(kind=kind):
                return f"Delivered {kind}"
            case Wrote(key=key):
                return f"Wrote {key}"
            case Computed():
                return "Computed"
            case Process(what=what):
                return f"Process {what}"
        return ""

    # ------------------------------------------------------------ what

    def _inject(self, planned: Planned) -> None:
        """Do it, if it can be done to the world as it is now."""
        if self._healed or self._world.over:
            return
        family = planned.kind.partition("_")[0]
        if planned.kind in LINES:
            self._line(planned)
        elif family == "store":
            self._store(planned)
        else:
            do = getattr(self, f"_{planned.kind}")
            do(planned)

    def _tell(self, planned: Planned, where: str, seconds: float | None = None) -> None:
        self._world.recorder.fault(planned.kind, where, planned.seconds if seconds is None else seconds)
        self._world.recorder.say(f"FAULT {planned.kind} at {where} for {planned.seconds:.2f} s {planned.amount or ''}")

    def _machine(self, name: str, machines: list[Machine], *, running: bool = True) -> Machine | None:
        """The machine of that name or of the process of that id, or one that the seed draws."""
        found = [m for m in machines if m.runs == running and not (running and m.frozen)]
        named = [m for m in found if name in (m.name, m.id)]
        if name and named:
            return named[0]
        return self._pick.choice(found) if found else None

    # ------------------------------------------------------------ lines

    def _line(self, planned: Planned) -> None:
        world = self._world
        names = [m.name for m in [*world.orchestrators, *world.pnodes, world.operator] if m.runs]
        if len(names) < 2:
            return
        src = planned.where if planned.where in names else self._pick.choice(names)
        others = [name for name in names if name != src]
        dst = planned.to if planned.to in others else self._pick.choice(others)
        pairs = [(src, dst), (dst, src)]
        if planned.kind in ("partition_one_way", "half_open"):
            pairs = [(src, dst)]
        elif planned.kind == "isolate":
            pairs = [pair for name in others for pair in ((src, name), (name, src))]
            dst = "all"
        if planned.kind == "lose":
            kind = self._pick.choice(LOSABLE)
            world.network.losses.append(Loss(kind, 1 + int(planned.amount > 0.8), int(planned.amount * 3)))
            return
        if planned.kind == "reconnect":
            for pair in pairs:
                world.network.reconnect(*pair)
            self._tell(planned, f"{src}<>{dst}")
            return
        self._count += 1
        number = self._count
        self._lines[number] = (pairs, _change(planned))
        self._tell(planned, f"{src}>{dst}")
        self._apply_lines()
        self._later(planned.seconds, self._undo_line, number, planned.kind == "half_open")

    def _undo_line(self, number: int, reconnects: bool = False) -> None:
        pairs, _ = self._lines.pop(number, ([], {}))
        self._apply_lines()
        for src, dst in pairs if reconnects else []:
            self._world.network.reconnect(src, dst)
            self._world.network.reconnect(dst, src)

    def _apply_lines(self) -> None:
        network = self._world.network
        lines: dict[tuple[str, str], Line] = {}
        for pairs, change in self._lines.values():
            for pair in pairs:
                lines[pair] = replace(lines.get(pair, self._world.plan.line), **change)
        network.set_lines(lines)

    def _false_hint(self, planned: Planned) -> None:
        """Connections of a process close, though it lives and nothing is lost: all others are told, or some."""
        machine = self._machine(planned.where, [*self._world.pnodes, *self._world.orchestrators])
        if machine is not None and machine.bus is not None:
            self._tell(planned, machine.name)
            self._world.network.close_connections(machine.bus, Hints(planned.amount, planned.seconds))

    # ------------------------------------------------------------ processes

    def _pause(self, planned: Planned, machines: list[Machine]) -> None:
        machine = self._machine(planned.where, machines)
        if machine is not None:
            self._tell(planned, machine.name)
            self._world.machines.freeze(machine)
            self._later(planned.seconds, self._thaw, machine, machine.life)

    def _thaw(self, machine: Machine, life: object) -> None:
        if machine.life is life:
            self._world.machines.thaw(machine)

    def _pause_short(self, planned: Planned) -> None:
        self._pause(planned, self._world.pnodes)

    _pause_long = _pause_short

    def _pause_orchestrator(self, planned: Planned) -> None:
        self._pause(planned, self._world.orchestrators)

    def _kill(self, planned: Planned, machines: list[Machine], *, wipe: bool = False) -> Machine | None:
        machine = self._machine(planned.where, machines)
        if machine is None:
            return None
        self._tell(planned, machine.name)
        self._world.machines.kill(machine)
        if wipe:
            self._world.machines.wipe(machine)
        self._start_later(machine, planned.seconds)
        return machine

    def _start_later(self, machine: Machine, seconds: float) -> None:
        self._overdue.append(machine)
        self._later(seconds, self._start, machine)

    def _start(self, machine: Machine) -> None:
        if machine in self._overdue:
            self._overdue.remove(machine)
            machine.wanted = True
            self._world.machines.start(machine)

    def _kill_pnode(self, planned: Planned) -> None:
        self._kill(planned, self._world.pnodes)

    _restart_pnode = _kill_pnode

    def _double(self, planned: Planned) -> None:
        """One is lost; and another, while its VNodes are prepared anew."""
        if self._kill(planned, self._world.pnodes) is not None:
            again = Planned("kill_pnode", 0, "@", seconds=planned.amount, on="Delivered Prepare", delay=planned.delay)
            self._armed.append((again, 1))

    def _stop_pnode(self, planned: Planned) -> None:
        self._stop(planned, self._world.pnodes)

    def _stop(self, planned: Planned, machines: list[Machine]) -> None:
        machine = self._machine(planned.where, machines)
        if machine is not None:
            self._tell(planned, machine.name)
            machine.wanted = False
            self._world.machines.stop(machine)
            self._start_later(machine, planned.seconds)

    def _second_pnode(self, planned: Planned) -> None:
        """Somebody starts a PNode under a name that is taken; it ends by itself, or is ended after a while."""
        held = self._machine(planned.where, self._world.pnodes)
        if held is None or f"{held.name}-twin" in self._world.machines.by_name:
            return
        twin = self._world.machines.add(f"{held.name}-twin", "pnode", held.id)
        self._tell(planned, held.name)
        self._world.machines.start(twin)
        self._later(planned.seconds, self._world.machines.stop, twin)

    def _join(self, planned: Planned) -> None:
        machine = self._machine(planned.where, self._world.pnodes[self._world.plan.pnodes :], running=False)
        if machine is not None:
            self._tell(planned, machine.name)
            machine.wanted = True
            self._world.machines.start(machine)

    def _kill_orchestrator(self, planned: Planned) -> None:
        self._kill(planned, self._world.orchestrators)

    def _wipe_orchestrator(self, planned: Planned) -> None:
        self._kill(planned, self._world.orchestrators, wipe=True)

    def _stop_orchestrator(self, planned: Planned) -> None:
        self._stop(planned, self._world.orchestrators)

    def _second_orchestrator(self, planned: Planned) -> None:
        """Another one takes over the store, from another machine."""
        world = self._world
        if len(world.orchestrators) > 1:
            return
        second = world.machines.add(f"{ORCHESTRATOR}-2", "orchestrator", ORCHESTRATOR)
        world.orchestrators.append(second)
        second.wanted = True
        self._tell(planned, second.name)
        world.machines.start(second)

    def _kill_client(self, planned: Planned) -> None:
        self._kill(planned, [self._world.operator])

    # ------------------------------------------------------------ machines

    def _clock_jump(self, planned: Planned) -> None:
        machine = self._machine(planned.where, [*self._world.orchestrators, *self._world.pnodes])
        if machine is not None:
            machine.clock_off_s += planned.amount
            self._tell(planned, machine.name)

    def _compute_death(self, planned: Planned) -> None:
        self._break(planned, hang=False)

    def _compute_hang(self, planned: Planned) -> None:
        self._break(planned, hang=True)

    def _break(self, planned: Planned, *, hang: bool) -> None:
        machine = self._machine(planned.where, self._world.pnodes)
        if machine is None or not machine.computes or machine.life is None:
            return
        self._tell(planned, machine.name)
        for compute in machine.computes:
            if hang:
                compute.hang()
            else:
                machine.life.context.run(compute.die, in_action=planned.amount > 0.5)
        self._later(planned.seconds, self._mend, machine, machine.life)

    def _mend(self, machine: Machine, life: object) -> None:
        """Somebody sees that it is unwell, and restarts it."""
        if machine.life is life and machine.runs:
            self._world.recorder.say(f"{machine.name:14} is unwell, and restarted")
            self._world.machines.kill(machine)
            self._start_later(machine, 0.5)

    def _slow_compute(self, planned: Planned) -> None:
        machine = self._machine(planned.where, self._world.pnodes)
        if machine is not None:
            self._tell(planned, machine.name)
            for compute in machine.computes:
                compute.slowness *= planned.amount
                self._later(planned.seconds, setattr, compute, "slowness", machine.slowness)

    # ------------------------------------------------------------ store

    def _store(self, planned: Planned) -> None:
        kind = planned.kind.removeprefix("store_")
        until = self._world.loop.time() + planned.seconds
        place = planned.where if planned.where in self._world.machines.by_name else ""
        self._world.store.faults.append(StoreFault(kind, place, until, planned.amount or 1.0))
        self._tell(planned, place or "store")

    # ------------------------------------------------------------ the end of it

    def heal(self) -> None:
        """Everything is well from now on."""
        if self._healed:
            return
        self._healed = True
        world = self._world
        self._armed.clear()
        self._lines.clear()
        world.network.set_lines({})
        world.network.losses.clear()
        world.store.faults.clear()
        world.recorder.say("everything is healed")
        moved = world.orchestrators[1:] if self._a_pnode_knows_no_store() else []
        for machine in world.machines.by_name.values():
            if machine.name.endswith("-twin") or machine in moved:
                machine.wanted = False
                world.machines.kill(machine)
            world.machines.thaw(machine)
            for compute in machine.computes:
                compute.slowness = machine.slowness
            if any(compute.gone or compute.hangs for compute in machine.computes):
                world.machines.kill(machine)
        for machine in [*world.pnodes[: world.plan.pnodes], world.operator, *self._overdue]:
            if machine.kind != "orchestrator":
                machine.wanted = True
                world.machines.start(machine)
        self._later(0.0, self._see_to_orchestrator)

    def _a_pnode_knows_no_store(self) -> bool:
        """A PNode that is to run was never admitted, so it would not find an orchestrator that came up elsewhere."""
        world = self._world
        if world.plan.store_given:
            return False
        wanted = [machine for machine in world.pnodes if machine.wanted or machine in self._overdue]
        return not all(memory_file(machine.home, machine.id).exists() for machine in wanted)

    def _see_to_orchestrator(self) -> None:
        """One of them runs; whoever was superseded is not started again."""
        world = self._world
        if not any(machine.runs for machine in world.orchestrators) and not world.over:
            world.orchestrators[0].wanted = True
            world.machines.start(world.orchestrators[0])
        self._later(5.0, self._see_to_orchestrator)


LINES = frozenset({
    "slow_line", "delay", "drop", "duplicate", "reorder", "damage", "partition", "partition_one_way", "isolate",
    "reconnect", "half_open", "lose",
})  # fmt: skip


def _change(planned: Planned) -> dict[str, Any]:
    amount = planned.amount
    match planned.kind:
        case "slow_line":
            return {"rate_bytes_s": 3_000 + 30_000 * amount}
        case "delay":
            return {"delay_s": 0.05 + 1.5 * amount, "jitter_s": 0.2 * amount}
        case "drop":
            return {"drop": 0.05 + 0.5 * amount}
        case "duplicate":
            return {"duplicate": 0.1 + 0.9 * amount, "reorder_s": 1.0}
        case "reorder":
            return {"reorder": 0.2 + 0.8 * amount, "reorder_s": 0.1 + 0.9 * amount}
        case "damage":
            return {"damage": 0.02 + 0.3 * amount}
        case _:
            return {"cut": True}
