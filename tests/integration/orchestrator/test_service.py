"""The running orchestrator over real ZeroMQ: sessions from creation to removal, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events
from orchestrator.records import SESSIONS_PREFIX, SessionRecord, session_key
from orchestrator.registry import Registry
from storage.checkpoints import read_head
from storage.keys import session_prefix
from storage.sealed import read_sealed
from storage.store import StoreUnavailableError
from tests.integration.orchestrator.cluster import PEERS, StandIn, cluster, network_bytes
from wire import messages
from wire.ids import new_request_id
from wire.requests import RefusedError


async def test_trains_to_the_end_and_commits(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        info = await here.network()
        assert (info.vnodes, info.parameters) == (4, 8 * 16 + 16 + 16 * 4 + 4)
        session = await here.create(checkpoint_every=10)
        assert session.session == "toy-1"
        done = await here.client.state("toy-1", "finished")
        assert (done.step, done.committed, done.until, done.deployed) == (40, 40, 40, True)
        assert done.loss == pytest.approx(1 / 40)
        assert sorted(done.pnodes) == ["p1", "p2"]
        head = await read_head(here.store, session_prefix("toy", "toy-1"))
        assert head is not None
        assert (head.step, head.hash, head.epoch) == (40, done.final_hash, 1)
        prefix = session_prefix("toy", "toy-1") + "manifests/"
        async with asyncio.timeout(10):
            while len([entry.key async for entry in here.store.list(prefix)]) != 3:  # noqa: ASYNC110 - keep 3
                await asyncio.sleep(0.02)
        committed = [message.step for message in PEERS["p1"].seen if isinstance(message, messages.Committed)]
        assert committed == [10, 20, 30, 40]


async def test_the_newest_is_last_though_the_clock_is_set_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=0) as here:
        await here.network()
        names = [f"toy-{number}" for number in range(8, 12)]
        for name, wall in zip(names, (2000.0, 2000.0, 1000.0, 500.0), strict=True):
            here.service.wall = lambda wall=wall: wall  # type: ignore[misc]
            await here.create(name=name, start=False)
        request = messages.ListSessions(str(new_request_id()))
        found = await here.client.ask(request, list[messages.SessionInfo])
        assert [info.session for info in found] == names
        assert max(found, key=lambda info: info.created).session == names[-1]
        assert found[-1].created == pytest.approx(2000.0)


async def test_a_client_that_attaches_later_sees_the_whole_course(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create()
        await here.client.state("toy-1", "finished")
        watch = messages.WatchSession(str(new_request_id()), "toy-1", 0, 0.0)
        seen = await here.client.ask(watch, messages.WatchInfo)
        assert [report.step for event in seen.events for report in event.steps] == list(range(1, 41))
        kinds = [event.kind for event in seen.events if event.kind != "progress"]
        assert kinds[:3] == ["state", "state", "placement"]
        assert seen.events[-1].text.startswith("finished")
        texts = [event.text for event in seen.events if event.kind == "placement"]
        assert texts[0].startswith("epoch 1 on p")


async def test_watching_waits_for_the_next_event(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(start=False)
        first = await here.client.ask(messages.WatchSession(str(new_request_id()), "toy-1", 0, 5.0), messages.WatchInfo)
        last = first.events[-1].seq
        waiting = asyncio.ensure_future(
            here.client.ask(messages.WatchSession(str(new_request_id()), "toy-1", last, 10.0), messages.WatchInfo)
        )
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await here.client.act("toy-1", "stop")
        assert (await waiting).events[0].text == "stopped"
        empty = await here.client.ask(
            messages.WatchSession(str(new_request_id()), "toy-1", 99, 0.2), messages.WatchInfo
        )
        assert empty.events == []


async def test_until_pause_resume_and_stop(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await here.network()
        await here.create(until=17, steps=4000)
        paused = await here.client.state("toy-1", "paused")
        assert (paused.step, paused.committed, paused.epoch) == (17, 17, 1)
        await here.client.act("toy-1", "resume")
        await here.client.until("toy-1", lambda info: info.step > 25)
        await here.client.act("toy-1", "pause")
        paused = await here.client.state("toy-1", "paused")
        assert paused.committed == paused.step > 25
        await here.client.act("toy-1", "undeploy")
        assert not (await here.client.session("toy-1")).deployed
        await here.client.act("toy-1", "resume")
        await here.client.until("toy-1", lambda info: info.state == "running" and info.step > paused.step + 5)
        assert (await here.client.session("toy-1")).epoch == 2
        assert PEERS["p1"].deployments["toy-1"].start_step == paused.step
        assert PEERS["p1"].deployments["toy-1"].manifest_key
        await here.client.act("toy-1", "stop")
        stopped = await here.client.state("toy-1", "stopped")
        assert stopped.committed == stopped.step
        await asyncio.sleep(0.2)
        assert PEERS["p1"].deployments == {}


async def test_several_networks_at_once_know_nothing_of_each_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        for name, width in (("toy", 16), ("other", 24)):
            await here.network(name, width)
        await here.create("toy", steps=4000)
        await here.create("other", steps=4000)
        await asyncio.gather(*(here.client.until(f"{name}-1", lambda info: info.step > 3) for name in ("toy", "other")))
        PEERS["p1"].fail("toy-1", "fc1", "boom")
        failed = await here.client.state("toy-1", "failed")
        assert "p1, VNode fc1" in failed.error
        assert "boom" in failed.error
        before = (await here.client.session("other-1")).step
        await here.client.until("other-1", lambda info: info.step > before + 10)
        await here.client.ask(messages.RemoveNetwork(str(new_request_id()), "toy"), messages.NetworkInfo)
        assert [key async for key in here.store.list("networks/toy/")] == []
        infos = await here.client.ask(messages.ListNetworks(str(new_request_id())), list[messages.NetworkInfo])
        assert [info.network for info in infos] == ["other"]
        assert (await here.client.session("other-1")).state == "running"


async def test_a_frozen_pnode_is_suspected_then_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, lease_s=0.6) as here:
        await here.network()
        PEERS["p2"].freeze()

        async def state() -> str:
            infos = await here.client.ask(messages.ListPNodes(str(new_request_id())), list[messages.PNodeInfo])
            return next(info.state for info in infos if info.pnode == "p2")

        seen = []
        async with asyncio.timeout(10):
            while not seen or seen[-1] != "lost":
                seen.append(await state())
                await asyncio.sleep(0.05)
        assert "suspect" in seen
        with pytest.raises(RefusedError, match="2 PNodes were asked for, but 1 are alive"):
            await here.client.ask(messages.PlanNetwork(str(new_request_id()), "toy", 2), messages.PlanInfo)


async def test_a_second_claim_to_a_held_id_is_refused_within_two_seconds(tmp_path: Path) -> None:
    """Field case B03."""
    async with cluster(tmp_path, step_s=0.01) as here:
        await here.network()
        await here.create(steps=5000)
        await here.client.until("toy-1", lambda info: info.step > 3)
        second = StandIn("p1", here.address, here.store)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(RefusedError, match=r"id p1 is already held by tcp://.*, since 20"):
            await second.start(beats=False)
        assert asyncio.get_running_loop().time() - begin < 2
        await second.close()
        step = (await here.client.session("toy-1")).step
        await here.client.until("toy-1", lambda info: info.step > step + 5)
        infos = await here.client.ask(messages.ListPNodes(str(new_request_id())), list[messages.PNodeInfo])
        assert infos[0].incarnation == 1


async def test_a_silent_holder_loses_its_id(tmp_path: Path) -> None:
    async with cluster(tmp_path, lease_s=30) as here:
        PEERS["p1"].silent |= {messages.InspectRun}
        second = StandIn("p1", here.address, here.store)
        begin = asyncio.get_running_loop().time()
        await second.start(beats=False)
        assert 0.9 < asyncio.get_running_loop().time() - begin < 3
        assert second.incarnation == 2
        await second.close()


async def test_nothing_is_shown_as_committed_before_all_parts_are_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        PEERS["p2"].save_parts = False
        await here.create()
        info = await here.client.until("toy-1", lambda info: info.step == 40 and bool(info.waiting))
        assert info.state == "running"
        assert info.committed == 0
        assert any("commit of step 40" in line for line in info.waiting)
        assert [line for line in info.waiting if line.startswith("p2: parts of step 40, for ")]
        assert all(" s (at most " in line for line in info.waiting)
        assert await read_head(here.store, session_prefix("toy", "toy-1")) is None


async def test_forward_requests_and_inspection_find_the_deployment(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        with pytest.raises(RefusedError, match="toy is not deployed"):
            await here.client.ask(messages.AskDeployment(str(new_request_id()), "toy"), messages.DeploymentInfo)
        await here.create()
        await here.client.state("toy-1", "finished")
        await here.create(start=False)
        for name in ("toy", "toy-1"):
            found = await here.client.ask(messages.AskDeployment(str(new_request_id()), name), messages.DeploymentInfo)
            assert found.session == "toy-1"
            assert set(found.placement) == {"fc1", "act", "fc2", "loss"}
            assert all(found.peers[pnode].addresses for pnode in found.placement.values())
        reports = await here.client.ask(
            messages.InspectSession(str(new_request_id()), "toy-1"), list[messages.VNodeReport]
        )
        assert [report.vnode for report in reports] == ["fc1", "act", "fc2", "loss"]
        assert {report.step for report in reports} == {40}
        await here.client.act("toy-2", "deploy")
        await here.client.until("toy-2", lambda info: info.deployed)
        found = await here.client.ask(messages.AskDeployment(str(new_request_id()), "toy"), messages.DeploymentInfo)
        assert found.session == "toy-2", "the newest"


async def test_a_deployed_network_is_removed_only_by_force(tmp_path: Path) -> None:
    async with cluster(tmp_path, step_s=0.01) as here:
        await here.network()
        await here.create(steps=5000)
        await here.client.until("toy-1", lambda info: info.step > 2)
        with pytest.raises(RefusedError, match="toy is deployed: toy-1"):
            await here.client.ask(messages.RemoveNetwork(str(new_request_id()), "toy"), messages.NetworkInfo)
        with pytest.raises(RefusedError, match="can't be removed: it is running"):
            await here.client.act("toy-1", "remove")
        await here.client.ask(messages.RemoveNetwork(str(new_request_id()), "toy", True), messages.NetworkInfo)
        assert [entry.key async for entry in here.store.list("networks/")] == []
        assert all(peer.deployments == {} for peer in PEERS.values())
        await here.network()
        await here.create()
        done = await here.client.state("toy-1", "finished")
        assert done.epoch == 2, "no epoch is used twice, though the id is"


class Slow:
    """A store that deletes one prefix only when it is told to; or whose deletes and writes fail."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def delete(self, key: str) -> None:
        if self.broken:
            raise StoreUnavailableError("the disk is on fire", key=key, hint="put it out")
        self.waiting.set()
        await self.go.wait()
        await self._store.delete(key)


