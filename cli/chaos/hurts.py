"""What each kind of fault does. Each takes its victim from those that there are at that moment.

At least one PNode is left able while another is taken, so that a run is never without any for good; all that lasts is
undone by a task in the background, also when the run ends meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cli.chaos.faults import Fault, Kind
from cli.chaos.fleet import ORCHESTRATOR, STORE
from cli.chaos.gate import Gate, Rule
from wire.errors import DCNRError

if TYPE_CHECKING:
    from cli.chaos.engine import Engine, Wound
    from cli.processes import Process

Hurt = Callable[["Engine", Fault, "Wound"], Awaitable[None]]

WIPED = 0.3
"""The share of kills that also lose the disk."""
ELSEWHERE = 0.9
"""Above this roll the orchestrator comes back at another address."""
SPARES = 0.9
"""Above this roll a PNode is hurt that holds nothing."""
SUPERSEDED_S = 30.0
AGAIN_S, SERVED_S = 1.0, 90.0
NO_STORE = "the store can't be used"

COMMANDS = (
    ("attach", "{session}", "-o", "json"),
    ("attach", "{session}"),
    ("inspect", "{session}"),
    ("logs", "{session}", "--steps"),
    ("status",),
    ("pause", "{session}"),
)


# ------------------------------------------------------------------------------------------------ processes


async def victim(engine: Engine, fault: Fault, wound: Wound) -> str:
    """A PNode to hurt: a member of the run, sometimes a spare one. Waits until two are able."""
    fleet = engine.fleet
    await engine.until(lambda: len(fleet.able()) > 1 or engine.over, "a second PNode")
    members = [name for name in engine.sight.members if name in fleet.able()]
    spares = [name for name in fleet.able() if name not in members]
    among = spares if spares and (fault.roll > SPARES or not members) else members
    wound.hurt_member = among is members
    wound.target = fault.choose(sorted(among))
    return wound.target


async def kill(engine: Engine, fault: Fault, wound: Wound) -> None:
    """kill -9 of a PNode; it comes back after a while, sometimes with an empty disk."""
    name = await victim(engine, fault, wound)
    engine.strike(wound)
    wound.text = _kill(engine, fault, name) + _idle(wound)


def _idle(wound: Wound) -> str:
    return "" if wound.hurt_member else "; it held nothing"


def _kill(engine: Engine, fault: Fault, name: str) -> str:
    wipe = fault.other < WIPED
    engine.fleet.kill(name, wipe=wipe)
    engine.later(_back(engine, name, fault.seconds))
    return f"back after {fault.seconds:.1f} s" + (", its disk lost" if wipe else "")


async def _back(engine: Engine, name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    engine.fleet.start(name)


async def pause(engine: Engine, fault: Fault, wound: Wound) -> None:
    """SIGSTOP of a PNode, later SIGCONT."""
    name = await victim(engine, fault, wound)
    engine.strike(wound)
    engine.fleet.pause(name)
    wound.text = f"for {fault.seconds:.1f} s"
    if fault.seconds > engine.fleet.shape.lease_s:
        wound.text += ", longer than its lease"
    wound.text += _idle(wound)
    engine.later(_go_on(engine, name, fault.seconds), wound)


async def _go_on(engine: Engine, name: str, seconds: float) -> None:
    process = engine.fleet.seats[name].process
    try:
        await asyncio.sleep(seconds)
    finally:
        engine.fleet.go_on(name, process)


async def double(engine: Engine, fault: Fault, wound: Wound) -> None:
    """Kill a PNode; while the run recovers, kill one that gives its state or one that takes its place."""
    fleet = engine.fleet
    first = await victim(engine, fault, wound)
    before = set(engine.sight.members)
    _kill(engine, fault, first)
    missed = lambda: engine.sight.state == "recovering" or engine.over  # noqa: E731
    if not await engine.until(missed, "recovery", timeout_s=4 * fleet.shape.lease_s + 10):
        wound.text, wound.counts = "nobody missed it", False
        return
    preparing = fault.roll < 0.7
    if preparing:
        await engine.until(
            lambda: engine.sight.state != "recovering" or _preparing(engine), "its placement", timeout_s=5.0
        )
    await asyncio.sleep(0.15 * fault.other)
    members = [name for name in engine.sight.members if name in fleet.able()]
    new = [name for name in members if name not in before]
    old = [name for name in members if name in before] or [name for name in fleet.able() if name in before]
    among = new if new and fault.other < 0.5 else old or fleet.able()
    if len(fleet.able()) < 2 or engine.over:
        wound.text, wound.counts = "there was no second one", False
        return
    second = fault.choose(sorted(among), fault.other)
    wound.counts = engine.sight.state == "recovering"
    role = "takes its place" if second in new else "gives its state" if second in before else "stands by"
    wound.target, wound.text = f"{first}, {second}", f"{second} {role}" + ("" if wound.counts else ", too late")
    engine.strike(wound)
    fleet.kill(second)
    engine.later(_back(engine, second, fault.seconds))


def _preparing(engine: Engine) -> bool:
    info = engine.sight.info
    return info is not None and any("prepare" in line for line in info.waiting)


async def orchestrator(engine: Engine, fault: Fault, wound: Wound) -> None:
    """kill -9 of the orchestrator; back after a while, sometimes with an empty disk or at another address."""
    fleet = engine.fleet
    await engine.until(lambda: fleet.orchestrator.able or engine.over, "the orchestrator")
    wipe = fault.pick < WIPED
    moves = fault.roll > ELSEWHERE and fleet.orchestrator.able
    fleet.kill(ORCHESTRATOR, wipe=wipe)
    engine.rewatch()
    wound.target = ORCHESTRATOR
    wound.text = f"back after {fault.seconds:.1f} s"
    wound.text += ", its disk lost" if wipe else ""
    wound.text += ", at another address" if moves else ""
    engine.later(_orchestrator_back(engine, fault.seconds, moves=moves), wound)


async def _orchestrator_back(engine: Engine, seconds: float, *, moves: bool) -> None:
    await asyncio.sleep(seconds)
    if moves and not engine.fleet.orchestrator.alive:
        await engine.fleet.move(ORCHESTRATOR)
        _tell_newcomers(engine)
    engine.fleet.start(ORCHESTRATOR)
    engine.rewatch()
    engine.later(_served(engine))


async def _served(engine: Engine) -> None:
    """An orchestrator that finds no store ends and says so; it is started again, as a service manager would do."""
    seat, deadline = engine.fleet.orchestrator, time.monotonic() + SERVED_S
    process = seat.process
    while process is seat.process and process is not None and not await engine.fleet.answers(ORCHESTRATOR):
        if time.monotonic() > deadline:
            return
        if not process.alive() and NO_STORE in process.tail(1):
            await asyncio.sleep(AGAIN_S)
            if process is seat.process:
                engine.fleet.start(ORCHESTRATOR)
                process = seat.process
                engine.rewatch()
        await asyncio.sleep(0.1)


def _tell_newcomers(engine: Engine) -> None:
    """A PNode that never was a member knows an address only, so whoever moves the orchestrator starts it anew."""
    fleet = engine.fleet
    for seat in fleet.pnodes():
        if seat.alive and not fleet.joined(seat.name):
            fleet.kill(seat.name)
            fleet.start(seat.name)


async def usurp(engine: Engine, fault: Fault, wound: Wound) -> None:
    """The orchestrator is paused, another takes its store; when the first goes on it has to see that and end."""
    fleet = engine.fleet
    await engine.until(lambda: fleet.orchestrator.able or engine.over, "the orchestrator")
    fleet.pause(ORCHESTRATOR)
    old = fleet.replace(ORCHESTRATOR)
    fleet.orchestrator.gate.drop()
    engine.rewatch()
    wound.target = ORCHESTRATOR
    wound.text = f"another takes over, the first goes on after {fault.seconds:.1f} s"
    if old is not None:
        engine.later(_superseded(engine, old, fault.seconds))


async def _superseded(engine: Engine, old: Process, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        engine.fleet.go_on(ORCHESTRATOR, old)
    if not await engine.until(lambda: not old.alive(), "the superseded orchestrator's end", timeout_s=SUPERSEDED_S):
        raise DCNRError(f"the orchestrator that was superseded (pid {old.pid}) still runs after {SUPERSEDED_S:.0f} s")


async def cli(engine: Engine, fault: Fault, wound: Wound) -> None:
    """Start a command that watches, asks or acts, and kill it with -9 after a moment."""
    chosen = COMMANDS[int(fault.pick * len(COMMANDS)) % len(COMMANDS)]
    arguments = [part.format(session=engine.session) for part in chosen]
    process = engine.fleet.command(*arguments)
    wound.target, wound.text = f"dcnr {arguments[0]}", f"killed after {fault.seconds:.1f} s"
    await asyncio.sleep(fault.seconds)
    wound.counts = process.alive()
    engine.strike(wound)
    if not wound.counts:
        wound.text = "had ended before"
    process.signal(signal.SIGKILL, group=True)


# ------------------------------------------------------------------------------------------------ lines


def line(engine: Engine, fault: Fault, wound: Wound) -> list[tuple[Gate, str]]:
    """A line between two processes, or to the store: (gate, source) for each direction."""
    fleet = engine.fleet
    if fleet.store_gate is not None and fault.other > 0.8:
        wound.target = STORE
        return [(fleet.store_gate, "")]
    ends = [name for name in engine.sight.members if name in fleet.seats] + [ORCHESTRATOR]
    one = fault.choose(sorted(ends))
    rest = sorted(name for name in ends if name != one)
    two = fault.choose(rest, fault.other) if rest else ORCHESTRATOR
    wound.target = f"{one} - {two}"
    return [(fleet.seats[two].gate, one), (fleet.seats[one].gate, two)]


async def drop(engine: Engine, fault: Fault, wound: Wound) -> None:
    """Reset the connections of a line."""
    count = sum(gate.drop(source) for gate, source in line(engine, fault, wound))
    wound.text, wound.counts = f"{count} connections reset", count > 0


async def _ruled(engine: Engine, fault: Fault, ends: list[tuple[Gate, str]], rules: list[Rule], *, reset: bool) -> None:
    for (gate, source), rule in zip(ends, rules, strict=False):
        gate.set(source, rule)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        for (gate, source), rule in zip(ends, rules, strict=False):
            if gate.rule(source) is rule:
                gate.set(source, None)
            if reset:
                gate.drop(source)


async def delay(engine: Engine, fault: Fault, wound: Wound) -> None:
    """Everything on a line takes longer."""
    ends, delay_s = line(engine, fault, wound), 0.005 + 0.25 * fault.roll**2
    wound.text = f"{delay_s * 1e3:.0f} ms later, for {fault.seconds:.1f} s"
    engine.later(_ruled(engine, fault, ends, [Rule(delay_s=delay_s) for _ in ends], reset=False), wound)


async def throttle(engine: Engine, fault: Fault, wound: Wound) -> None:
    """A line carries few bytes a second."""
    ends, bytes_s = line(engine, fault, wound), 20e3 + 500e3 * fault.roll
    wound.text = f"{bytes_s / 1e3:.0f} kB/s for {fault.seconds:.1f} s"
    engine.later(_ruled(engine, fault, ends, [Rule(bytes_s=bytes_s) for _ in ends], reset=False), wound)


async def cut(engine: Engine, fault: Fault, wound: Wound) -> None:
    """Nothing passes on a line; then it goes on where it stopped, or its connections are reset."""
    ends, reset = line(engine, fault, wound), fault.roll < 0.5
    wound.text = f"for {fault.seconds:.1f} s" + (", then reset" if reset else "")
    engine.later(_ruled(engine, fault, ends, [Rule(cut_in=True, cut_out=True) for _ in ends], reset=reset), wound)


async def oneway(engine: Engine, fault: Fault, wound: Wound) -> None:
    """Nothing passes in one direction of a line."""
    ends, reset = line(engine, fault, wound), fault.roll < 0.5
    wound.target = wound.target.replace(" - ", " -> ")
    wound.text = f"for {fault.seconds:.1f} s" + (", then reset" if reset else "")
    rules = [Rule(cut_in=True), Rule(cut_out=True)]
    engine.later(_ruled(engine, fault, ends, rules, reset=reset), wound)


async def flip(engine: Engine, fault: Fault, wound: Wound) -> None:
    """One bit changes on its way."""
    ends = line(engine, fault, wound)[:1]
    gate, before = ends[0][0], ends[0][0].flipped
    work = asyncio.ensure_future(_ruled(engine, fault, ends, [Rule(flips=1)], reset=False))
    try:
        await engine.until(lambda: gate.flipped > before or work.done(), "something to pass", timeout_s=2.0)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    wound.counts = gate.flipped > before
    wound.text = "one bit" if wound.counts else "nothing passed"


# ------------------------------------------------------------------------------------------------ storage


async def store(engine: Engine, fault: Fault, wound: Wound) -> None:
    """The S3 server is killed and comes back."""
    server = engine.fleet.shape.server
    if server is None:
        raise DCNRError("this store has no server that could be killed")
    wound.target, wound.text = STORE, f"back after {fault.seconds:.1f} s"
    await asyncio.to_thread(server.kill)
    engine.later(_store_back(engine, fault.seconds), wound)


async def _store_back(engine: Engine, seconds: float) -> None:
    server = engine.fleet.shape.server
    assert server is not None
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.shield(asyncio.to_thread(server.start))


async def disk(engine: Engine, fault: Fault, wound: Wound) -> None:
    """The disk of the store is full to the last byte for a while."""
    folder = engine.fleet.shape.disk
    if folder is None:
        raise DCNRError("this store has no disk of its own that could be filled")
    wound.target, wound.text = STORE, f"its disk full for {fault.seconds:.1f} s"
    await asyncio.to_thread(_fill, folder / f"ballast-{fault.number}")
    engine.later(_freed(folder / f"ballast-{fault.number}", fault.seconds), wound)


def _fill(path: Path) -> None:
    """Write until there is no byte left."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
        for size in (1 << 20, 4096, 1):
            block = os.urandom(size)
            with contextlib.suppress(OSError):
                while ballast.write(block) == size:
                    pass


async def _freed(path: Path, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        os.unlink(path)


HURTS: dict[Kind, Hurt] = {
    Kind.KILL: kill,
    Kind.PAUSE: pause,
    Kind.DOUBLE: double,
    Kind.ORCHESTRATOR: orchestrator,
    Kind.USURP: usurp,
    Kind.CLI: cli,
    Kind.DROP: drop,
    Kind.DELAY: delay,
    Kind.THROTTLE: throttle,
    Kind.CUT: cut,
    Kind.ONEWAY: oneway,
    Kind.FLIP: flip,
    Kind.STORE: store,
    Kind.DISK: disk,
}
