"""Field case B22: orchestrators that end, come back, stand still, and meet another one; over real ZeroMQ."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events
from orchestrator.records import SessionRecord, session_key
from orchestrator.truth import SupersededError, Truth
from storage.local import LocalStore
from storage.sealed import read_sealed
from tests.integration.orchestrator.cluster import PEERS, Cluster, cluster, undisturbed
from wire import messages
from wire.ids import new_request_id
from wire.messages import PeerRef
from wire.requests import RefusedError

STEPS = 150


async def train(here: Cluster, **more: Any) -> messages.SessionInfo:
    """A run that has committed something."""
    await here.network()
    await here.create(**{"steps": STEPS, "checkpoint_every": 10, **more})
    return await here.client.until("toy-1", lambda info: info.committed >= 10)


async def again(here: Cluster, *, wiped: bool = False, kill: bool = True) -> None:
    """The orchestrator ends and another one begins at its address."""
    address = here.address
    await (here.kill() if kill else here.down())
    if wiped:
        for leftover in (here.folder / "home").glob("registry.sqlite*"):
            leftover.unlink()
    await here.up(bind=address)


async def ends_well(here: Cluster, **expected: Any) -> messages.SessionInfo:
    """The run goes on by itself to the end of an undisturbed one."""
    done = await here.client.state("toy-1", "finished", timeout_s=30)
    assert done.final_hash == await undisturbed(here.store, "toy-1", STEPS)
    for name, value in expected.items():
        assert getattr(done, name) == value, name
    return done


@pytest.mark.parametrize("how", ["killed", "stopped", "killed and wiped"])
async def test_a_run_goes_on_in_its_epoch_under_a_new_orchestrator(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        before = await train(here)
        await again(here, kill=how != "stopped", wiped="wiped" in how)
        info = await here.client.session("toy-1")
        assert info.state == "running"
        assert info.committed >= before.committed
        await ends_well(here, epoch=1, recoveries=0, error="")
        found = await here.client.ask(messages.AskCluster(str(new_request_id())), messages.ClusterInfo)
        assert found.term == 2
        for peer in PEERS.values():
            kinds = [type(message) for message in peer.seen]
            assert kinds.count(messages.Prepare) == 1, "nothing was deployed anew"
            assert messages.Release not in kinds
            assert peer.incarnation == 1
        told = await here.events("toy-1")
        assert any("taken over by the orchestrator of term 2: epoch 1 on" in event.text for event in told)
        steps = [report.step for event in told for report in event.steps]
        assert len(steps) == len(set(steps)), "no step is told twice"
        assert steps[-1] == STEPS
        if how == "stopped":
            assert sorted(steps) == list(range(1, STEPS + 1))


async def test_it_says_whom_it_waits_for(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await train(here, steps=5000)
        PEERS["p2"].freeze()
        await again(here)
        info = await here.client.until(
            "toy-1", lambda info: any(line.startswith("p2: take-over of toy-1") for line in info.waiting)
        )
        assert info.waiting[0].endswith("(at most 9 s)")


async def test_a_pnode_dies_while_there_is_no_orchestrator(tmp_path: Path) -> None:
    async with cluster(tmp_path, lease_s=1.0, pnodes=3, step_s=0.01) as here:
        running = await train(here)
        address = here.address
        await here.kill()
        victim = running.pnodes[0]
        await PEERS[victim].close()
        await here.up(bind=address)
        done = await ends_well(here, epoch=2, recoveries=1)
        assert victim not in done.pnodes
        assert any(f"{victim} did not come back" in event.text for event in await here.events("toy-1"))


async def test_a_pnode_was_restarted_while_there_was_no_orchestrator(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await train(here)
        address = here.address
        await here.kill()
        await PEERS["p2"].close()
        await here.up(bind=address)
        await here.pnode("p2", step_s=0.01)
        await ends_well(here, epoch=2, recoveries=1)
        assert PEERS["p2"].incarnation == 2


async def test_it_dies_while_a_session_recovers(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=3, lease_s=1.0, step_s=0.01) as here:
        running = await train(here)
        for peer in PEERS.values():
            peer.silent |= {messages.Prepare}
        await PEERS[running.pnodes[0]].close(goodbye=True)
        await here.client.until("toy-1", lambda info: any("prepare its VNodes" in line for line in info.waiting))
        for peer in PEERS.values():
            peer.silent.clear()
        await again(here)
        await ends_well(here, epoch=3, recoveries=2)


async def test_what_rests_deployed_stays_deployed(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.005) as here:
        await train(here, until=50)
        await here.client.state("toy-1", "paused")
        await again(here)
        info = await here.client.until("toy-1", lambda info: info.deployed)
        assert (info.state, info.step, info.committed, info.epoch) == ("paused", 50, 50, 1)
        await here.client.act("toy-1", "resume")
        await ends_well(here, epoch=1)
        await again(here)
        info = await here.client.until("toy-1", lambda info: info.deployed)
        assert info.state == "finished"
        found = await here.client.ask(messages.AskDeployment(str(new_request_id()), "toy"), messages.DeploymentInfo)
        assert found.session == "toy-1"
        assert sorted(found.peers) == ["p1", "p2"]


async def test_what_rests_and_does_not_come_back_is_quietly_taken_down(tmp_path: Path) -> None:
    async with cluster(tmp_path, lease_s=0.5, step_s=0.005) as here:
        await train(here, until=50)
        await here.client.state("toy-1", "paused")
        address = here.address
        await here.kill()
        await PEERS["p2"].close()
        await here.up(bind=address)
        await here.told("toy-1", "not deployed any more: p2 did not come back")
        info = await here.client.session("toy-1")
        assert (info.state, info.deployed, info.error) == ("paused", False, "")
        async with asyncio.timeout(10):
            while PEERS["p1"].deployments:  # noqa: ASYNC110 - it is told to release
                await asyncio.sleep(0.05)


async def test_cuts_that_were_saved_without_an_orchestrator_are_committed(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        before = await train(here)
        address = here.address
        await here.kill()
        async with asyncio.timeout(15):
            while PEERS["p1"].steps["toy-1"] < before.step + 40:  # noqa: ASYNC110 - training goes on by itself
                await asyncio.sleep(0.02)
        assert len(PEERS["p1"].cuts["toy-1"]) >= 3
        await here.up(bind=address)
        await ends_well(here, epoch=1)
        committed = [event.step for event in await here.events("toy-1") if event.kind == "committed"]
        assert committed == sorted(set(committed))


@pytest.mark.parametrize("loss", ["wiped", "damaged"])
async def test_the_registry_is_rebuilt_from_the_store(tmp_path: Path, loss: str) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(until=17)
        await here.client.state("toy-1", "paused")
        address = here.address
        await here.down()
        path = tmp_path / "home" / "registry.sqlite"
        for leftover in path.parent.glob("registry.sqlite*"):
            leftover.unlink()
        if loss == "damaged":
            path.write_bytes(b"broken" * 1000)
        await here.up(bind=address)
        info = await here.client.session("toy-1")
        assert (info.state, info.step, info.committed, info.epoch) == ("paused", 17, 17, 1)
        names = await here.client.ask(messages.ListNetworks(str(new_request_id())), list[messages.NetworkInfo])
        assert [name.network for name in names] == ["toy"]
        for peer in PEERS.values():
            await peer.register()
            assert peer.incarnation == 1
        await here.client.act("toy-1", "resume")
        await here.client.state("toy-1", "finished")


async def test_a_create_asked_again_after_a_restart_makes_one_session(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        data = await here.data()
        ask = messages.CreateSession("same-id", "toy", data, "", "d", 40, 0, start=False)
        first = await here.client.ask(ask, messages.SessionInfo)
        again = await here.client.ask(ask, messages.SessionInfo)
        assert first.session == again.session == "toy-1"
        address = here.address
        await here.down()
        await here.up(bind=address)
        later = await here.client.ask(ask, messages.SessionInfo)
        assert later.session == "toy-1"
        everyone = await here.client.ask(messages.ListSessions(str(new_request_id())), list[messages.SessionInfo])
        assert len(everyone) == 1


async def test_a_newer_orchestrator_on_the_store_ends_the_older_one_by_itself(tmp_path: Path) -> None:
    """Field case B42 (a): nobody has to do anything for it."""
    async with cluster(tmp_path, step_s=0.01) as here:
        await train(here, steps=5000)
        newer = Truth(here.store)
        await newer.raise_term(PeerRef("orchestrator", 9, ["tcp://elsewhere:7700"]))
        assert here._run is not None
        with pytest.raises(SupersededError, match="superseded by term 2 at tcp://elsewhere:7700"):
            await asyncio.wait_for(asyncio.shield(here._run), 5)
        here._run = None


@pytest.mark.parametrize("claimed", [True, False])
async def test_a_newer_orchestrator_is_found_out_by_the_next_write(tmp_path: Path, claimed: bool) -> None:
    """Also by one that the store takes, before anybody is told of it."""
    async with cluster(tmp_path, lease_s=60.0) as here:
        await here.network()
        await here.create(start=False)
        newer = Truth(here.store)
        await newer.raise_term(PeerRef("orchestrator", 9, ["tcp://elsewhere:7700"]))
        if claimed:
            await newer.claim((await newer.sessions())[0])
        with pytest.raises(RefusedError, match="superseded by term 2 at tcp://elsewhere:7700") as caught:
            await here.client.act("toy-1", "start")
        assert caught.value.code == "superseded"
        assert here._run is not None
        with pytest.raises(SupersededError):
            await asyncio.wait_for(asyncio.shield(here._run), 10)
        here._run = None
        assert not any(peer.deployments for peer in PEERS.values())


async def test_one_that_is_overtaken_while_it_begins_writes_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the newer one has written already: that this fits its conditional writes is no leave to write."""
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(start=False)
        address = here.address
        await here.kill()
        sessions = Truth.sessions

        async def overtaken(truth: Truth) -> list[SessionRecord]:
            monkeypatch.undo()
            newer = Truth(here.store)
            await newer.raise_term(PeerRef("orchestrator", 9, ["tcp://elsewhere:7700"]))
            await newer.claim((await newer.sessions())[0])
            return await sessions(truth)

        monkeypatch.setattr(Truth, "sessions", overtaken)
        with pytest.raises(SupersededError, match="superseded by term 3 at tcp://elsewhere:7700"):
            await here.up(bind=address)
        record, _ = await read_sealed(here.store, session_key("toy-1"), SessionRecord)
        assert record.term == 3


