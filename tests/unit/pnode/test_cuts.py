"""Saving cuts while the store misbehaves, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import structlog
import torch

from pnode.cuts import MAX_PATIENCE_S, CutSaver
from pnode.events import Cause
from pnode.hub import Bounds, Hub
from pnode.memory import CutMemory
from pnode.share import Share
from pnode.work import Cut
from storage.keys import part_key
from storage.open import open_store
from storage.store import CorruptError, Store, StoreUnavailableError, digest_of
from storage.tensors import encode_tensors
from wire.errors import DCNRError, MisuseError
from wire.messages import Deployment, Message, Part, PartsSaved, PeerRef
from wire.sim import run_sim

PREFIX = "networks/n/sessions/s-1/"
QUIET = structlog.wrap_logger(
    structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(50), processors=[]
)


@dataclass
class Moody:
    """A real store that raises what it's told to."""

    store: Store
    error: Exception | None = None
    tries: int = 0
    only: str = ""  # part of the keys that are refused

    async def put(self, key: str, data: bytes) -> str:
        self.tries += 1
        if self.error is not None and self.only in key:
            raise self.error
        return await self.store.put(key, data)


class Bus:
    def __init__(self) -> None:
        self.told: list[tuple[PartsSaved, list[Part]]] = []

    def send(self, to: PeerRef, message: Message, frames: Sequence[bytes] = ()) -> None:
        assert isinstance(message, PartsSaved)
        self.told.append((message, msgspec.msgpack.decode(frames[0], type=list[Part])))


def cut(step: int) -> Cut:
    values = {"a": step + 0.1, "b": step + 0.2, "c": step + 0.3}
    return Cut(step, {vnode: {"param.w": torch.full((4,), value)} for vnode, value in values.items()})


class Scene:
    def __init__(self, home: Path) -> None:
        self.moody = Moody(open_store(str(home)))
        self.bus, self.memory = Bus(), CutMemory()
        self.now = asyncio.get_running_loop().time
        hub = Hub(
            "p1", cast(Any, self.bus), PeerRef("o", 1, []), home, Bounds(away_s=100.0), asyncio.ensure_future, QUIET,
            store=cast(Any, self.moody), clock=self.now,
        )  # fmt: skip
        share = SimpleNamespace(session="s-1", epoch=1, replica=0, pnode="p1")
        deployment = SimpleNamespace(store_prefix=PREFIX)
        self.saver = CutSaver(hub, cast(Deployment, deployment), cast(Share, share), self.memory)

    def steps(self) -> list[int]:
        return [message.step for message, _ in self.bus.told]


