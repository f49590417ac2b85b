"""Field cases with real processes: a member stands still (B01), and a member leaves while another is replaced (B31).

Both runs end with the hash and the losses of the run that nobody disturbed. Another seed: DCNR_CHAOS_SEED=17.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from cli.chaos.engine import Engine, Rules
from cli.chaos.faults import Kind, Schedule
from cli.chaos.fleet import ORCHESTRATOR, Fleet, Launch, Shape
from cli.chaos.reference import undisturbed
from cli.chaos.trial import SESSION, begin, join
from cli.preparing import Prepared
from cli.terminal import Terminal
from tests.chaos.nets import GPT
from wire.codec import read_header
from wire.errors import DCNRError
from wire.packets import Data

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SEED = int(os.environ.get("DCNR_CHAOS_SEED") or time.time())
MIB = 1 << 20


@asynccontextmanager
async def running(shape: Shape, prepared: Prepared, members: int) -> AsyncIterator[Engine]:
    """A run that is watched, to be hurt by hand."""
    fleet = Fleet(shape)
    try:
        await fleet.open()
        await join(fleet)
        await begin(fleet, prepared, members, Terminal("json"))
        schedule = Schedule(SEED, {Kind.KILL: 1.0}, lease_s=shape.lease_s, gap_s=0.0)
        engine = Engine(fleet, SESSION, schedule, Rules(stuck_s=120.0))
        async with engine.watching():
            yield engine
    finally:
        await fleet.close()


async def hold(engine: Engine) -> None:
    """Pause the run after the step that it is in."""
    engine.pausing = True
    while engine.sight.state != "paused":
        if engine.sight.state == "running" and engine.client is not None:
            with contextlib.suppress(DCNRError):
                await engine.client.act(SESSION, "pause", timeout_s=10.0)
        await engine.sleep(0.1)


async def new_steps(engine: Engine, count: int = 1) -> None:
    """Wait until so many steps are made that were never made before."""
    mark = engine.sight.highest + count
    await engine.until(lambda: engine.sight.highest >= mark, "a new step")


def undisturbed_too(engine: Engine, prepared: Prepared) -> None:
    """The run is where one process is after as many steps."""
    info = engine.sight.info
    assert info is not None
    steps = info.committed
    expected = undisturbed(prepared, steps, threads=1)
    assert engine.sight.compare(expected.losses, expected.hashes[steps], steps) == []


def tag_of(header: bytes) -> str:
    """The kind of message that a packet carries, or "" if it carries none, or not its beginning."""
    with contextlib.suppress(DCNRError):
        found = read_header(header)
        if isinstance(found, Data) and found.message:
            return str(found.message[0])
    return ""


# ------------------------------------------------------------------------------------------------ B01

ACTIVATION = ("train.batch=64", "train.microbatches=4", "vars.ctx=32", "vars.d=32")
"""16 rows of 32 by 32 float32: 64 KiB."""
LEASE_S = 10.0
HOPS = 2000


def test_a_member_that_stands_still_loses_nothing_and_piles_up_nothing(tmp_path: Path, launch: Launch) -> None:
    """Two members, one after the other, stand still for half a lease: the rest waits in bounded memory, and says so."""
    prepared = GPT.prepared(tmp_path / "data", steps=100_000, extra=ACTIVATION)
    hops: Counter[tuple[str, str]] = Counter()

    def peek(source: str, target: str, header: bytes) -> None:
        hops[source, target] += tag_of(header) == "hop"

    async def story() -> Engine:
        shape = Shape(tmp_path / "home", 3, LEASE_S, seed=SEED, peek=peek, launch=launch)
        async with running(shape, prepared, 3) as engine:
            fleet, sight = engine.fleet, engine.sight
            await new_steps(engine, 10)
            for name in random.Random(SEED).sample(sorted(sight.members), 2):
                others = [fleet.seats[other].process for other in sight.members if other != name]
                before = [psutil.Process(process.pid).memory_info().rss for process in others if process is not None]
                sent = {pair: count for pair, count in hops.items() if pair[1] == name}
                fleet.pause(name)
                said: set[str] = set()
                until = time.monotonic() + LEASE_S / 2
                while time.monotonic() < until:
                    said |= set(sight.info.waiting) if sight.info is not None else set()
                    await asyncio.sleep(0.05)
                after = [psutil.Process(process.pid).memory_info().rss for process in others if process is not None]
                fleet.go_on(name)
                assert any(f"waits for {name}: " in line for line in said), said
                assert max(late - early for late, early in zip(after, before, strict=True)) < 16 * MIB
                piled = sum(hops[pair] - count for pair, count in sent.items())
                print(f"{name}: {piled} activations and gradients sent to it meanwhile; {sorted(said)}")
                assert piled <= 32, "its neighbours send no further ahead than their schedules"
                await new_steps(engine, 3)
            await engine.until(lambda: hops.total() >= HOPS, "so many hops")
            assert (sight.epoch, sight.redone) == (1, 0), "nobody was lost"
            await hold(engine)
            return engine

    print(f"DCNR_CHAOS_SEED={SEED}")
    undisturbed_too(asyncio.run(story()), prepared)


# ------------------------------------------------------------------------------------------------ B31

POINTS = (
    ("prepare", "heir", 0.0), ("prepare", "donor", 0.0), ("prepare", "heir", 0.15), ("prepare", "donor", 0.15),
    ("ok", "heir", 0.0), ("start_run", "donor", 0.0), ("hop", "heir", 0.0), ("gradient_report", "", 0.0),
    ("parts_saved", "heir", 0.0), ("committed", "donor", 0.0),
)  # fmt: skip
"""When the second one is killed: as it sends or gets such a message, or at random up to so many seconds later.