class Clock:
    """A clock that a test can set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


async def test_one_that_stood_still_says_nothing_before_it_has_looked_at_the_term(tmp_path: Path) -> None:
    """SIGSTOP for a minute, and another one took over meanwhile."""
    async with cluster(tmp_path, step_s=0.01, clock=(clock := Clock())) as here:
        await train(here, steps=5000)
        old, store = here.service, LocalStore(tmp_path / "store")
        newer = Truth(store)
        await newer.raise_term()
        clock.ahead += 60.0
        for peer in PEERS.values():
            peer.seen.clear()
        old.sessions["toy-1"].feed(events.MemberLost("p1", 1, "no sign of life for 60 s"))
        old._on_message(PEERS["p1"].bus.me, messages.Heartbeat("p1", 1, 1, [], 1, 0.0, "idle", 0.0), [])
        assert here._run is not None
        with pytest.raises(SupersededError):
            await asyncio.wait_for(asyncio.shield(here._run), 10)
        here._run = None
        assert old.sessions["toy-1"].session.state.value == "running", "what it heard decided nothing"
        assert [message for peer in PEERS.values() for message in peer.seen] == []


async def test_one_that_stood_still_and_is_alone_goes_on_and_blames_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01, clock=(clock := Clock())) as here:
        await train(here)
        clock.ahead += 60.0
        await ends_well(here, epoch=1, recoveries=0)
        assert {info.state for info in (await here.pnodes()).values()} == {"alive"}


async def test_a_pnode_that_knows_a_higher_term_makes_it_look(tmp_path: Path) -> None:
    async with cluster(tmp_path, lease_s=60.0, step_s=0.01) as here:
        await train(here, steps=5000)
        newer = Truth(here.store)
        await newer.raise_term()
        PEERS["p1"].term = 2
        assert here._run is not None
        with pytest.raises(SupersededError):
            await asyncio.wait_for(asyncio.shield(here._run), 5)
        here._run = None
