"""One bit of anything stored is wrong: every read finds it, and resuming goes back to the newest whole checkpoint."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from orchestrator.records import SessionRecord
from storage import Blobs, CorruptError, StoreUnavailableError, reread
from storage.checkpoints import HeadBody, commit, read_head, read_manifest
from storage.keys import BadKeyError, blob_key, head_key, part_key
from storage.local import LocalStore
from storage.retention import newest_complete
from storage.sealed import seal, unseal
from storage.store import digest_of
from storage.transfer import read_verified
from tests.unit.storage.faulty import FaultyStore
from tests.unit.storage.operations import (
    PREFIX,
    VNODES,
    load,
    manifest_of,
    save,
    save_parts,
    session_record,
    state_of,
)

SEED = int(os.environ.get("DCNR_SEED", "1"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reread, "FIRST_PAUSE_S", 0.0001)


@pytest.fixture
async def store(tmp_path: Path) -> LocalStore:
    """Three checkpoints."""
    store = LocalStore(tmp_path / "store")
    for step in (10, 20, 30):
        await save(store, step)
    return store


def part_of(vnode: str, step: int) -> str:
    return part_key(PREFIX, digest_of(state_of(vnode, step)))


@contextlib.contextmanager
def flipped(tmp_path: Path, key: str, bit: int) -> object:  # type: ignore[misc]
    """The bit of that object is wrong meanwhile."""
    path = tmp_path / "store" / key
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    yield
    path.write_bytes(whole)


def bits(path: Path, count: int) -> list[int]:
    """Some bits of a file, spread over all of it, as the seed chooses."""
    print("seed", SEED)
    return random.Random(SEED).sample(range(8 * path.stat().st_size), count)


def test_every_bit_of_a_sealed_object_counts() -> None:
    head = HeadBody(30, 1, 1, f"{PREFIX}manifests/{30:010d}-{'a' * 64}.json", "a" * 64, "b" * 64)
    for body, kind in ((head, HeadBody), (session_record("running", 3), SessionRecord)):
        whole = seal(body)
        assert unseal(whole, kind, key="k") == body
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptError, match="k is corrupt"):
                unseal(damaged, kind, key="k")


async def test_a_bit_of_a_part(store: LocalStore, tmp_path: Path) -> None:
    key = part_of("h.0.up", 30)
    for bit in bits(tmp_path / "store" / key, 40):
        with flipped(tmp_path, key, bit):
            data = state_of("h.0.up", 30)
            with pytest.raises(CorruptError, match=key) as caught:
                await read_verified(store, key, digest_of(data), len(data))
            assert caught.value.key == key
            resume = await newest_complete(store, PREFIX, verify=True)
            assert resume.manifest is not None
            assert resume.manifest.step == 20
            (problem,) = resume.problems
            assert "step 30" in problem
            assert "VNode h.0.up is damaged" in problem
    assert await load(store, verify=True) == 30


async def test_a_bit_of_a_manifest(store: LocalStore, tmp_path: Path) -> None:
    head = await read_head(store, PREFIX)
    assert head is not None
    for bit in bits(tmp_path / "store" / head.manifest_key, 40):
        with flipped(tmp_path, head.manifest_key, bit):
            with pytest.raises(CorruptError):
                await read_manifest(store, PREFIX, head.manifest_key, head.manifest_digest)
            resume = await newest_complete(store, PREFIX)
            assert resume.manifest is not None
            assert resume.manifest.step == 20
            assert "step 30 has no usable manifest" in resume.problems[0]
    assert await load(store) == 30


async def test_a_bit_of_the_head(store: LocalStore, tmp_path: Path) -> None:
    for bit in bits(tmp_path / "store" / head_key(PREFIX), 40):
        with flipped(tmp_path, head_key(PREFIX), bit):
            with pytest.raises((CorruptError, BadKeyError)):
                await read_head(store, PREFIX)
            resume = await newest_complete(store, PREFIX)
            assert resume.manifest is not None
            assert resume.manifest.step == 30
            assert "the head is damaged" in resume.problems[0]
    assert await load(store) == 30


async def test_a_bit_of_a_blob(store: LocalStore, tmp_path: Path) -> None:
    digest = await Blobs(store).put(b"a network, a text, a tokenizer" * 20)
    for bit in bits(tmp_path / "store" / blob_key(digest), 40):
        with flipped(tmp_path, blob_key(digest), bit):
            with pytest.raises(CorruptError, match=digest):
                await Blobs(store).get(digest)
            with pytest.raises(CorruptError, match=digest):
                await Blobs(store).fetch_to_file(digest, tmp_path / "home" / digest)
            assert os.listdir(tmp_path / "home") == []


async def test_without_being_told_nothing_is_read_whole_and_with_it_nothing_twice(store: LocalStore) -> None:
    counting = FaultyStore(store)
    await newest_complete(counting, PREFIX)
    assert not any(line.startswith("get_stream") for line in counting.log)
    await newest_complete(counting, PREFIX, verify=True)
    reads = [line for line in counting.log if line.startswith("get_stream")]
    assert len(reads) == len(set(reads)) == len(VNODES)


async def test_what_is_known_to_be_bad_is_not_read_again(store: LocalStore) -> None:
    head = await read_head(store, PREFIX)
    assert head is not None
    for bad in (part_of("tok", 30), head.manifest_key):
        counting = FaultyStore(store)
        resume = await newest_complete(counting, PREFIX, avoid=[bad])
        assert resume.manifest is not None
        assert resume.manifest.step == 20
        assert resume.head == head
        assert f"get_stream {bad}" not in counting.log
        assert "step 30" in resume.problems[0]


async def test_a_part_that_all_checkpoints_share(store: LocalStore, tmp_path: Path) -> None:
    """A frozen VNode: if its one part is damaged, nothing is whole, and each step says why."""
    for step in (40, 50):
        head = await read_head(store, PREFIX)
        shared = (await save_parts(store, 30))[0]
        await commit(store, PREFIX, manifest_of(step, [shared, *(await save_parts(store, step))[1:]], head), head)
    with flipped(tmp_path, part_of("tok", 30), 77):
        resume = await newest_complete(store, PREFIX, verify=True)
        assert resume.manifest is not None
        assert resume.manifest.step == 20
        assert [text.split(" is ")[0] for text in resume.problems] == ["step 50", "step 40", "step 30"]
    with flipped(tmp_path, part_of("tok", 30), 77), flipped(tmp_path, part_of("tok", 20), 5):
        with flipped(tmp_path, part_of("head", 10), 5):
            resume = await newest_complete(store, PREFIX, verify=True)
        assert resume.manifest is None
        assert len(resume.problems) == 5


async def test_an_outage_is_no_damage(store: LocalStore) -> None:
    """While parts are verified the store goes away: nobody may conclude that an older checkpoint is the newest."""
    calls = FaultyStore(store)
    await newest_complete(calls, PREFIX, verify=True)
    for number in range(1, calls.calls + 1):
        for lasting in (False, True):
            faulty = FaultyStore(store, fail_at=number, crash=False, lasting=lasting)
            with pytest.raises(StoreUnavailableError):
                await newest_complete(faulty, PREFIX, verify=True)


async def test_training_again_mends_what_was_damaged(store: LocalStore, tmp_path: Path) -> None:
    """The same step gives the same parts under the same names: they are written again, so the damage is gone."""
    path = tmp_path / "store" / part_of("head", 30)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    resume = await newest_complete(store, PREFIX, verify=True)
    assert resume.manifest is not None
    assert resume.manifest.step == 20
    parts = await save_parts(store, 30)
    await commit(store, PREFIX, manifest_of(30, parts, resume.head), resume.head)
    assert await load(store, verify=True) == 30
