"""The running orchestrator over real ZeroMQ, and PNodes that die, hang, refuse and come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.truth import Truth
from storage.checkpoints import read_head, read_manifest
from storage.keys import part_key, session_prefix
from storage.store import StoreUnavailableError
from tests.integration.orchestrator.cluster import PEERS, Cluster, StandIn, cluster, undisturbed
from wire import messages
from wire.ids import new_request_id
from wire.refusals import UNHEALTHY
from wire.requests import RefusedError

STEPS = 120


async def train(here: Cluster, **more: Any) -> messages.SessionInfo:
    """A run that has committed something."""
    await here.network()
    await here.create(**{"steps": STEPS, "checkpoint_every": 10, **more})
    return await here.client.until("toy-1", lambda info: info.committed >= 10)


async def ends_well(here: Cluster, **expected: Any) -> messages.SessionInfo:
    """The run goes on by itself to the end of an undisturbed one."""
    done = await here.client.state("toy-1", "finished", timeout_s=30)
    assert done.final_hash == await undisturbed(here.store, "toy-1", STEPS)
    for name, value in expected.items():
        assert getattr(done, name) == value, name
    return done


async def test_a_killed_pnode(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=3, lease_s=1.0, step_s=0.01) as here:
        running = await train(here)
        victim = running.pnodes[0]
        await PEERS[victim].close()
        done = await ends_well(here, epoch=2, recoveries=1, error="")
        assert victim not in done.pnodes
        texts = [event.text for event in await here.events("toy-1") if event.kind != "progress"]
        begun = next(
            place for place, text in enumerate(texts) if text.startswith(f"recovering: PNode {victim} is lost")
        )
        assert texts[begun + 1].startswith("epoch 2 on ")
        line = next(text for text in texts if text.startswith("recovered in "))
        assert " epoch 2 on " in line
        assert line.endswith((" redone",))
        assert texts.index("running", begun) > begun
        survivor = PEERS[next(pnode for pnode in running.pnodes if pnode != victim)]
        kinds = [type(message) for message in survivor.seen if isinstance(message, messages.Prepare | messages.Release)]
        assert kinds == [messages.Prepare, messages.Prepare], "whoever survives is not released"


async def test_a_frozen_pnode_is_lost_after_lease_and_probe(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=3, lease_s=1.0, step_s=0.01) as here:
        running = await train(here)
        victim = running.pnodes[-1]
        PEERS[victim].freeze()
        event = await here.told("toy-1", "recovering: ")
        assert f"PNode {victim} is lost: no sign of life for 2 s, nor an answer to a probe within 1 s" in event.text
        await ends_well(here, recoveries=1)
        back = PEERS[victim]
        back.stands_still = False
        async with asyncio.timeout(15):
            while back.deployments or back.incarnation < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_pnode_that_says_goodbye(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=3, step_s=0.01) as here:
        running = await train(here)
        await PEERS[running.pnodes[0]].close(goodbye=True)
        await ends_well(here, recoveries=1)


@pytest.mark.parametrize("asked", [{"pnodes": 2}, {"pnodes": 0, "placement": {"fc1": "p1", "fc2": "p2"}}])
async def test_fewer_than_asked_for_if_there_are_no_more(tmp_path: Path, asked: dict[str, Any]) -> None:
    async with cluster(tmp_path, pnodes=2, step_s=0.01) as here:
        await train(here, **asked)
        await PEERS["p2"].close(goodbye=True)
        done = await ends_well(here, pnodes=["p1"])
        told = "2 PNodes were asked for, but 1 can be had" if asked["pnodes"] else "placed by hand on p2 too"
        assert any(told in event.text for event in await here.events("toy-1")), done


async def test_without_room_it_waits_until_a_pnode_joins(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=1, step_s=0.01) as here:
        await train(here, pnodes=1)
        await PEERS["p1"].close(goodbye=True)
        waiting = await here.client.until("toy-1", lambda info: any("room" in line for line in info.waiting))
        assert waiting.state == "recovering"
        assert waiting.waiting[0].startswith("PNodes: room for toy-1: there is no living PNode to place on, for ")
        assert waiting.waiting[0].endswith("(at most 3600 s)")
        begin = asyncio.get_running_loop().time()
        await here.pnode("p2", step_s=0.01)
        await here.client.until("toy-1", lambda info: info.pnodes == ["p2"] and info.state == "running")
        assert asyncio.get_running_loop().time() - begin < 4, "at once, not at the next try"
        await ends_well(here, recoveries=1)


async def test_a_restart_takes_its_place_and_the_old_process_is_fenced(tmp_path: Path) -> None:
    """Field case B20."""
    async with cluster(tmp_path, pnodes=2, lease_s=30.0, step_s=0.01) as here:
        await train(here)
        old = PEERS["p2"]
        old.freeze()
        await here.pnode("p2", step_s=0.01)
        assert PEERS["p2"].incarnation == 2
        await ends_well(here, recoveries=1)
        old.stands_still = False
        with pytest.raises(RefusedError, match="id p2 is already held"):
            await old.register()
        await old.close()


async def test_a_peer_that_is_said_to_be_gone_has_to_answer_at_once(tmp_path: Path) -> None:
    """It takes no lease: the others see it first."""
    async with cluster(tmp_path, pnodes=3, lease_s=5.0, step_s=0.01) as here:
        running = await train(here)
        victim, teller = running.pnodes
        PEERS[victim].freeze()
        begin = asyncio.get_running_loop().time()
        PEERS[teller].fail("toy-1", "", f"PNode {victim} is lost: it restarted", "peer", victim)
        await here.client.until("toy-1", lambda info: info.state == "running" and victim not in info.pnodes)
        assert asyncio.get_running_loop().time() - begin < 4.5
        await ends_well(here, recoveries=1)


async def test_a_peer_that_answers_stays(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=2, lease_s=30.0, step_s=0.01) as here:
        await train(here)
        PEERS["p1"].fail("toy-1", "", "PNode p2 is lost: no answer for 60 s", "peer", "p2")
        done = await ends_well(here, recoveries=1)
        assert sorted(done.pnodes) == ["p1", "p2"]
        assert (await here.pnodes())["p2"].incarnation == 1


@pytest.mark.parametrize("by", ["heartbeat", "run"])
async def test_a_pnode_that_can_not_compute_is_left_out(tmp_path: Path, by: str) -> None:
    """Field case B26."""
    async with cluster(tmp_path, pnodes=3, step_s=0.01) as here:
        running = await train(here)
        victim = PEERS[running.pnodes[0]]
        if by == "heartbeat":
            victim.compute = "dead"
            async with asyncio.timeout(10):
                while not (await here.pnodes())[victim.name].health:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        victim.fail("toy-1", "", "the compute thread is dead: F3", "compute")
        done = await ends_well(here, recoveries=1)
        assert victim.name not in done.pnodes
        info = (await here.pnodes())[victim.name]
        assert (info.state, info.vnodes) == ("alive", 0)
        assert info.health.endswith("the compute thread is dead: F3" if by == "run" else "its compute thread is dead")
        await victim.close()
        fresh = await here.pnode(victim.name)
        assert fresh.incarnation == 2
        assert (await here.pnodes())[victim.name].health == ""


async def test_two_faults_at_once(tmp_path: Path) -> None:
    """Field case B31: the replacement dies while it prepares."""
    async with cluster(tmp_path, pnodes=4, lease_s=1.0, step_s=0.01) as here:
        running = await train(here, pnodes=2)
        for name, peer in PEERS.items():
            if name not in running.pnodes:
                peer.silent |= {messages.Prepare}
        await PEERS[running.pnodes[0]].close(goodbye=True)
        preparing = await here.client.until(
            "toy-1", lambda info: any("prepare its VNodes" in line for line in info.waiting)
        )
        spare = next(pnode for pnode in preparing.pnodes if pnode not in running.pnodes)
        for peer in PEERS.values():
            peer.silent.clear()
        await PEERS[spare].close(goodbye=True)
        await ends_well(here, recoveries=2, epoch=3)


async def test_a_pnode_that_keeps_refusing_to_prepare(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        PEERS["p2"].refusing |= {messages.Prepare}
        await here.create()
        failed = await here.client.state("toy-1", "failed")
        assert failed.error == "p2: told to refuse"
        assert failed.hint == "ask the test"
        prepares = [message for message in PEERS["p2"].seen if isinstance(message, messages.Prepare)]
        assert [message.epoch for message in prepares] == [1, 2, 3]
        async with asyncio.timeout(5):
            while PEERS["p1"].deployments:  # noqa: ASYNC110 - what was prepared is released
                await asyncio.sleep(0.05)
        PEERS["p2"].refusing.clear()
        await here.client.act("toy-1", "resume")
        await here.client.state("toy-1", "finished")


async def test_a_pnode_that_refuses_because_it_can_not_compute_is_left_out(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=3) as here:
        await here.network()
        PEERS["p2"].refusing, PEERS["p2"].refusal = {messages.Prepare}, UNHEALTHY
        await here.create(placement={"fc1": "p1", "act": "p2", "fc2": "p2", "loss": "p2"})
        done = await here.client.state("toy-1", "finished")
        assert "p2" not in done.pnodes
        assert (await here.pnodes())["p2"].health == "told to refuse"
        prepares = [message for message in PEERS["p2"].seen if isinstance(message, messages.Prepare)]
        assert [message.epoch for message in prepares] == [1]


async def test_a_damaged_part_of_the_head_is_passed_over_loudly(tmp_path: Path) -> None:
    """A bit of the newest checkpoint flipped: the run goes on from the one before."""
    async with cluster(tmp_path, step_s=0.01) as here:
        await train(here, until=50, keep=3)
        await here.client.state("toy-1", "paused")
        await here.client.act("toy-1", "undeploy")
        prefix = session_prefix("toy", "toy-1")
        head = await read_head(here.store, prefix)
        assert head is not None
        manifest = await read_manifest(here.store, prefix, head.manifest_key, head.manifest_digest)
        key = part_key(prefix, manifest.parts[0].digest)
        path = tmp_path / "store" / key
        damaged = bytearray(path.read_bytes())
        damaged[0] ^= 1
        path.write_bytes(damaged)
        for peer in PEERS.values():
            peer.refusing, peer.refusal = {messages.Prepare}, "checkpoint"
        await here.client.act("toy-1", "resume")
        event = await here.told("toy-1", "the checkpoint of step 50 is damaged")
        assert event.kind == "warning"
        assert key in event.text
        for peer in PEERS.values():
            peer.refusing.clear()
        await here.told("toy-1", ", from step 40")
        done = await ends_well(here)
        assert done.committed == STEPS
        manifests = await read_head(here.store, prefix)
        assert manifests is not None
        assert manifests.step == STEPS


class Away:
    """A store that does not answer for a while, for whoever writes heads and records."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.away = False
        self.slow_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailableError("the store went away", hint="wait")

    async def get(self, *args: Any, **more: Any) -> Any:
        self._check()
        return await self._store.get(*args, **more)

    async def put(self, *args: Any, **more: Any) -> Any:
        self._check()
        return await self._store.put(*args, **more)

    async def put_if_match(self, *args: Any, **more: Any) -> Any:
        self._check()
        await asyncio.sleep(self.slow_s)
        return await self._store.put_if_match(*args, **more)


