"""Field case B03: a second PNode under an id that is held, on another machine (home) or on the same: real processes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.e2e.members import members

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PROBE_S, BUSY_S = 2.0, 3.0
"""What the refusal may take, and what a busy machine may add."""


async def test_the_second_is_refused_at_once_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    async with members(tmp_path, "p1", "p2", "p3", lease_s=4.0) as here:
        await here.train("whole", 150)
        expected = (await here.finished("whole")).final_hash
        address = here.here.service.membership.members["p1"].peer.addresses[0]
        await here.train("held", 150)
        await here.here.client.until("held", lambda info: info.step >= 10, 120)
        remembered = (tmp_path / "p1" / "p1.member.json").read_bytes()
        for home in ("elsewhere", "p1"):
            errors = tmp_path / f"{home}.err"
            known = len(errors.read_text()) if errors.exists() else 0
            second = await here.spawn("p1", home=home)
            async with asyncio.timeout(120):
                assert await second.wait() == 1
            ended = time.time()
            told = errors.read_text()[known:]
            said = (
                rf"dcnr-pnode: id p1 is already held by {re.escape(address)}, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
            )
            assert re.search(said, told), told
            assert "Traceback" not in told
            lines = [json.loads(line) for line in (tmp_path / home / "p1.log").read_text().splitlines()]
            asked = max(datetime.fromisoformat(line["timestamp"]) for line in lines if line["event"] == "measured")
            assert ended - asked.timestamp() < PROBE_S + BUSY_S
        done = await here.finished("held")
        assert done.final_hash == expected
        assert (done.epoch, done.recoveries) == (1, 0)
        member = here.here.service.membership.members["p1"]
        assert (member.state.value, member.incarnation) == ("alive", 1)
        assert here.processes["p1"].returncode is None
        assert (tmp_path / "p1" / "p1.member.json").read_bytes() == remembered
