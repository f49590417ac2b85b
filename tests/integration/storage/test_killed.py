"""kill -9 of a real process at every storage call, and between any two changes of its files: B35.

On local disk every place is tried; on the S3 server a share that a seed chooses, and each with `DCNR_FULL=1`.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from storage import open_store
from storage.local import LocalStore
from tests.integration.storage.crashing import Crashing, Job
from tests.tried import TRIED
from tests.unit.storage.operations import OPERATIONS, finish, judge

FULL = bool(os.environ.get("DCNR_FULL"))
SEED = int(os.environ.get("DCNR_SEED", "1"))
MAX_PLACES = 2000
SHARE = 2
"""On the S3 server, so many places of each operation and kind."""


@pytest.fixture
async def crashing() -> AsyncIterator[Crashing]:
    async with Crashing() as running:
        yield running


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """kill -9 takes nothing from the system's caches, so a disk in memory shows the same, sooner."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize("place", ["before", "after", "system"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_killed_at_every_place_on_local_disk(memory: Path, crashing: Crashing, name: str, place: str) -> None:
    operation = OPERATIONS[name]
    (memory / "before").mkdir()
    await operation.before(LocalStore(memory / "before"))
    found = set()
    for number in range(1, MAX_PLACES):
        root = memory / str(number)
        shutil.copytree(memory / "before", root)
        killed = await crashing.run(Job(name, str(root), place, number))
        store = LocalStore(root)
        TRIED[f"{name} (kill -9)"] += killed
        found.add(await judge(operation, store, done=not killed))
        await finish(operation, store)
        await store.put("swept", b"")
        assert list((root / ".dcnr/temporary").iterdir()) == []
        shutil.rmtree(root)
        if not killed:
            break
    assert not killed, "there was no end to the places"
    assert number > 2 or ("resume" in name and place == "system"), "nothing was killed"
    print(f"{name}: {number - 1} places")
    assert operation.new in found


async def test_killed_between_writes_of_a_real_disk(tmp_path: Path, crashing: Crashing) -> None:
    """A share of the same on whatever disk the temporary folder is."""
    print("seed", SEED)
    chance = random.Random(SEED)
    for number in sorted(chance.sample(range(1, 90), 12)):
        root = tmp_path / str(number)
        operation = OPERATIONS["save"]
        await operation.before(LocalStore(root))
        killed = await crashing.run(Job("save", str(root), "system", number))
        await judge(operation, LocalStore(root), done=not killed)
        await finish(operation, LocalStore(root))


@pytest.mark.parametrize("name", OPERATIONS)
async def test_killed_at_some_places_on_the_s3_server(s3_url: str, crashing: Crashing, name: str) -> None:
    print("seed", SEED)
    chance = random.Random(f"{SEED}/{name}")
    operation = OPERATIONS[name]

    async def try_place(place: str, number: int) -> bool:
        url = s3_url.replace("?", f"-{uuid.uuid4().hex[:8]}?")
        async with open_store(url) as store:
            await operation.before(store)
            killed = await crashing.run(Job(name, url, place, number))
            TRIED[f"{name} (kill -9)"] += killed
            await judge(operation, store, done=not killed)
            await finish(operation, store)
        return killed

    for place in ("before", "after"):
        for number in range(1, MAX_PLACES) if FULL else [chance.randint(1, 12) for _ in range(SHARE)]:
            if not await try_place(place, number) and FULL:
                break
    await try_place("time", chance.randint(1, 300))