def make_away(here: Cluster) -> Away:
    store = Away(here.service.store)
    here.service.store = store  # type: ignore[assignment]
    here.service.truth._store = store  # type: ignore[assignment]
    for driver in here.service.sessions.values():
        driver.cutting.committer._store = store  # type: ignore[assignment]
    return store


async def test_a_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await train(here)
        store = make_away(here)
        store.away = True
        waiting = await here.client.until("toy-1", lambda info: any("store: commit" in line for line in info.waiting))
        assert waiting.waiting[0].startswith("store: commit of step ")
        await here.client.until("toy-1", lambda info: ": the store went away, for " in info.waiting[0])
        committed = waiting.committed
        await here.client.until("toy-1", lambda info: info.step == STEPS)
        await asyncio.sleep(1.0)
        assert (await here.client.session("toy-1")).committed == committed
        store.away = False
        await ends_well(here, recoveries=0)


async def test_a_loss_while_the_store_is_away(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=3, step_s=0.01) as here:
        running = await train(here)
        store = make_away(here)
        store.away = True
        await PEERS[running.pnodes[0]].close(goodbye=True)
        waiting = await here.client.until(
            "toy-1", lambda info: any(line.startswith("store: ") and "went away" in line for line in info.waiting)
        )
        assert waiting.state == "recovering"
        store.away = False
        await ends_well(here, recoveries=1)