async def test_nothing_of_a_removed_session_is_written_again(tmp_path: Path) -> None:
    """While it is being deleted its name is taken, it can't be resumed, and cuts under way are not committed."""
    async with cluster(tmp_path, step_s=0.02) as here:
        await here.network()
        await here.create(steps=5000, checkpoint_every=2)
        await here.client.until("toy-1", lambda info: info.committed > 2)
        slow = Slow(here.service.truth._store)
        here.service.truth._store = slow
        driver = here.service.sessions["toy-1"]
        driver.feed(events.Acted("remove", force=True))
        await asyncio.wait_for(slow.waiting.wait(), 5)
        with pytest.raises(RefusedError, match="is being removed"):
            await here.client.act("toy-1", "resume")
        with pytest.raises(RefusedError, match="there is a session toy-1 already"):
            await here.create(name="toy-1")
        slow.go.set()
        await driver.removed()
        await asyncio.sleep(0.5)
        assert [entry.key async for entry in here.store.list("networks/")] == []
        assert [entry.key async for entry in here.store.list(SESSIONS_PREFIX)] == []
        assert (await here.create(name="toy-1")).state == "starting"


async def test_a_removal_that_fails_is_said_and_can_be_tried_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create()
        await here.client.state("toy-1", "finished")
        slow = Slow(here.service.truth._store)
        here.service.truth._store, slow.broken = slow, True
        with pytest.raises(RefusedError, match="the disk is on fire"):
            await here.client.act("toy-1", "remove")
        assert (await here.client.session("toy-1")).state == "finished"
        with pytest.raises(RefusedError, match="the disk is on fire"):
            await here.client.ask(messages.RemoveNetwork(str(new_request_id()), "toy", True), messages.NetworkInfo)
        assert here.service.networks.keys() == {"toy"}
        slow.broken = False
        slow.go.set()
        await here.client.ask(messages.RemoveNetwork(str(new_request_id()), "toy", True), messages.NetworkInfo)
        assert [entry.key async for entry in here.store.list("networks/")] == []


