"""PNodes whose computing takes long, holds everything up, or has ended (field cases B18 and B26): real processes."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from tests.e2e.members import Members, members
from wire.ending import GRACE_S

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


async def test_beyond_the_limit_of_computing_the_error_names_the_setting(tmp_path: Path) -> None:
    """Its process lives and answers, so only the limit can tell that nothing will come of it."""
    strange, options = {"p2": ["release", "3600"]}, {"p2": ["--compute-limit", "30"]}
    async with members(tmp_path, "p1", "p2", "p3", lease_s=LEASE_S, strange=strange, options=options) as here:
        expected = await undisturbed(here)
        await under_way(here, "stuck")
        here.flag("p2").touch()
        done = await here.finished("stuck")
        assert done.final_hash == expected
        assert done.recoveries == 1
        assert "p2" not in done.pnodes
        story = await here.story("stuck")
        assert "p2" in story
        said = r"stuck: F\d of step \d+ in stage \d computes for \d+ s, above --compute-limit 30"
        assert re.search(said, story), story
        node = (await here.status())["p2"]
        assert node["state"] == "alive"
        assert "computes for" in node["health"]
        assert node["compute"] == "stalled"
        here.processes["p2"].terminate()
        assert await asyncio.wait_for(here.processes["p2"].wait(), GRACE_S) == 0, "it still computes, and ends in time"


async def test_one_that_holds_the_interpreter_lock_is_suspected_named_and_fenced(tmp_path: Path) -> None:
    """No line of Python runs in its process, so nobody can tell it from a dead one. When it goes on, nothing that it
    does in its old epoch counts, and it is a member again under a new incarnation."""
    long_s = 3 * LEASE_S + 6
    async with members(tmp_path, "p1", "p2", "p3", lease_s=LEASE_S, strange={"p2": ["hold", f"{long_s}"]}) as here:
        expected = await undisturbed(here)
        await under_way(here, "held")
        here.flag("p2").touch()
        membership, states, shown = here.here.service.membership, [], []
        async with asyncio.timeout(long_s):
            while "lost" not in states:
                member = membership.find("p2")
                assert member is not None
                if member.state.value not in states[-1:]:
                    states.append(member.state.value)
                if member.state.value == "suspect" and not shown:
                    _, text, _ = await here.dcnr("status")
                    shown.append(text)
                await asyncio.sleep(0.02)
        assert states[-2:] == ["suspect", "lost"]
        assert "p2 is suspected: no sign of life for" in shown[0]
        done = await here.finished("held")
        assert done.final_hash == expected
        assert (done.epoch, done.recoveries) == (2, 1)
        assert "p2" not in done.pnodes
        story = await here.story("held")
        assert "p2" in story
        assert "no sign of life for" in story
        await here.until(lambda: state_of(here, "p2") == ("alive", 2), 60)
        await here.until(lambda: not membership.members["p2"].sessions, 30)
        await here.train("again", STEPS)
        assert (await here.finished("again")).final_hash == expected, "and it can be used as before"
        assert "Traceback" not in here.told("p2")


@pytest.mark.parametrize("how", ["vanish"])
async def test_a_dead_compute_thread_shows_and_its_vnodes_go_elsewhere(tmp_path: Path, how: str) -> None:
    """The daemon lives on and reports; what it reports is that it can't compute."""
    async with members(tmp_path, "p1", "p2", "p3", lease_s=LEASE_S, strange={"p2": [how, "0"]}) as here:
        expected = await undisturbed(here)
        await under_way(here, "dead")
        here.flag("p2").touch()
        await here.until(lambda: not here.flag("p2").exists(), 30)
        begin = time.monotonic()
        members_here = here.here.service.membership.members
        await here.until(lambda: members_here["p2"].health != "", LEASE_S + 2)
        assert time.monotonic() - begin < LEASE_S + 1
        assert state_of(here, "p2") == ("alive", 1)
        code, text, _ = await here.dcnr("status")
        assert code == 0
        assert "p2 is unhealthy: " in text
        assert "compute thread is dead" in text
        done = await here.finished("dead")
        assert done.final_hash == expected
        assert done.recoveries == 1
        assert "p2" not in done.pnodes
