"""Commits of one session: the head never goes back, and nothing is told that another orchestrator may not find."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import commits
from orchestrator.commits import Committer
from orchestrator.truth import SupersededError
from storage.checkpoints import Manifest, read_head
from storage.keys import part_key
from storage.local import LocalStore
from storage.retention import newest_complete
from storage.store import Store, StoreError, StoreUnavailableError, digest_of
from tests.unit.storage.faulty import FaultyStore
from tests.unit.storage.operations import PREFIX, SESSION, manifest_of, save_parts, state_of, steps_in_line


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "RETRY_S", 0.0)


async def mine() -> None:
    """The term is ours."""


async def taken() -> None:
    raise SupersededError("superseded by term 2")


class Committing:
    """A session whose cuts are committed."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        self.committer = Committer(self.store, "net", SESSION)

    async def cut(self, step: int, epoch: int = 1, term: int = 1) -> Manifest:
        return replace(manifest_of(step, await save_parts(self.store, step), None), epoch=epoch, term=term)

    async def commit(
        self, step: int, *, wanted: bool = True, still_mine: Callable[[], Awaitable[None]] = mine, **more: int
    ) -> int:
        """The step of the head then."""
        manifest = await self.cut(step, **more)
        async with self.committer.lock:
            head = await self.committer.commit(manifest, wanted=lambda: wanted, still_mine=still_mine)
        assert head == self.committer.head == await read_head(self.store, PREFIX)
        return head.step

    def through(self, store: Any) -> None:
        """Use the store so from now on."""
        self.committer._store = store


async def test_cuts_are_one_line(tmp_path: Path) -> None:
    here = Committing(tmp_path)
    assert [await here.commit(step) for step in (2, 4, 6)] == [2, 4, 6]
    assert await steps_in_line(here.store) == [6, 4, 2]


@pytest.mark.parametrize("late", [6, 8])
async def test_a_cut_that_is_no_newer_than_the_head_is_none(tmp_path: Path, late: int) -> None:
    here = Committing(tmp_path)
    await here.commit(4)
    await here.commit(8)
    assert await here.commit(late) == 8
    assert await steps_in_line(here.store) == [8, 4]


@pytest.mark.parametrize(("theirs", "line"), [(4, [6, 4, 2]), (6, [6, 2]), (8, [8, 2])])
async def test_a_cut_follows_what_a_former_orchestrator_committed_last(
    tmp_path: Path, theirs: int, line: list[int]
) -> None:
    """It is found out by the lost write; whichever is newer stands."""
    former, here = Committing(tmp_path), Committing(tmp_path)
    await former.commit(2)
    here.committer.go_on_from(await newest_complete(here.store, PREFIX))
    await former.commit(theirs)
    assert await here.commit(6, term=2) == line[0]
    assert await steps_in_line(here.store) == line


async def test_whoever_lost_the_term_is_told_no_head(tmp_path: Path) -> None:
    here = Committing(tmp_path)
    with pytest.raises(SupersededError):
        await here.commit(2, still_mine=taken)
    await here.commit(2)


async def test_whether_the_term_is_ours_has_to_be_known_before_a_head_is_told(tmp_path: Path) -> None:
    """The store goes away once the head is written; it is asked again while the cut is wanted."""
    asked = 0

    async def away_twice() -> None:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise StoreUnavailableError("away")

    here = Committing(tmp_path)
    assert await here.commit(2, still_mine=away_twice) == 2
    assert asked == 3
    asked = 0
    with pytest.raises(StoreUnavailableError):
        await here.commit(4, still_mine=away_twice, wanted=False)
    assert await here.commit(4) == 4, "it was the head already, which is told now"