class Late:
    """A store that gives no answer to the write of an epoch, and carries it out when the next write comes."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.late: tuple[str, bytes, str] | None = None
        self.happened = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        if self.late is not None:
            late, self.late = self.late, None
            await self._store.put_if_match(*late)
        elif not self.happened.is_set() and b'"placement":{"' in data:
            self.late = (key, data, etag)
            self.happened.set()
            raise StoreUnavailableError("no answer in time", key=key)
        return str(await self._store.put_if_match(key, data, etag))


async def test_a_late_write_of_ones_own_is_no_former_orchestrators(tmp_path: Path) -> None:
    """It came to rest before its epoch was durable; that the store has the epoch now takes nothing back of that."""
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(start=False)
        late = Late(here.service.truth._store)
        here.service.truth._store = late
        await here.client.act("toy-1", "start")
        await asyncio.wait_for(late.happened.wait(), 5)
        assert (await here.client.act("toy-1", "stop")).state == "stopped"
        record, _ = await read_sealed(here.store, session_key("toy-1"), SessionRecord)
        assert (record.state, record.epoch, record.placement) == ("stopped", 1, {})


async def test_a_commit_stands_though_older_checkpoints_can_not_be_deleted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        slow = Slow(here.service.store)
        slow.broken = True
        here.service.store = slow  # type: ignore[assignment]
        await here.create(checkpoint_every=10)
        done = await here.client.state("toy-1", "finished")
        assert done.committed == 40
        await here.told("toy-1", "older checkpoints could not be deleted: the disk is on fire")


async def test_the_end_waits_for_records_that_are_being_written(tmp_path: Path) -> None:
    """A cancelled write is carried out all the same; the next one took it for another orchestrator's."""

    class Late(Slow):
        async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
            return str(await asyncio.shield(asyncio.ensure_future(self._later(key, data, etag))))

        async def _later(self, key: str, data: bytes, etag: str) -> str:
            await asyncio.sleep(1.0)
            return str(await self._store.put_if_match(key, data, etag))

    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(start=False)
        here.service.truth._store = Late(here.service.truth._store)
        for action in ("stop", "resume", "stop"):
            here.service.sessions["toy-1"].feed(events.Acted(action))
            await asyncio.sleep(0.05)
        here.service.stop()
        address = here.address
        await here.down()
        await here.up(bind=address)
        assert (await here.client.session("toy-1")).state == "stopped"


