"""A closed connection is a hint: the end of a process is seen long before its lease is over, and no more than that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.chaos.engine import Engine, Rules
from cli.chaos.faults import Kind, Schedule
from cli.chaos.fleet import Fleet, Shape
from cli.chaos.trial import SESSION, begin, join
from cli.terminal import Terminal
from tests.chaos.nets import GPT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 60.0


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Engine]:
    """A small run on two of three PNodes with a lease so long that it never ends here."""
    prepared = GPT.prepared(tmp_path / "data", steps=100_000)
    fleet = Fleet(Shape(tmp_path / "home", 3, LEASE_S))
    try:
        await fleet.open()
        await join(fleet)
        await begin(fleet, prepared, 2, Terminal("json"))
        schedule = Schedule(1, {Kind.KILL: 1.0}, lease_s=LEASE_S, gap_s=0.0)
        engine = Engine(fleet, SESSION, schedule, Rules(stuck_s=120.0))
        async with engine.watching():
            yield engine
    finally:
        await fleet.close()


def test_the_end_of_a_process_is_not_awaited_for_a_lease(tmp_path: Path) -> None:
    async def story() -> float:
        async with running(tmp_path) as engine:
            sight, began = engine.sight, time.monotonic()
            epoch = sight.epoch
            engine.fleet.kill(sorted(sight.members)[0])
            await engine.until(lambda: sight.epoch > epoch, "a new placement")
            mark = sight.highest
            await engine.until(lambda: sight.highest > mark, "a new step")
            assert sight.breaches == []
            return time.monotonic() - began

    assert asyncio.run(story()) < LEASE_S / 2


def test_connections_that_only_break_cost_no_pnode(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as engine:
            sight, fleet = engine.sight, engine.fleet
            epoch, members = sight.epoch, sorted(sight.members)
            for _ in range(5):
                assert sum(gate.drop() for gate in fleet.gates()) > 0
                mark = sight.highest
                await engine.until(lambda: sight.highest > mark, "a new step")  # noqa: B023
                await engine.sleep(0.5)
            await engine.sleep(5.0)
            assert (sight.epoch, sorted(sight.members)) == (epoch, members)
            assert "its connection closed" in (fleet.home / "logs" / "orchestrator.log").read_text(), "it was seen"

    asyncio.run(story())
