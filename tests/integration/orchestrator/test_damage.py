"""A bit of a record in the store flipped: an orchestrator takes over, mends what it can, and names the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.records import INCARNATIONS_KEY, network_key, session_key
from orchestrator.truth import TERM_GAP, Truth
from storage.terms import TERM_KEY
from tests.integration.orchestrator.cluster import PEERS, Cluster, cluster, undisturbed
from wire import messages
from wire.ids import new_request_id
from wire.requests import RefusedError

RECORDS = {
    "term": TERM_KEY, "incarnations": INCARNATIONS_KEY, "session": session_key("toy-1"), "network": network_key("toy")
}  # fmt: skip


def flip(path: Path, bit: int = 900) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


async def status(here: Cluster) -> messages.ClusterInfo:
    return await here.client.ask(messages.AskCluster(str(new_request_id())), messages.ClusterInfo)


async def paused(here: Cluster) -> str:
    """A run that rests, and its orchestrator gone; the address."""
    await here.network()
    await here.create(until=17, steps=40)
    await here.client.state("toy-1", "paused")
    address = here.address
    await here.down()
    return address


@pytest.mark.parametrize("record", RECORDS)
async def test_a_damaged_record_is_mended(tmp_path: Path, record: str) -> None:
    """From the index, or made anew: the run ends as if nothing had been."""
    async with cluster(tmp_path) as here:
        address = await paused(here)
        flip(tmp_path / "store" / RECORDS[record])
        await here.up(bind=address)
        (told,) = (await status(here)).damaged
        assert f"{RECORDS[record]} is corrupt" in told
        assert "mended" in told or "begun anew" in told
        info = await here.client.session("toy-1")
        assert (info.state, info.step, info.committed) == ("paused", 17, 17)
        assert here.service.term == (2 if record != "term" else 2 + TERM_GAP)
        for peer in PEERS.values():
            await peer.register()
        await here.client.act("toy-1", "resume")
        done = await here.client.state("toy-1", "finished")
        assert done.final_hash == await undisturbed(here.store, "toy-1", 40)
        await here.down()
        await here.up(bind=address)
        assert (await status(here)).damaged == []
        assert here.service.truth.damaged == {}


async def test_a_session_without_a_copy_is_left_out_and_nothing_of_it_is_deleted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        address = await paused(here)
        path = tmp_path / "store" / RECORDS["session"]
        whole = path.read_bytes()
        flip(path)
        for leftover in (tmp_path / "home").glob("registry.sqlite*"):
            leftover.unlink()
        await here.up(bind=address)
        (told,) = (await status(here)).damaged
        assert "toy-1 is left out" in told
        assert "restore the record" in told
        for peer in PEERS.values():
            await peer.register()
        with pytest.raises(RefusedError, match="the record of session toy-1 is damaged, its name is taken"):
            await here.create(name="toy-1")
        for blob in (tmp_path / "store/blobs").rglob("*"):
            os.utime(blob, (0, 0))
        before = {entry.key async for entry in here.store.list("")}
        garbage = await here.client.ask(messages.CollectGarbage(str(new_request_id()), "", False), messages.GarbageInfo)
        assert garbage.keys == []
        assert {entry.key async for entry in here.store.list("")} == before
        assert (await here.create()).session == "toy-2"
        await here.client.state("toy-2", "finished")
        await here.client.act("toy-2", "undeploy")
        await here.down()
        path.write_bytes(whole)
        await here.up(bind=address)
        assert (await status(here)).damaged == []
        info = await here.client.session("toy-1")
        assert (info.state, info.committed) == ("paused", 17)
        for peer in PEERS.values():
            await peer.register()
        await here.client.act("toy-1", "resume")
        await here.client.state("toy-1", "finished")


async def test_a_record_damaged_while_it_runs_is_written_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await here.network()
        await here.create(steps=400, checkpoint_every=10)
        await here.client.until("toy-1", lambda info: info.committed >= 10)
        flip(tmp_path / "store" / RECORDS["session"])
        assert (await here.client.session("toy-1")).state == "running"
        done = await here.client.state("toy-1", "finished")
        assert done.final_hash == await undisturbed(here.store, "toy-1", 400)
        await here.down()
        fresh = Truth(here.store)
        assert [record.state for record in await fresh.sessions()] == ["finished"]
        assert fresh.damaged == {}
        await here.up()


async def test_a_term_damaged_while_it_runs_is_named_and_a_restart_mends_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await here.network()
        await here.create(steps=400, checkpoint_every=10)
        await here.client.until("toy-1", lambda info: info.committed >= 10)
        flip(tmp_path / "store" / TERM_KEY)
        await here.client.until("toy-1", lambda info: info.step >= 60)
        address = here.address
        await here.kill()
        await here.up(bind=address)
        (told,) = (await status(here)).damaged
        assert TERM_KEY in told
        assert here.service.term > TERM_GAP
        done = await here.client.state("toy-1", "finished", 40)
        assert done.final_hash == await undisturbed(here.store, "toy-1", 400)
