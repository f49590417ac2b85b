"""The pieces of the simulated world: processes in one loop, the store in memory, the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from networks.graph import NodeId
from pnode import reference
from pnode.data import open_source
from storage.keys import BadKeyError
from storage.local import LocalStore
from storage.store import Entry, Store, Stored, StoreError, StoreUnavailableError
from tests.sim.life import Life, Stand, WorldLoop
from tests.sim.nets import SHAPES, built
from tests.sim.network import nobody
from tests.sim.record import Recorder
from tests.sim.store import Handle, SimStore, StoreFault
from tests.sim.truth import digest_of_weights, truth_of

# ------------------------------------------------------------------------------------------------ life


def in_world(work: Callable[[WorldLoop], Coroutine[Any, Any, Any]]) -> Any:
    """Run the world's own work."""
    loop = WorldLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(loop.create_task(work(loop), context=nobody()))
    finally:
        asyncio.set_event_loop(None)
        loop.finish()


async def ticking(seen: list[str], name: str) -> None:
    try:
        while True:
            await asyncio.sleep(1.0)
            seen.append(f"{name} at {asyncio.get_running_loop().time():.1f}")
    finally:
        seen.append(f"{name} finally")


def begin(loop: WorldLoop, seen: list[str], name: str) -> tuple[Life, asyncio.Task[None]]:
    life = Life(name, 1, name)
    return life, loop.create_task(ticking(seen, name), context=life.context.copy())


def test_nothing_of_a_killed_process_runs_any_more() -> None:
    seen: list[str] = []

    async def work(loop: WorldLoop) -> list[str]:
        life, task = begin(loop, seen, "a")
        _, other = begin(loop, seen, "b")
        await asyncio.sleep(2.5)
        life.stand = Stand.OVER
        task.cancel()
        await asyncio.sleep(1.0)
        found = list(seen)
        life.stand = Stand.RUNS
        loop.thaw(life)
        other.cancel()
        return found

    assert in_world(work) == ["a at 1.0", "b at 1.0", "a at 2.0", "b at 2.0", "b at 3.0"]


def test_a_frozen_process_goes_on_where_it_stood() -> None:
    seen: list[str] = []

    async def work(loop: WorldLoop) -> list[str]:
        life, task = begin(loop, seen, "a")
        await asyncio.sleep(1.5)
        life.stand = Stand.FROZEN
        await asyncio.sleep(5.0)
        life.stand = Stand.RUNS
        loop.thaw(life)
        await asyncio.sleep(1.2)
        task.cancel()
        await asyncio.sleep(0)
        return list(seen)

    assert in_world(work) == ["a at 1.0", "a at 6.5", "a at 7.5", "a finally"]


# ------------------------------------------------------------------------------------------------ store


async def outcome(work: Coroutine[Any, Any, Any]) -> object:
    """What a call gives, without what differs from store to store."""
    try:
        found = await work
    except StoreError as error:
        return type(error).__name__, error.key
    except BadKeyError as error:
        return type(error).__name__
    if isinstance(found, Stored):
        return found.data, found.etag
    return (found.key, found.size_bytes, found.etag) if isinstance(found, Entry) else found


async def everything(store: Store) -> list[object]:
    """Calls of every kind, and what came of each."""

    async def listed(prefix: str) -> list[str]:
        return [entry.key async for entry in store.list(prefix)]

    async def streamed(key: str) -> bytes:
        return b"".join([chunk async for chunk in store.get_stream(key)])

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    first = await store.put("a/b", b"first")
    seen: list[object] = [first]
    for work in (
        store.get("a/b"), store.get("a/b", sha256="0" * 64), store.get("a/b", max_bytes=2), store.get("nothing"),
        store.put_if_absent("a/b", b"x"), store.put_if_absent("a/c", b"c"), store.put_if_match("a/b", b"second", first),
        store.put_if_match("a/b", b"third", first), store.put_if_match("gone", b"third", first), store.get("a/b"),
        store.head("a/b"), store.head("gone"), listed("a/"), listed(""), store.delete("a/b"), store.delete("a/b"),
        store.put_if_match("a/b", b"third", first), listed("a"), store.put_stream("s/t", pieces()), streamed("s/t"),
        store.put_stream("s/u", pieces(), sha256="0" * 64), listed("s/"), store.put("../x", b""), store.get("a//b"),
        streamed("gone"),
    ):  # fmt: skip
        seen.append(await outcome(work))
    await store.probe()
    seen.append(await listed(""))
    return seen


