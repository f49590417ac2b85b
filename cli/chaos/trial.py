"""One run under fire from the first process to the last: start a fleet, train, hurt it, compare, end everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cli.chaos.engine import Engine, Outcome, Rules, Told
from cli.chaos.faults import Kind, Schedule
from cli.chaos.fleet import Fleet, Shape
from cli.client import Client
from cli.starting import Wish, create, put_inputs, put_network
from cli.terminal import Terminal
from wire.errors import DCNRError

if TYPE_CHECKING:
    from cli.chaos.sight import Sight
    from cli.preparing import Prepared

SESSION = "chaos"
JOIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What to do. `members`: how many PNodes the run asks for; those beyond are spares. `order`: see `Schedule`."""

    shape: Shape
    seed: int
    odds: Mapping[Kind, float]
    rules: Rules
    gap_s: float
    members: int = 0
    order: tuple[Kind, ...] = ()
    told: Told = field(default_factory=Told)


@dataclass(slots=True)
class Survived:
    """How it went; `sight` is what to hold against the undisturbed run."""

    outcome: Outcome
    sight: Sight


async def undergo(
    trial: Trial, prepared: Prepared, terminal: Terminal, *, said: Callable[[str], None] = lambda text: None
) -> Survived:
    """Run it. Every process has ended afterwards, whatever happened.

    Raises: `ChaosError` when the run does not stand it, `DCNRError` when it can't even begin.
    """
    fleet = Fleet(trial.shape)
    try:
        await fleet.open(said)
        said("waiting for the PNodes")
        await join(fleet)
        said("storing network and data, placing the VNodes")
        await begin(fleet, prepared, trial.members, terminal)
        schedule = Schedule(trial.seed, trial.odds, lease_s=trial.shape.lease_s, gap_s=trial.gap_s, order=trial.order)
        engine = Engine(fleet, SESSION, schedule, trial.rules, told=trial.told)
        outcome = await engine.run()
    finally:
        left = await fleet.close()
    left += [f"{line} was left behind" for line in processes_of(trial.shape.home)]
    left += [f"{each.name} (pid {each.pid}) was left behind" for each in fleet.started if each.alive()]
    outcome.breaches.extend(left)
    return Survived(outcome, engine.sight)


async def begin(fleet: Fleet, prepared: Prepared, members: int, terminal: Terminal) -> None:
    """Give the cluster network and data, and start the session."""
    await put_inputs(fleet.store, prepared, terminal)
    async with Client(fleet.direct, terminal, timeout_s=60.0) as client:
        await put_network(client, prepared, replace=True)
        info = await create(client, Wish(prepared.network.id, pnodes=members, name=SESSION), prepared, terminal)
        deadline = time.monotonic() + JOIN_S
        while info.state in ("starting", "failed") and time.monotonic() < deadline:
            if info.state == "failed":  # a PNode was thought lost just then: on a crowded machine, before any fault
                await join(fleet)
                await client.act(SESSION, "resume")
            await asyncio.sleep(0.05)
            info = await client.session(SESSION)


async def join(fleet: Fleet, timeout_s: float = JOIN_S) -> None:
    """Wait until every PNode is a member. Raises `DCNRError`."""
    deadline = time.monotonic() + timeout_s
    wanted = {seat.name for seat in fleet.pnodes()}
    async with Client(fleet.direct, Terminal("json")) as client:
        while missing := wanted - {node.pnode for node in await client.pnodes(quiet=True) if node.state == "alive"}:
            for name in missing:
                process = fleet.seats[name].process
                if process is not None and not process.alive():
                    raise DCNRError(f"{name} ended while starting: {process.tail(3)}")
            if time.monotonic() > deadline:
                raise DCNRError(f"{', '.join(sorted(missing))} did not join within {timeout_s:.0f} s")
            await asyncio.sleep(0.05)


def processes_of(home: Path) -> list[str]:
    """Living processes whose command line names something in a home."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and any(str(home) in word for word in words[1:]):
                found.append(f"pid {process.pid} ({' '.join(words[2:6])})")
        except psutil.Error:
            continue
    return found
