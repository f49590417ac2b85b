"""A PNode whose computing takes longer than leases (field case B18): real processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.e2e.members import Members, members

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_S = 6.0
STEPS = 120


async def undisturbed(here: Members) -> str:
    """The hash of the run to which nothing happens."""
    await here.train("whole", STEPS)
    return (await here.finished("whole")).final_hash


async def under_way(here: Members, name: str, committed: int = 20) -> None:
    await here.train(name, STEPS)
    await here.here.client.until(name, lambda info: info.committed >= committed, 200)


def state_of(here: Members, pnode: str) -> tuple[str, int]:
    """State and incarnation."""
    member = here.here.service.membership.members[pnode]
    return member.state.value, member.incarnation


async def test_a_long_operation_that_releases_the_interpreter_lock_is_no_loss(tmp_path: Path) -> None:
    """It takes three leases and more; heartbeats go on, the PNode is busy, and nobody suspects it."""
    long_s = 3 * LEASE_S + 2
    async with members(tmp_path, "p1", "p2", "p3", lease_s=LEASE_S, strange={"p2": ["release", f"{long_s}"]}) as here:
        expected = await undisturbed(here)
        await under_way(here, "busy")
        here.flag("p2").touch()
        await here.until(lambda: not here.flag("p2").exists(), 30)
        end = time.monotonic() + long_s - 0.5
        seen: set[tuple[str, str]] = set()
        while time.monotonic() < end:
            member = here.here.service.membership.find("p2")
            assert member is not None
            seen.add((member.state.value, member.compute))
            await asyncio.sleep(0.05)
        assert {state for state, _ in seen} == {"alive"}
        assert ("alive", "busy") in seen
        waits = await here.here.client.session("busy")
        done = await here.finished("busy")
        assert done.final_hash == expected
        assert (done.epoch, done.recoveries) == (1, 0)
        assert (await here.status())["p2"]["incarnation"] == 1
        assert any(text.startswith("p3 waits for p2: ") for text in waits.waiting), waits.waiting