An heir is given VNodes of the first one that was killed, a donor had some before; "": whoever of them.
"""


@dataclass(slots=True)
class Trap:
    """Kills a process at a point of a recovery, which the packets at the gates show."""

    pick: random.Random
    fleet: Fleet | None = None
    before: frozenset[str] = frozenset()
    point: tuple[str, str, float] = ("", "", 0.0)
    prepared: set[str] = field(default_factory=set)
    victim: str = ""
    sprung: bool = False

    def set(self, point: tuple[str, str, float], before: frozenset[str], dead: str) -> None:
        """For the recovery that follows from this death."""
        self.point, self.before = point, before - {dead}
        self.prepared, self.victim, self.sprung = set(), "", False

    def peek(self, source: str, target: str, header: bytes) -> None:
        """A packet is about to pass."""
        if self.fleet is None or self.victim or not (tag := tag_of(header)):
            return
        party = target if source == ORCHESTRATOR else source
        if tag == "prepare":
            self.prepared.add(party)
        wanted, role, within_s = self.point
        if tag != wanted or party not in self.prepared:
            return
        if role and (role == "donor") != (party in self.before):
            return
        self.victim = party
        asyncio.get_running_loop().call_later(self.pick.uniform(0.0, within_s), self._spring)

    def _spring(self) -> None:
        assert self.fleet is not None
        self.fleet.kill(self.victim)
        self.sprung = True


def test_a_second_member_leaves_at_each_of_ten_points_of_a_recovery(tmp_path: Path, launch: Launch) -> None:
    """Heirs and donors, from the first message of a recovery to the first commit after it; then both are back."""
    prepared = GPT.prepared(tmp_path / "data", steps=100_000)
    pick = random.Random(SEED)
    trap = Trap(pick)

    async def story() -> Engine:
        shape = Shape(tmp_path / "home", 5, 1.0, seed=SEED, peek=trap.peek, launch=launch)
        async with running(shape, prepared, 2) as engine:
            fleet, sight = engine.fleet, engine.sight
            for point in pick.sample(POINTS, len(POINTS)):
                committed = sight.committed
                await engine.until(lambda: sight.committed > committed, "a commit")  # noqa: B023
                epoch = sight.epoch
                first = pick.choice(sorted(sight.members))
                trap.set(point, frozenset(sight.members), first)
                trap.fleet = fleet
                fleet.kill(first)
                began = time.monotonic()
                assert await engine.until(lambda: trap.sprung, "the point", timeout_s=60.0), (point, engine.describe())
                sprung = time.monotonic() - began
                await engine.until(lambda: sight.epoch > epoch + 1, "the second recovery")  # noqa: B023
                await new_steps(engine)
                whole = time.monotonic() - began
                print(f"{point}: {first}, {sprung:.1f} s later {trap.victim}; new step after {whole:.1f} s")
                assert sight.breaches == []
                for name in {first, trap.victim}:
                    fleet.start(name)
                await join(fleet)
            await hold(engine)
            return engine

    print(f"DCNR_CHAOS_SEED={SEED}")
    undisturbed_too(asyncio.run(story()), prepared)
