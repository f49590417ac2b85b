"""Records in the store: who may write, and what happens to writes of an orchestrator that was replaced."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records import NetworkRecord, SessionRecord, network_key, session_key
from orchestrator.truth import OvertakenError, SupersededError, Truth, sealed_session
from storage.local import LocalStore
from storage.sealed import unseal
from storage.store import ConflictError, Stored, StoreUnavailableError
from storage.terms import read_term
from tests.unit.orchestrator.story import make_record
from tests.unit.storage.faulty import FaultyStore
from wire.messages import PeerRef


def network() -> NetworkRecord:
    return NetworkRecord("gpt", "a" * 64, 3, 100, 0.0)


async def two(folder: Path) -> tuple[Truth, Truth]:
    """A former orchestrator and the one that took over; one session, which both have read."""
    first, second = Truth(LocalStore(folder)), Truth(LocalStore(folder))
    await first.raise_term()
    await first.put_session("gpt-1", sealed_session(make_record(epoch=1, term=1)))
    await second.raise_term()
    return first, second


async def test_the_term_grows_at_each_start_and_fences_the_older_one(tmp_path: Path) -> None:
    """Field case B22: the counter is durable, also with a wiped local disk."""
    first, second = Truth(LocalStore(tmp_path)), Truth(LocalStore(tmp_path))
    one = await first.raise_term()
    await first.still_mine()
    two = await second.raise_term(PeerRef("orchestrator", 7, ["tcp://h2:7700"]))
    assert (one.term, two.term) == (1, 2)
    assert one.cluster == two.cluster
    with pytest.raises(SupersededError, match=r"superseded by term 2 at tcp://h2:7700 \(this one has term 1\)"):
        await first.still_mine()
    await second.still_mine()
    assert await read_term(LocalStore(tmp_path)) == two, "PNodes read where it is"


async def too_late(write: Awaitable[None]) -> None:
    """A former orchestrator writes what the store still takes: it hears that it was superseded, not that it wrote."""
    with pytest.raises(SupersededError, match="superseded by term 2"):
        await write


class Interleaved:
    """A store in which somebody else does something just before the next conditional write."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.first: Any = None
        self.lose_answer = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def _meddle(self) -> None:
        if self.first is not None:
            first, self.first = self.first, None
            await first()

    async def put_if_absent(self, key: str, data: bytes) -> str:
        await self._meddle()
        return self._answered(key, await self._store.put_if_absent(key, data))

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        await self._meddle()
        return self._answered(key, await self._store.put_if_match(key, data, etag))

    def _answered(self, key: str, etag: str) -> str:
        if self.lose_answer:
            self.lose_answer = False
            raise ConflictError("412 for a retry of one's own write", key=key)
        return etag


@pytest.mark.parametrize("begun", [False, True])
async def test_of_two_that_start_at_once_each_knows_who_won(tmp_path: Path, begun: bool) -> None:
    """Field case B42 (a): their records differ though both are on the same address."""
    me = PeerRef("orchestrator", 0, ["tcp://127.0.0.1:7700"])
    if begun:
        await Truth(LocalStore(tmp_path)).raise_term(me)
    store = Interleaved(LocalStore(tmp_path))
    first, second = Truth(store), Truth(LocalStore(tmp_path))  # type: ignore[arg-type]
    store.first = lambda: second.raise_term(PeerRef(me.id, 22, me.addresses))
    one = await first.raise_term(PeerRef(me.id, 11, me.addresses))
    assert one.term == second.term.term + 1
    await first.still_mine()
    with pytest.raises(SupersededError):
        await second.still_mine()


async def test_a_term_whose_answer_was_lost_is_ones_own(tmp_path: Path) -> None:
    """Field case B42 (b)."""
    store = Interleaved(LocalStore(tmp_path))
    store.lose_answer = True
    truth = Truth(store)  # type: ignore[arg-type]
    assert (await truth.raise_term()).term == 1
    store.lose_answer = True
    await truth.put_session("gpt-1", sealed_session(make_record()))
    await truth.put_session("gpt-1", sealed_session(make_record(epoch=2)))


async def test_whoever_lost_the_term_writes_nothing_more(tmp_path: Path) -> None:
    first, second = await two(tmp_path)
    record = await second.claim((await second.sessions())[0])
    assert record.term == 2
    with pytest.raises(SupersededError, match="superseded by term 2"):
        await first.put_session("gpt-1", sealed_session(make_record(epoch=2, term=1)))
    assert (await second.sessions())[0] == record


async def test_a_last_write_of_a_former_orchestrator_is_seen_when_its_record_is_claimed(tmp_path: Path) -> None:
    """It came between our reading and our claim: what it says is what there is, its epoch above all."""
    first, second = await two(tmp_path)
    found = (await second.sessions())[0]
    await too_late(first.put_session("gpt-1", sealed_session(make_record(epoch=2, term=1))))
    claimed = await second.claim(found)
    assert (claimed.epoch, claimed.term) == (2, 2)
    with pytest.raises(SupersededError):
        await first.put_session("gpt-1", sealed_session(make_record(epoch=3, term=1)))


async def test_a_last_write_of_a_former_orchestrator_does_not_end_the_new_one(tmp_path: Path) -> None:
    first, second = await two(tmp_path)
    await second.sessions()
    await too_late(first.put_session("gpt-1", sealed_session(make_record(epoch=2, term=1))))
    mine = sealed_session(make_record(epoch=2, term=2))
    with pytest.raises(OvertakenError) as caught:
        await second.put_session("gpt-1", mine)
    assert unseal(caught.value.data, SessionRecord, key=session_key("gpt-1")).epoch == 2
    await second.put_session("gpt-1", mine)