async def test_what_nobody_foresaw_fails_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as here:
        await here.network()

        async def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr("orchestrator.placing.newest_complete", broken)
        await here.create()
        failed = await here.client.state("toy-1", "failed")
        assert "ZeroDivisionError: planted" in failed.error
        assert len(here.bugs) == 1
        here.bugs.clear()


async def test_a_wait_that_is_no_number_is_no_wait(tmp_path: Path) -> None:
    """A timer at NaN would end the event loop."""
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(start=False)
        for seconds in (float("nan"), float("-inf"), -1.0):
            watch = messages.WatchSession(str(new_request_id()), "toy-1", 99, seconds)
            async with asyncio.timeout(5):
                assert (await here.client.ask(watch, messages.WatchInfo)).events == []


async def test_garbage_is_listed_then_deleted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create(until=10)
        await here.client.state("toy-1", "paused")
        await here.client.act("toy-1", "undeploy")
        prefix = session_prefix("toy", "toy-1")
        await here.store.put(f"{prefix}parts/{'e' * 64}.safetensors", b"left over")
        await here.store.put(f"networks/toy/sessions/dead-7/parts/{'f' * 64}.safetensors", b"left over")
        ask = messages.CollectGarbage(str(new_request_id()), "", True)
        found = await here.client.ask(ask, messages.GarbageInfo)
        assert (found.objects, found.size_bytes, found.dry_run) == (2, 18, True)
        await here.client.ask(messages.CollectGarbage(str(new_request_id()), "", False), messages.GarbageInfo)
        found = await here.client.ask(messages.CollectGarbage(str(new_request_id())), messages.GarbageInfo)
        assert found.objects == 0
        await here.client.act("toy-1", "resume")
        await here.client.state("toy-1", "finished")