def simulate(home: Path, script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await script(Scene(home))

    run_sim(main())


ERRORS = [
    StoreUnavailableError("disk full; 0 bytes are free"), StoreUnavailableError("read-only file system"),
    CorruptError("reads back other bytes than were written"), OSError(5, "input/output error"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
def test_a_store_that_can_not_is_tried_until_it_can_and_the_cause_is_shown(tmp_path: Path, error: Exception) -> None:
    async def script(scene: Scene) -> None:
        scene.moody.error = error
        saving = asyncio.ensure_future(scene.saver.save(10, cut(10)))
        await asyncio.sleep(60.0)
        assert not saving.done()
        assert not scene.bus.told
        expected = error.message if isinstance(error, DCNRError) else "input/output error"
        text, since = scene.saver.trouble
        assert expected in text
        assert since < 1.0
        tries = scene.moody.tries
        assert 3 * 6 <= tries <= 3 * 24
        scene.moody.error = None
        assert await saving == ("", Cause.STORE)
        assert scene.saver.trouble == ("", 0.0)
        assert scene.steps() == [10]
        parts = {part.vnode: part.digest for part in scene.bus.told[0][1]}
        assert parts.keys() == {"a", "b", "c"}
        for digest in parts.values():
            await scene.moody.store.head(part_key(PREFIX, digest))
        assert all(scene.memory.find(10, vnode, digest) for vnode, digest in parts.items())

    simulate(tmp_path, script)


def test_one_part_that_is_refused_is_shown_since_its_own_first_time(tmp_path: Path) -> None:
    """However often the others are taken meanwhile."""

    async def script(scene: Scene) -> None:
        states = cut(10).states
        scene.moody.error, scene.moody.only = (
            StoreUnavailableError("not this one"),
            digest_of(encode_tensors(states["b"])),
        )
        saving = asyncio.ensure_future(scene.saver.save(10, Cut(10, states)))
        for _ in range(9):
            await asyncio.sleep(5.0)
            text, since = scene.saver.trouble
            assert text == "not this one"
            assert since < 1.0
        saving.cancel()
        await asyncio.wait([saving])
        assert scene.saver.trouble == ("", 0.0), "nobody tries any more"

    simulate(tmp_path, script)


def test_the_limit_ends_it_with_the_stores_own_words(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        scene.moody.error = StoreUnavailableError("the disk of the store is full")
        text, cause = await scene.saver.save(10, cut(10))
        assert cause is Cause.STORE
        assert "the disk of the store is full" in text
        assert 80.0 <= scene.now() <= 100.0
        assert scene.memory.steps == [10]

    simulate(tmp_path, script)


@pytest.mark.parametrize("mended", [False, True])
def test_the_last_try_is_one_try(tmp_path: Path, mended: bool) -> None:
    """After the end of the session: what the store takes at the next try gets there, the rest is given up."""

    async def script(scene: Scene) -> None:
        scene.moody.error = StoreUnavailableError("the disk of the store is full")
        saving = asyncio.ensure_future(scene.saver.save(10, cut(10)))
        await asyncio.sleep(30.0)
        scene.saver.last_try = True
        tries, since = scene.moody.tries, scene.now()
        if mended:
            scene.moody.error = None
        text, cause = await saving
        assert cause is Cause.STORE
        assert text == ("" if mended else "the disk of the store is full")
        assert scene.moody.tries - tries <= 3
        assert scene.now() - since <= MAX_PATIENCE_S
        assert scene.steps() == ([10] if mended else [])
        assert scene.memory.steps == [10]
        if not mended:
            tries, since = scene.moody.tries, scene.now()
            assert await scene.saver.save(20, cut(20)) == (text, Cause.STORE)
            assert 1 <= scene.moody.tries - tries <= 3
            assert scene.now() - since < 0.1

    simulate(tmp_path, script)


@pytest.mark.parametrize("error", [MisuseError("a tensor can't be stored"), ValueError("odd"), ZeroDivisionError()])
def test_what_will_never_work_is_not_tried_again(tmp_path: Path, error: Exception) -> None:
    async def script(scene: Scene) -> None:
        scene.moody.error = error
        text, cause = await scene.saver.save(10, cut(10))
        assert text
        assert cause is Cause.DEFECT
        assert scene.now() < 1.0
        assert scene.moody.tries <= 3

    simulate(tmp_path, script)


def test_cuts_are_saved_one_after_another(tmp_path: Path) -> None:
    """A store that comes back takes the oldest first: it may be the one that everybody waits for."""

    async def script(scene: Scene) -> None:
        scene.moody.error = StoreUnavailableError("away")
        saving = [asyncio.ensure_future(scene.saver.save(step, cut(step))) for step in (10, 20, 30)]
        await asyncio.sleep(30.0)
        assert scene.memory.steps == [10, 20, 30]
        assert scene.moody.tries <= 3 * 20
        scene.moody.error = None
        await asyncio.gather(*saving)
        assert scene.steps() == [10, 20, 30]

    simulate(tmp_path, script)


def test_all_that_is_not_committed_is_announced_and_nothing_else(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        for step in (10, 20, 30):
            await scene.saver.save(step, cut(step))
        scene.saver.committed(10)
        scene.bus.told.clear()
        scene.saver.announce()
        assert scene.steps() == [20, 30]
        assert all(len(parts) == 3 for _, parts in scene.bus.told)
        scene.saver.committed(30)
        scene.saver.announce()
        assert scene.steps() == [20, 30]

    simulate(tmp_path, script)


def test_parts_that_did_not_change_are_not_sent_again(tmp_path: Path) -> None:
    """And only against a committed cut: parts of one that is not may be deleted with it."""

    async def script(scene: Scene) -> None:
        same = cut(10).states
        await scene.saver.save(10, Cut(10, same))
        await scene.saver.save(20, Cut(20, same))
        assert scene.moody.tries == 6
        scene.saver.committed(20)
        await scene.saver.save(30, Cut(30, same))
        assert scene.moody.tries == 6

    simulate(tmp_path, script)


def test_a_saver_that_is_stopped_leaves_its_cut_to_the_rules_of_memory(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        scene.moody.error = StoreUnavailableError("away")
        saving = asyncio.ensure_future(scene.saver.save(10, cut(10)))
        await asyncio.sleep(1.0)
        saving.cancel()
        await asyncio.wait([saving])
        scene.moody.error = None
        for step in (20, 30):
            await scene.saver.save(step, cut(step))
        assert scene.memory.steps == [20, 30]
        assert scene.steps() == [20, 30]

    simulate(tmp_path, script)