async def test_what_a_later_orchestrator_wrote_is_never_taken_for_a_former_ones(tmp_path: Path) -> None:
    """It takes over between our lost write and our look at what was written: it is looked at the term after that."""
    first, second = await two(tmp_path)
    await second.sessions()
    await too_late(first.put_session("gpt-1", sealed_session(make_record(epoch=2, term=1))))
    third, read, looks = Truth(LocalStore(tmp_path)), second._raw, iter(range(2))

    async def overtaken(key: str) -> Stored | None:
        if next(looks) == 1:  # the first one is whether the write was our own
            await third.raise_term()
            await third.claim((await third.sessions())[0])
        return await read(key)

    second._raw = overtaken  # type: ignore[method-assign]
    with pytest.raises(SupersededError, match="superseded by term 3"):
        await second.put_session("gpt-1", sealed_session(make_record(epoch=2, term=2)))
    assert (await third.sessions())[0].term == 3


async def test_a_write_is_done_only_if_the_term_is_ours_after_it(tmp_path: Path) -> None:
    """Whoever takes over raises the term and then reads; a write after that is unseen, so nobody may be told of it."""
    first, second = Truth(LocalStore(tmp_path)), Truth(LocalStore(tmp_path))
    await first.raise_term()
    await first.put_session("gpt-1", sealed_session(make_record(epoch=1)))
    store = Interleaved(LocalStore(tmp_path))
    store.first = second.raise_term
    first._store = store  # type: ignore[assignment]
    with pytest.raises(SupersededError, match="superseded by term 2"):
        await first.put_session("gpt-1", sealed_session(make_record(epoch=2)))
    assert (await second.sessions())[0].epoch == 2, "the store took it all the same"


async def test_whether_the_term_is_ours_has_to_be_known(tmp_path: Path) -> None:
    """The store goes away between the write and the look at the term: it is written again, which is no conflict."""
    inner = LocalStore(tmp_path)
    await Truth(inner).raise_term()
    for fail_at, what in ((1, "put_if_absent"), (2, "get")):
        truth = Truth(inner)
        await truth.raise_term()
        await truth.sessions()
        truth._store = FaultyStore(inner, fail_at=fail_at, crash=False)
        data = sealed_session(make_record(epoch=fail_at))
        with pytest.raises(StoreUnavailableError, match=f"failure in {what}"):
            await truth.put_session("gpt-1", data)
        await truth.put_session("gpt-1", data)
        assert (await truth.sessions())[0].epoch == fail_at
        await truth.drop_session("gpt-1")


@pytest.mark.parametrize("drop", ["session", "network"])
async def test_whoever_lost_the_term_deletes_nothing(tmp_path: Path, drop: str) -> None:
    first, second = await two(tmp_path)
    await second.put_network(network())
    with pytest.raises(SupersededError):
        await (first.drop_session("gpt-1") if drop == "session" else first.drop_network("gpt"))
    assert len(await second.sessions()) == len(await second.networks()) == 1


async def test_a_record_that_a_former_orchestrator_deleted_is_written_again(tmp_path: Path) -> None:
    _, second = await two(tmp_path)
    await second.sessions()
    await LocalStore(tmp_path).delete(session_key("gpt-1"))
    await second.put_session("gpt-1", sealed_session(make_record(epoch=2, term=2)))
    assert (await second.sessions())[0].epoch == 2


async def test_incarnations_that_a_former_orchestrator_granted_last_are_told(tmp_path: Path) -> None:
    first, second = await two(tmp_path)
    await second.incarnations()
    await too_late(first.put_incarnations({"p1": 1}))
    with pytest.raises(OvertakenError):
        await second.put_incarnations({"p1": 1})
    await second.put_incarnations({"p1": 2})
    assert await Truth(LocalStore(tmp_path)).incarnations() == {"p1": 2}


async def test_networks_and_epochs_are_written_over_a_former_orchestrators(tmp_path: Path) -> None:
    first, second = await two(tmp_path)
    await second.networks()
    await second.epochs()
    await too_late(first.put_network(network()))
    await too_late(first.put_epochs({"gpt-1": 9, "mlp-1": 2}))
    await second.put_network(NetworkRecord("gpt", "b" * 64, 3, 100, 0.0))
    await second.put_epochs({"gpt-1": 4})
    again = Truth(LocalStore(tmp_path))
    assert [record.digest for record in await again.networks()] == ["b" * 64]
    assert await again.epochs() == {"gpt-1": 9, "mlp-1": 2}, "the highest of each"


async def test_incarnations_and_epochs_are_durable(tmp_path: Path) -> None:
    truth = Truth(LocalStore(tmp_path))
    await truth.raise_term()
    assert await truth.incarnations() == {}
    await truth.put_incarnations({"p1": 3})
    await truth.put_epochs({"gpt-1": 9})
    again = Truth(LocalStore(tmp_path))
    assert await again.incarnations() == {"p1": 3}
    assert await again.epochs() == {"gpt-1": 9}


async def test_a_damaged_record_is_reported(tmp_path: Path) -> None:
    truth = Truth(LocalStore(tmp_path))
    await truth.raise_term()
    await truth.put_network(network())
    store = LocalStore(tmp_path)
    stored = await store.get(network_key("gpt"))
    await store.put(network_key("gpt"), stored.data.replace(b"100", b"999"))
    assert await truth.networks() == []
    assert "registry/networks/gpt.json is corrupt" in truth.damaged["registry/networks/gpt.json"]