async def test_a_damaged_head_is_made_good_by_the_same_steps(tmp_path: Path) -> None:
    """What it names can't be used, so the session goes on from an older one, and comes by its step again."""
    here = Committing(tmp_path)
    for step in (2, 4):
        await here.commit(step)
    key = part_key(PREFIX, digest_of(state_of("head", 4)))
    await here.store.put(key, b"damaged")
    resume = await newest_complete(here.store, PREFIX, verify=True)
    assert resume.manifest is not None
    assert resume.manifest.step == 2
    here.committer.go_on_from(resume)
    await here.store.delete(key)
    assert await here.commit(4) == 4
    resume = await newest_complete(here.store, PREFIX, verify=True)
    assert resume.manifest is not None
    assert resume.manifest.step == 4


class Late:
    """A store whose next move of the head is carried out only when `arrive` is called, though it seems to fail."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: Callable[[], Awaitable[object]] | None = None
        self._armed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def _write(self, key: str, work: Callable[[], Awaitable[str]]) -> str:
        if not self._armed or not key.endswith("/head.json"):
            return await work()
        self._armed, self._pending = False, work
        raise StoreUnavailableError(f"{key}: no answer in time; it may or may not have been stored")

    async def put_if_absent(self, key: str, data: bytes) -> str:
        return await self._write(key, lambda: self._store.put_if_absent(key, data))

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return await self._write(key, lambda: self._store.put_if_match(key, data, etag))

    async def arrive(self) -> None:
        """It happens now, if it still can."""
        assert self._pending is not None
        with contextlib.suppress(StoreError):
            await self._pending()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("arrives", ["before", "after"])
async def test_a_commit_that_was_given_up_is_settled_before_the_head_is_read(
    tmp_path: Path, arrives: str, first: bool
) -> None:
    """Otherwise it could arrive after the next epoch has begun from the head before it."""
    here = Committing(tmp_path)
    if not first:
        await here.commit(2)
    late = Late(here.store)
    here.through(late)
    with pytest.raises(StoreUnavailableError):
        await here.commit(4, wanted=False)
    if arrives == "before":
        await late.arrive()
    async with here.committer.lock:
        await here.committer.settle(mine)
    resume = await newest_complete(here.store, PREFIX)
    assert resume.head is not None
    assert resume.head.step == 4
    if arrives == "after":
        await late.arrive()
    assert await read_head(here.store, PREFIX) == resume.head
    here.committer.go_on_from(resume)
    assert await here.commit(6, epoch=2) == 6


async def test_settling_waits_for_the_store_and_is_over_then(tmp_path: Path) -> None:
    here = Committing(tmp_path)
    here.through(Late(here.store))
    with pytest.raises(StoreUnavailableError):
        await here.commit(4, wanted=False)
    here.through(FaultyStore(here.store, fail_at=1, crash=False, lasting=True))
    with pytest.raises(StoreUnavailableError):
        await here.committer.settle(mine)
    here.through(here.store)
    await here.committer.settle(mine)
    counting = FaultyStore(here.store)
    here.through(counting)
    await here.committer.settle(mine)
    assert counting.calls == 0


async def test_what_can_not_be_committed_any_more_is_settled_too(tmp_path: Path) -> None:
    here = Committing(tmp_path)
    here.through(Late(here.store))
    with pytest.raises(StoreUnavailableError):
        await here.commit(4, wanted=False)
    await here.store.delete(part_key(PREFIX, digest_of(state_of("head", 4))))
    await here.committer.settle(mine)
    assert await read_head(here.store, PREFIX) is None
    assert await here.commit(2) == 2


async def test_a_store_that_is_away_is_asked_again_while_the_cut_is_wanted(tmp_path: Path) -> None:
    here = Committing(tmp_path)
    manifest = await here.cut(2)
    faulty = FaultyStore(here.store, fail_at=1, crash=False, lasting=True)
    here.through(faulty)
    tries = 0

    def wanted() -> bool:
        nonlocal tries
        tries += 1
        if tries == 3:
            here.through(here.store)
        return True

    async with asyncio.timeout(5):
        assert (await here.committer.commit(manifest, wanted=wanted, still_mine=mine)).step == 2
    assert tries == 3
