"""Field case B43: the clock of the orchestrator's machine is wrong, or jumps; its leases and deadlines do not mind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from storage import open_store
from tests.integration.orchestrator.cluster import PEERS, Client, Cluster, StandIn, network_bytes, undisturbed
from tests.integration.storage.clocks import WAYS, MovedClock
from tests.seaweed import ENVIRONMENT, seaweed_server
from wire import messages
from wire.ids import new_request_id

PROGRAM = "import sys\nsys.argv = ['dcnr-orchestrator', *sys.argv[1:]]\nfrom orchestrator.main import main\nmain()\n"
STEPS = 400
pytestmark = pytest.mark.timeout(900)


class Machine:
    """The machine of the orchestrator: its clock, and a process on it."""

    def __init__(self, clock: MovedClock, home: Path, store: str) -> None:
        self.clock = clock
        self._home = home
        self._store = store
        self._process: asyncio.subprocess.Process | None = None

    async def up(self, bind: str = "tcp://127.0.0.1:0") -> str:
        """Start the orchestrator; its address."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self.clock.command(PROGRAM, "--bind", bind, "--home", str(self._home), "--store", self._store,
                                "--lease", "5", "--log-level", "error"),
            env=self.clock.environment,
        )  # fmt: skip
        async with asyncio.timeout(240):
            while True:
                ready = self._home / "orchestrator.json"
                mark: dict[str, Any] = json.loads(ready.read_text()) if ready.exists() else {}
                if mark.get("pid") == process.pid:
                    return str(mark["address"])
                assert process.returncode is None, "it ended"
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """kill -9."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def running(folder: Path, way: str, store_url: str) -> AsyncIterator[tuple[Cluster, Machine]]:
    """An orchestrator in a process of its own, stand-ins for PNodes here, and a run that has committed something."""
    PEERS.clear()
    machine = Machine(MovedClock(way, folder), folder / "home", store_url)
    here = Cluster(folder)
    here.store = open_store(store_url)  # type: ignore[assignment]
    here.address = await machine.up()
    here.client = Client(here.address)
    await here.client.bus.start()
    try:
        for name in ("p1", "p2"):
            PEERS[name] = await StandIn(name, here.address, here.store, step_s=0.02).start()
        put = messages.PutNetwork(str(new_request_id()), "toy")
        await here.client.ask(put, messages.NetworkInfo, [network_bytes(folder)], 240)
        await here.create(steps=STEPS, checkpoint_every=10)
        await here.client.until("toy-1", lambda info: info.committed >= 10, 240)
        began = {name: info.incarnation for name, info in (await here.pnodes()).items()}
        yield here, machine
        assert {name: info.incarnation for name, info in (await here.pnodes()).items()} == began, (
            "one was taken for lost"
        )
    finally:
        for peer in PEERS.values():
            await peer.close()
        await here.client.bus.close()
        await machine.kill()
        await here.store.close()


async def ends_well(here: Cluster, *, epoch: int = 1) -> None:
    """As an undisturbed run."""
    done = await here.client.state("toy-1", "finished", timeout_s=240)
    assert (done.epoch, done.recoveries) == (epoch, 0)
    assert done.final_hash == await undisturbed(here.store, "toy-1", STEPS)
    assert {info.state for info in (await here.pnodes()).values()} == {"alive"}


@pytest.mark.parametrize("way", WAYS)
async def test_its_clock_jumps_while_a_run_goes_on(tmp_path: Path, way: str) -> None:
    async with running(tmp_path, way, (tmp_path / "store").as_uri()) as (here, machine):
        for minutes in (60, -60, 20, -20, 0):
            machine.clock.set(60 * minutes)
            before = (await here.client.session("toy-1")).committed
            await here.client.until("toy-1", lambda info, before=before: info.committed > before, 240)  # type: ignore[misc]
        await ends_well(here)


@pytest.mark.parametrize("hours", [25, -25])
async def test_the_next_one_has_another_time(tmp_path: Path, hours: int) -> None:
    """It takes over under a higher term, whatever its clock says about who was first."""
    async with running(tmp_path, WAYS[0], (tmp_path / "store").as_uri()) as (here, machine):
        await machine.kill()
        machine.clock.set(3600 * hours)
        assert await machine.up(here.address) == here.address
        cluster = await here.client.ask(messages.AskCluster(str(new_request_id())), messages.ClusterInfo, timeout_s=240)
        assert cluster.term == 2
        await ends_well(here)


async def test_its_clock_is_named_where_s3_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is well, so it is not blamed; nothing is lost, and it goes on by itself once the clock is right."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with seaweed_server(tmp_path / "weed") as server:
        server.make_bucket("dcnr")
        async with running(tmp_path, WAYS[0], server.url("dcnr", "runs")) as (here, machine):
            machine.clock.set(1200)
            said = "the clock of the orchestrator is off by ~20 min (ahead of the store's)"
            info = await here.client.until("toy-1", lambda info: any(said in line for line in info.waiting), 240)
            assert info.state == "running"
            assert info.waiting[0].startswith("store: commit of step ")
            assert " s (at most " in info.waiting[0]
            machine.clock.set(0)
            await ends_well(here)
