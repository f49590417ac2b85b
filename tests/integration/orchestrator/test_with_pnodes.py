"""The orchestrator with real PNode processes: real training, kill -9, recovery, and the same hash in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from networks.load import load
from pnode.data import pack
from storage.blobs import Blobs
from tests.integration.orchestrator.cluster import Cluster
from wire import messages
from wire.ids import new_request_id

NETWORK = "mlp-digits"


@asynccontextmanager
async def real_cluster(
    folder: Path, pnodes: int
) -> AsyncIterator[tuple[Cluster, dict[str, asyncio.subprocess.Process]]]:
    """An orchestrator in this process and PNodes in their own."""
    here = Cluster(folder, lease_s=5.0)
    await here.up()
    processes: dict[str, asyncio.subprocess.Process] = {}
    try:
        for number in range(1, pnodes + 1):
            processes[f"p{number}"] = await pnode_process(here, f"p{number}")
        async with asyncio.timeout(180):
            while len(here.service.membership.living()) < pnodes:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield here, processes
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.terminate()
        for process in processes.values():
            await asyncio.wait_for(process.wait(), 20)
        await here.down()
    assert not here.bugs, here.bugs[0]


async def pnode_process(here: Cluster, name: str) -> asyncio.subprocess.Process:
    """A PNode process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(here.folder / f"{name}.err", "ab") as errors:  # noqa: ASYNC230
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pnode.main", "--name", name, "--orchestrator", here.address, "--threads", "1",
            "--home", str(here.folder / name), stdout=errors, stderr=errors, env=environment,
        )  # fmt: skip


async def register(here: Cluster) -> str:
    """Register mlp-digits and store its data; the data's digest."""
    network = load(NETWORK)
    assert network.recipe.data is not None
    packed = await asyncio.to_thread(pack, network.recipe.data, cache_dir=here.folder / "cache")
    message = messages.PutNetwork(str(new_request_id()), NETWORK)
    await here.client.ask(message, messages.NetworkInfo, [network.to_bytes()], 180)
    return await Blobs(here.store).put_file(packed.path)


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_a_killed_pnode_is_made_good_to_the_hash_of_the_undisturbed_run(tmp_path: Path) -> None:
    async with real_cluster(tmp_path, 3) as (here, processes):
        data = await register(here)
        common = {"data_digest": data, "data": "digits", "steps": 400, "seed": 7, "checkpoint_every": 10, "pnodes": 2}
        await here.create(NETWORK, name="whole", **common)
        whole = await here.client.state("whole", "finished", 120)
        await here.client.act("whole", "undeploy")
        await here.create(NETWORK, name="broken", **common)
        running = await here.client.until("broken", lambda info: info.committed >= 20, 120)
        victim = running.pnodes[-1]
        processes[victim].send_signal(signal.SIGKILL)
        done = await here.client.state("broken", "finished", 240)
        assert (done.epoch, done.recoveries) == (2, 1)
        assert victim not in done.pnodes
        assert any(f"PNode {victim} is lost" in event.text for event in await here.events("broken"))
        assert done.final_hash == whole.final_hash
        assert done.bit_exact == ""
        reports = await here.client.ask(
            messages.InspectSession(str(new_request_id()), "broken"), list[messages.VNodeReport]
        )
        assert [report.vnode for report in reports][:2] == ["flat", "fc1"]
        assert {report.step for report in reports} == {400}


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_a_loss_that_becomes_infinite_keeps_the_checkpoint_and_names_step_and_vnode(tmp_path: Path) -> None:
    async with real_cluster(tmp_path, 2) as (here, _):
        network = load(NETWORK, sets=["train.optimizer.lr=1e30", "train.schedule.warmup=0"])
        data = await register(here)
        message = messages.PutNetwork(str(new_request_id()), NETWORK)
        await here.client.ask(message, messages.NetworkInfo, [network.to_bytes()], 180)
        await here.create(NETWORK, data_digest=data, steps=50, checkpoint_every=1)
        await here.client.state(f"{NETWORK}-1", "failed", 120)
        # The cut of the last good step was on its way when the run failed: it is committed all the same.
        failed = await here.client.until(f"{NETWORK}-1", lambda info: info.committed == info.step, 20)
        assert "not finite" in failed.error
        assert "VNode" in failed.error
        assert f"step {failed.committed + 1} " in failed.error
        assert failed.committed >= 1
        assert not failed.deployed
