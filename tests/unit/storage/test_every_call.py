"""Every storage call of every operation fails, in every way: B35, and item "fail the n-th call" of the promises.

On local disk here; tests/integration/storage has the same on an S3 server, and with processes that are killed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from storage import ConflictError, StoreError, StoreUnavailableError
from storage.checkpoints import commit, read_head
from storage.keys import head_key
from storage.local import LocalStore
from storage.retention import newest_complete
from tests.tried import TRIED
from tests.unit.storage.faulty import Crash, FaultyStore
from tests.unit.storage.operations import (
    OPERATIONS,
    PREFIX,
    VNODES,
    finish,
    judge,
    keys_of,
    load,
    manifest_of,
    save,
    save_parts,
)

MAX_CALLS = 200
FAULTS = {
    "error once": {"mode": "before", "crash": False},
    "error for ever": {"mode": "before", "crash": False, "lasting": True},
    "reply lost once": {"mode": "after", "crash": False},
    "reply lost, then errors for ever": {"mode": "after", "crash": False, "lasting": True},
    "crash before": {"mode": "before", "crash": True},
    "crash after": {"mode": "after", "crash": True},
}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that lives in memory where there is one: these tests are about order, not about disks."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_the_n_th_call_fails_for_every_n(memory: Path, name: str, fault: str) -> None:
    operation = OPERATIONS[name]
    await operation.before(LocalStore(memory / "before"))
    (memory / "before").mkdir(exist_ok=True)
    found = set()
    for number in range(1, MAX_CALLS):
        root = memory / str(number)
        shutil.copytree(memory / "before", root)
        inner = LocalStore(root)
        faulty = FaultyStore(inner, fail_at=number, **FAULTS[fault])  # type: ignore[arg-type]
        done = False
        try:
            await operation.run(faulty)
            done = True
        except (Crash, StoreUnavailableError):
            assert faulty.struck
        TRIED[name] += faulty.struck
        found.add(await judge(operation, inner, done=done))
        await finish(operation, inner)
        assert list((root / ".dcnr/temporary").iterdir()) == []
        shutil.rmtree(root)
        if not faulty.struck:
            break
    print(f"{name}, {fault}: each of {number - 1} calls")
    assert number > 2, "no call was made to fail"
    assert operation.new in found
    if "lost" not in fault and "after" not in fault:
        assert operation.old in found


async def test_what_a_crash_cut_short_is_named_and_passed_over(memory: Path) -> None:
    """B35: the incomplete one is reported and ignored, at each call at which the save may be cut."""
    for number in range(1, MAX_CALLS):
        store = LocalStore(memory / str(number))
        await save(store, 10)
        head = await read_head(store, PREFIX)
        faulty = FaultyStore(store, fail_at=number, mode="after")
        try:
            await save(faulty, 20)
            break
        except Crash:
            resume = await newest_complete(store, PREFIX)
        assert resume.manifest is not None
        if resume.manifest.step == 20:
            assert resume.problems == []
            continue
        assert resume.head == head
        wrote_manifest = any("/manifests/" in line and line.startswith("put") for line in faulty.log)
        assert resume.problems == (["step 20 was never committed: ignored"] if wrote_manifest else [])
    assert number > 8


ORDERS = {
    "parts manifests head": False,
    "head parts manifests": True,
    "head manifests parts": True,
    "parts head manifests": True,
    "manifests head parts": True,
    "forget parts manifests head": True,
}


@pytest.mark.parametrize("order", ORDERS)
async def test_the_loop_finds_every_wrong_order(memory: Path, order: str) -> None:
    """Planted bugs: the head before its manifest, the manifest before its parts, the old state deleted first."""
    ahead = LocalStore(memory / "ahead")
    await save(ahead, 10)
    old = set(await keys_of(ahead))
    await save(ahead, 20)
    new = [entry for entry in await keys_of(ahead) if entry not in old or entry == head_key(PREFIX)]

    async def save_in_that_order(store: FaultyStore) -> None:
        for word in order.split():
            if word == "forget":
                for key in sorted(old):
                    if "/parts/" in key:
                        await store.delete(key)
            for key in new:
                if f"/{word}" in key:
                    await store.put(key, (await ahead.get(key)).data)

    caught = False
    for number in range(1, 40):
        store = LocalStore(memory / str(number))
        await save(store, 10)
        faulty = FaultyStore(store, fail_at=number, mode="after")
        try:
            await save_in_that_order(faulty)
            break
        except Crash:
            try:
                assert await load(store) in (10, 20)
            except (AssertionError, StoreError):
                caught = True
            else:
                resume = await newest_complete(store, PREFIX)
                caught |= any("incomplete" in text or "no usable" in text for text in resume.problems)
    assert caught is ORDERS[order]


async def test_a_lost_reply_of_the_head_is_no_other_owner(memory: Path) -> None:
    """B42 (b), one level up: the same cut committed again succeeds; another owner's is "superseded by term N"."""
    store = LocalStore(memory)
    await save(store, 10)
    head = await read_head(store, PREFIX)
    manifest = manifest_of(20, await save_parts(store, 20), head)
    last = len(VNODES) + 2  # a look at each part, the manifest, the head
    faulty = FaultyStore(store, fail_at=last, mode="after", crash=False)
    with pytest.raises(StoreUnavailableError):
        await commit(faulty, PREFIX, manifest, head)
    assert faulty.log[-1].startswith("put_if_match")
    mine = await commit(store, PREFIX, manifest, head)
    assert (mine.step, mine) == (20, await read_head(store, PREFIX))
    with pytest.raises(ConflictError, match="superseded by term 1, epoch 1, step 20"):
        await commit(store, PREFIX, msgspec.structs.replace(manifest, term=2), head)