ACTIONS = [("start", "created", {"starting", "running"}), ("pause", "running", {"pausing", "paused"}),
           ("resume", "paused", {"starting", "running"}), ("stop", "running", {"stopping", "stopped"})]  # fmt: skip


class TestAnswers:
    """What was answered is durable: no crash takes it back."""

    async def stored(self, here: Cluster) -> str:
        """The state that an orchestrator would find that began now."""
        (record,) = await Truth(here.store).sessions()
        return record.state

    async def ready(self, here: Cluster, state: str) -> None:
        await here.network()
        await here.create(
            steps=5000, checkpoint_every=10, start=state != "created", until=20 if state == "paused" else 0
        )
        await here.client.state("toy-1", state)

    @pytest.mark.parametrize(("action", "before", "after"), ACTIONS)
    async def test_they_come_when_the_record_is_stored(
        self, tmp_path: Path, action: str, before: str, after: set[str]
    ) -> None:
        async with cluster(tmp_path, step_s=0.02) as here:
            await self.ready(here, before)
            make_away(here).slow_s = 0.5
            await here.client.act("toy-1", action)
            assert await self.stored(here) in after

    @pytest.mark.parametrize(("action", "before", "after"), ACTIONS)
    async def test_while_nothing_can_be_stored_they_say_so(
        self, tmp_path: Path, action: str, before: str, after: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orchestrator.driver.DURABLE_S", 1.0)
        monkeypatch.setattr("orchestrator.driver.WRITE_PAUSE_S", 0.1)
        async with cluster(tmp_path, step_s=0.02) as here:
            await self.ready(here, before)
            store = make_away(here)
            store.away = True
            with pytest.raises(
                RefusedError, match="that could not be stored within 1 s: the store went away"
            ) as caught:
                await here.client.act("toy-1", action)
            assert caught.value.code == "unavailable"
            assert await self.stored(here) not in after
            store.away = False
            await here.client.act("toy-1", action)
            assert await self.stored(here) in after

    @pytest.mark.parametrize("killed", [False, True])
    async def test_a_run_that_could_not_be_stored_does_not_begin(
        self, tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or it would train on while the store says that it is paused, should the orchestrator die."""
        monkeypatch.setattr("orchestrator.driver.DURABLE_S", 1.0)
        monkeypatch.setattr("orchestrator.driver.WRITE_PAUSE_S", 0.1)
        async with cluster(tmp_path, step_s=0.02) as here:
            await self.ready(here, "paused")
            store = make_away(here)
            store.away = True
            text = "toy-1 is not started yet, since that could not be stored within 1 s: the store went away"
            with pytest.raises(RefusedError, match=text):
                await here.client.act("toy-1", "resume")
            info = await here.client.session("toy-1")
            assert info.state == "starting"
            assert info.waiting[0].startswith("store: its record, before the run begins: the store went away, for ")
            if killed:
                address = here.address
                await here.kill()
                await here.up(bind=address)
                info = await here.client.until("toy-1", lambda info: info.deployed)
                assert info.state == "paused"
            assert {peer.steps["toy-1"] for peer in PEERS.values()} == {20}
            assert {peer.states["toy-1"] for peer in PEERS.values()} == {"held"}
            store.away = False
            if killed:
                await here.client.act("toy-1", "resume")
            await here.client.until("toy-1", lambda info: info.state == "running" and info.step > 20)

    async def test_a_pause_while_it_starts(self, tmp_path: Path) -> None:
        async with cluster(tmp_path, step_s=0.02) as here:
            await here.network()
            PEERS["p1"].silent.add(messages.Prepare)
            await here.create(steps=5000)
            await here.client.act("toy-1", "pause")
            (record,) = await Truth(here.store).sessions()
            assert (record.state, record.hold) == ("starting", True)


@pytest.mark.parametrize(("state", "shown"), [("preparing", True), ("running", True), ("failed", False)])
async def test_why_a_pnode_could_not_prepare_is_no_wait(tmp_path: Path, state: str, shown: bool) -> None:
    async with cluster(tmp_path, step_s=0.02) as here:
        running = await train(here, steps=5000)
        beat = messages.SessionBeat("toy-1", running.epoch, 10, state, "the compute thread", 41.0, limit_s=60.0)
        sender = PEERS["p1"].bus.me
        PEERS["p1"].stands_still = True
        here.service._on_message(sender, messages.Heartbeat("p1", 1, 1, [beat], 1, 0.0, "idle", 0.0), [])
        told = "p1 waits for the compute thread, for 41 s (at most 60 s)"
        assert (told in (await here.client.session("toy-1")).waiting) == shown


class TestRebalance:
    async def ask(self, here: Cluster, *, apply: bool) -> messages.RebalanceInfo:
        return await here.client.ask(messages.Rebalance(str(new_request_id()), "toy-1", apply), messages.RebalanceInfo)

    async def test_what_a_pnode_that_joined_would_gain_and_then_gains(self, tmp_path: Path) -> None:
        async with cluster(tmp_path, pnodes=1, step_s=0.02) as here:
            await here.network()
            await here.create(steps=STEPS, checkpoint_every=10, pnodes=1)
            await here.client.until("toy-1", lambda info: info.committed >= 10)
            same = await self.ask(here, apply=True)
            assert (same.gain, same.moved, same.moved_bytes, same.applied) == (1.0, {}, 0, False)
            PEERS["p2"] = fast = StandIn("p2", here.address, here.store, step_s=0.02)
            fast.flops = 1e13
            await fast.start()
            found = await self.ask(here, apply=False)
            assert set(found.present.placement.values()) == {"p1"}
            assert set(found.best.placement.values()) == {"p2"}
            assert found.gain > 1
            assert found.gain == pytest.approx(found.present.step_s / found.best.step_s)
            assert found.moved == found.best.placement
            assert found.moved_bytes == 4 * (8 * 16 + 16 + 16 * 4 + 4), "float32, and sgd keeps nothing else"
            assert not found.applied
            assert (await here.client.session("toy-1")).pnodes == ["p1"]
            assert (await self.ask(here, apply=True)).applied
            moved = await here.client.until("toy-1", lambda info: info.pnodes == ["p2"] and info.state == "running")
            assert (moved.epoch, moved.recoveries) == (2, 0)
            await ends_well(here)

    async def test_only_of_what_is_deployed(self, tmp_path: Path) -> None:
        async with cluster(tmp_path) as here:
            await here.network()
            await here.create(start=False)
            with pytest.raises(RefusedError, match="toy-1 is not deployed"):
                await self.ask(here, apply=False)
            with pytest.raises(RefusedError, match="no action 'rebalance'"):
                await here.client.act("toy-1", "rebalance")