class TestRefusals:
    """Every request that can't be answered is refused with a code, a sentence and the next step."""

    async def test_requests(self, tmp_path: Path) -> None:
        async with cluster(tmp_path, pnodes=1) as here:
            await here.network()
            data = await here.data()
            network = network_bytes(tmp_path)
            cases: list[tuple[messages.Message, list[bytes], str, str]] = [
                (messages.PlanNetwork("", "nope"), [], "not-found", "no network or session 'nope'"),
                (messages.ActOnSession("", "toi-1", "pause"), [], "not-found", "no network or session"),
                (messages.PutNetwork("", "toy"), [], "usage", "one frame"),
                (messages.PutNetwork("", "toy"), [b"{}"], "bad-file", "not a network"),
                (messages.PutNetwork("", "../../other"), [network], "refused", "network id"),
                (messages.PutNetwork("", "tay"), [network], "usage", "calls itself 'toy'"),
                (messages.PutNetwork("", "toy"), [network_bytes(tmp_path, "toy", 5)], "exists", "another network"),
                (messages.CreateSession("", "toy", "c" * 64, "", "", 4, 0), [], "missing", "data blob"),
                (messages.CreateSession("", "toy", "", "", "", 4, 0), [], "usage", "without data"),
                (messages.CreateSession("", "toy", data, "", "", -4, 0), [], "usage", "steps is -4"),
                (messages.CreateSession("", "toy", data, "", "", 4, 0, until=9), [], "usage", "until is 9"),
                (messages.CreateSession("", "toy", data, "", "", 4, -1), [], "usage", "seed"),
                (messages.CreateSession("", "toy", data, "", "", 4, 0, name="a/b"), [], "refused", "session id"),
                (messages.CreateSession("", "toy", data, "", "", 4, 0, name="%2e"), [], "refused", "session id"),
                (messages.InspectSession("", "toy-9"), [], "not-found", "toy-9"),
                (messages.RemoveNetwork("", "tox"), [], "not-found", "tox"),
                (messages.CollectGarbage("", "tox"), [], "not-found", "tox"),
                (messages.Prepare("", "toy-1", 1, 0, 1), [], "unknown", "does not answer Prepare"),
            ]
            import msgspec

            for message, frames, code, text in cases:
                asked = msgspec.structs.replace(message, request_id=str(new_request_id()))
                with pytest.raises(RefusedError) as caught:
                    await here.client.ask(asked, object, frames)
                assert caught.value.code == code, (message, caught.value)
                assert text in caught.value.message, (message, caught.value)
            assert [entry.key async for entry in here.store.list("registry/networks/")] == [
                "registry/networks/toy.json"
            ]

    async def test_a_placement_by_hand(self, tmp_path: Path) -> None:
        async with cluster(tmp_path) as here:
            await here.network()
            await here.create(placement={"fc1": "p2", "act": "p1", "fc2": "p2", "loss": "p1"}, pnodes=0)
            await here.client.state("toy-1", "finished")
            assert PEERS["p1"].deployments["toy-1"].placement == {"fc1": "p2", "act": "p1", "fc2": "p2", "loss": "p1"}
            await here.create(placement={"fc1": "p7"}, pnodes=0)
            failed = await here.client.state("toy-2", "failed")
            assert "'p7', which is not alive" in failed.error

    async def test_plans(self, tmp_path: Path) -> None:
        async with cluster(tmp_path) as here:
            await here.network()
            found = await here.client.ask(messages.PlanNetwork(str(new_request_id()), "toy", 2), messages.PlanInfo)
            assert sorted(set(found.placement.values())) == ["p1", "p2"]
            assert found.step_s > 0
            assert found.reasons
            assert sum(found.wire_bytes.values()) > 0

    async def test_other_recipes_of_one_graph_are_versions_of_it(self, tmp_path: Path) -> None:
        from networks.load import load

        async with cluster(tmp_path) as here:
            first = await here.network()
            other = load(tmp_path / "toy.yaml", sets=["train.steps=80"])
            message = messages.PutNetwork(str(new_request_id()), "toy")
            second = await here.client.ask(message, messages.NetworkInfo, [other.to_bytes()])
            assert second.digest == other.digest != first.digest


async def test_shut_down_ends_the_service(tmp_path: Path) -> None:
    async with cluster(tmp_path, pnodes=0) as here:
        await here.client.ask(messages.ShutDown(str(new_request_id())), type(None))
        assert here._run is not None
        await asyncio.wait_for(asyncio.shield(here._run), 10)


async def test_the_registry_holds_vnodes_and_placements(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        await here.network()
        await here.create()
        await here.client.state("toy-1", "finished")
        term = here.service.truth.term
        here.service.registry.commit()
    registry = Registry(tmp_path / "home" / "registry.sqlite", term.cluster)
    assert [line[0] for line in registry.vnodes("toy")] == ["fc1", "act", "fc2", "loss"]
    assert sorted(set(registry.placement("toy-1").values())) == ["p1", "p2"]
    assert registry.incarnations() == {"p1": 1, "p2": 1}
    assert len(registry.events("toy-1")) > 5
    registry.close()