def test_the_store_in_memory_is_like_the_one_on_disk(tmp_path: Path) -> None:
    on_disk = asyncio.run(everything(LocalStore(tmp_path)))

    async def work(loop: WorldLoop) -> list[object]:
        return await everything(Handle(SimStore(loop, 1, Recorder(loop.time), loop.time)))

    assert in_world(work) == on_disk


HAPPENS = {"lost_after": True, "late": True, "stall": True, "slow": True}
"""Whether a write takes effect all the same."""


@pytest.mark.parametrize(
    "kind",
    ["unavailable", "slow", "stall", "lost_before", "lost_after", "late", "full", "read_only", "conflict"],
)
def test_faults_of_writes(kind: str) -> None:
    async def work(loop: WorldLoop) -> tuple[object, bool, float]:
        server = SimStore(loop, 1, Recorder(loop.time), loop.time)
        server.faults.append(StoreFault(kind, "", 5.0))
        found = await outcome(Handle(server).put("k", b"data"))
        took_s = loop.time()
        await asyncio.sleep(10)
        return found, "k" in server.objects, took_s

    found, there, took_s = in_world(work)
    assert there == HAPPENS.get(kind, False)
    assert (found == (StoreUnavailableError.__name__, "k")) == (kind not in ("slow", "stall"))
    assert (took_s > 5.0) == (kind == "stall")


@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_faults_of_reads_leave_the_object_whole(kind: str) -> None:
    async def work(loop: WorldLoop) -> tuple[list[object], object]:
        server = SimStore(loop, 1, Recorder(loop.time), loop.time)
        store = Handle(server)
        await store.put("k", b"a body of some length")
        server.faults.append(StoreFault(kind, "", 1e9, count=20))
        spoilt = [await outcome(store.get("k")) for _ in range(20)]
        return spoilt, await outcome(store.get("k"))

    spoilt, after = in_world(work)
    assert after[0] == b"a body of some length"
    assert after not in spoilt


def test_a_write_of_a_process_that_died_lands_or_does_not() -> None:
    async def work(loop: WorldLoop) -> int:
        server = SimStore(loop, 1, Recorder(loop.time), loop.time)
        for number in range(100):
            life = Life("a", number + 1, "a")
            work = Handle(server).put(f"k{number}", b"data")
            task = loop.create_task(work, context=life.context.copy())
            await asyncio.sleep(0.0001)
            life.stand = Stand.OVER
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return len(server.objects)

    assert 25 < in_world(work) < 75


def test_only_those_are_hit_who_are_meant() -> None:
    life = Life("a", 1, "there")
    assert StoreFault("unavailable", "there", 1.0).hits(life, "get")
    assert not StoreFault("unavailable", "elsewhere", 1.0).hits(life, "get")
    assert not StoreFault("unavailable", "there", 1.0).hits(None, "get")
    assert not StoreFault("full", "", 1.0).hits(life, "get")
    assert not StoreFault("flip", "", 1.0).hits(life, "put")


# ------------------------------------------------------------------------------------------------ truth


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_truth_is_what_one_process_of_the_product_computes(name: str) -> None:
    """Two calculations that share no code, bit for bit."""
    torch.set_num_threads(1)
    truth, made = truth_of(name), built(name)
    network = made.network
    source = open_source(made.data, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs)
    losses: dict[int, float] = {}
    weights: dict[int, dict[str, str]] = {}

    def trace(step: int, vnodes: Any) -> None:
        found = {}
        for node in vnodes.modules:
            state = vnodes.state(NodeId(node))
            kept = {key.partition(".")[2]: value for key, value in state.items() if not key.startswith("optim.")}
            if kept:
                found[str(node)] = digest_of_weights(kept)
        weights[step] = found

    reference.train(network, source, on_step=lambda step: losses.update({step.step: step.loss}), trace=trace)
    assert truth.losses == losses
    assert truth.weights == weights
    assert len({str(value) for value in weights.values()}) == truth.steps
