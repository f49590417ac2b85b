"""B43: the clock of this machine is wrong, from the start or all at once; it is named, and nothing but S3 minds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from storage.s3_errors import wrong_clock
from tests.integration.storage.clocks import WAYS, MovedClock

PROGRAM = """
import asyncio, json, sys, time
from storage import StoreUnavailableError, open_store
from storage.stall import Stall, watched

async def main():
    s3, local = open_store(sys.argv[1]), open_store(sys.argv[2])
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    while True:
        answer = {}
        for name, call in (("put", s3.put("k", b"x")), ("get", s3.get("k")), ("head", s3.head("k"))):
            try:
                await call
                answer[name] = "ok"
            except StoreUnavailableError as error:
                answer[name] = [type(error).__name__, str(error)]
        await local.put("k", b"x")
        await local.probe()
        monotonic, wall = time.monotonic(), time.time()
        async with watched(Stall(30)):
            print(json.dumps(answer | {"monotonic": monotonic, "wall": wall}), flush=True)
            if not await loop.run_in_executor(None, sys.stdin.readline):
                break
    await s3.close()

asyncio.run(main())
"""


class Machine:
    """The process, asked for one round of calls at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"go\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        assert line, "it ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def machine(clock: MovedClock, url: str, folder: Path) -> AsyncIterator[Machine]:
    process = await asyncio.create_subprocess_exec(
        *clock.command(PROGRAM, url, str(folder / "local")), env=clock.environment,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Machine(process)
    finally:
        assert process.stdin
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("minutes", "side"), [(20, "ahead of"), (-20, "behind")])
async def test_a_clock_that_is_wrong_from_the_start(
    s3_url: str, tmp_path: Path, way: str, minutes: int, side: str
) -> None:
    clock = MovedClock(way, tmp_path)
    clock.set(60 * minutes)
    async with machine(clock, s3_url, tmp_path) as running:
        answer = await running.ask()
    for call in ("put", "get", "head"):
        kind, text = answer[call]
        assert kind == "ClockError"
        assert f"the clock of this machine is off by ~20 min ({side} the store's)" in text
        assert "timedatectl" in text
        assert "can be reached" not in text


@pytest.mark.parametrize("way", WAYS)
async def test_a_clock_that_jumps_while_it_runs(s3_url: str, tmp_path: Path, way: str) -> None:
    """By an hour, forward and back, and by ten minutes, which S3 allows: it goes on by itself, without a restart."""
    clock = MovedClock(way, tmp_path)
    async with machine(clock, s3_url, tmp_path) as running:
        before = await running.ask()
        assert [before[call] for call in ("put", "get", "head")] == ["ok"] * 3
        for minutes in (60, -60):
            clock.set(60 * minutes)
            jumped = await running.ask()
            assert abs(jumped["wall"] - before["wall"] - 60 * minutes) < 60
            assert 0 < jumped["monotonic"] - before["monotonic"] < 60, "the monotonic clock must not jump"
            for call in ("put", "get", "head"):
                assert jumped[call][0] == "ClockError"
                assert "off by ~60 min" in jumped[call][1]
        for minutes in (10, 0):
            clock.set(60 * minutes)
            again = await running.ask()
            assert [again[call] for call in ("put", "get", "head")] == ["ok"] * 3


def test_what_counts_as_a_wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.s3_errors.time.time", lambda: 1_000_000.0)

    def found(code: str, ahead_s: float) -> str:
        headers = {"date": formatdate(1_000_000.0 - ahead_s, usegmt=True)}
        error = wrong_clock("s3://b", "k", code, headers)
        return error.message.partition("machine is ")[2].partition(", so")[0] if error else ""

    assert found("AccessDenied", 0) == found("AccessDenied", 100) == ""
    assert found("AccessDenied", 1200) == "off by ~20 min (ahead of the store's)"
    assert found("403", -3600) == "off by ~60 min (behind the store's)"
    assert found("RequestTimeTooSkewed", 901) == "off by ~15 min (ahead of the store's)"
    unknown = wrong_clock("s3://b", "k", "RequestTimeTooSkewed", {})
    assert unknown is not None
    assert "is not the store's" in unknown.message
    assert wrong_clock("s3://b", "k", "AccessDenied", {"date": "yesterday"}) is None
