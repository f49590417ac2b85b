"""Orchestrator or store away while real PNodes train: they go on for a while, wait, say for what, and go on again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.sealed import seal
from storage.terms import TERM_KEY, TermRecord
from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_recovery import ends_the_same, trains_until
from tests.integration.pnode.test_training import GPT, SMALL, prepare_network, spread
from wire.messages import Committed, SessionBeat

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SETS = [*SMALL, *GPT, "train.steps=30"]
NAMES = ("p1", "p2", "p3")


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[Conductor]:
    found = Conductor(tmp_path)
    await found.start()
    for name in NAMES:
        await found.spawn(name)
    await found.until(lambda: found.peers.keys() == set(NAMES))
    yield found
    await found.close()


def beat_of(conductor: Conductor, pnode: str) -> SessionBeat | None:
    beat = conductor.beats.get(pnode)
    return next((one for one in beat.sessions if one.session == "s-1"), None) if beat is not None else None


async def test_without_an_orchestrator_it_trains_on_and_tells_the_next_one(
    conductor: Conductor, tmp_path: Path
) -> None:
    """The next one has a higher term and remembers nothing: parts, steps and holds are told to it again."""
    network, data = prepare_network("gpt-char", SETS, tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("s-1", network, digest, spread(network), checkpoint_every=2, max_uncommitted=5)
    await conductor.run("s-1", 30)
    await conductor.bus.close()
    await asyncio.sleep(3.0)
    later = Conductor(tmp_path, bind=conductor.address, term=2)
    later.take_over(conductor)
    await later.start()
    try:
        await later.until(lambda: later.peers.keys() == set(NAMES))
        whole = [("s-1", step) for step in (2, 4, 6, 8, 10)]
        await later.until(lambda: all(later.parts.get(key, {}).keys() == set(NAMES) for key in whole))
        assert not {step for _, step in later.parts} - {2, 4, 6, 8, 10}

        def wait_for_it() -> bool:
            beats = [beat_of(later, name) for name in NAMES]
            return any(beat is not None and beat.waiting_for == "orchestrator: commit of step 2" for beat in beats)

        await later.until(wait_for_it)
        assert {report.step for report in later.steps["s-1"]} >= set(range(1, 12))
        await later.until(lambda: beat_of(later, "p3") is not None)
        assert beat_of(later, "p3").uncommitted == [2, 4, 6, 8, 10]  # type: ignore[union-attr]
        stale = Committed("s-1", 1, 0, 10)
        first = Conductor(tmp_path, term=1)
        await first.start()
        for peer in later.peers.values():
            first.bus.send(peer, stale)
        later.commits.add("s-1")
        for _, step in whole:
            await later._commit_new("s-1", step)
        await ends_the_same(later, "s-1", network, data)
        later.held.clear()
        later.term = 3
        await later.until(lambda: later.all_held("s-1", 30), 30)
        await first.bus.close()
    finally:
        later.processes = {}
        await later.close()


async def test_an_orchestrator_elsewhere_is_found_in_the_store(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("gpt-char", SETS, tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("s-1", network, digest, spread(network), checkpoint_every=2)
    await conductor.run("s-1", 30)
    await conductor.bus.close()
    later = Conductor(tmp_path, term=2)
    later.take_over(conductor)
    await later.start()
    try:
        await later.store.put(TERM_KEY, seal(TermRecord("test", 2, later.bus.me.addresses)))
        later.commits.add("s-1")
        await later.until(lambda: later.peers.keys() == set(NAMES), 90)
        await ends_the_same(later, "s-1", network, data)
    finally:
        later.processes = {}
        await later.close()


async def test_a_store_that_is_away_pauses_training_and_says_so(conductor: Conductor, tmp_path: Path) -> None:
    """The folder of the parts becomes a file: nothing can be written below it, as on a full or read-only disk."""
    network, data = prepare_network("gpt-char", SETS, tmp_path)
    _, digest = await conductor.put(network, data)
    conductor.commits.add("s-1")
    await conductor.deploy("s-1", network, digest, spread(network), checkpoint_every=2, max_uncommitted=3)
    parts = tmp_path / "store" / conductor.deployments["s-1"].store_prefix / "parts"
    await conductor.run("s-1", 4)
    await conductor.until(lambda: conductor.all_held("s-1", 4) and conductor.committed("s-1") == 4)
    parts.rename(parts.with_name("aside"))
    parts.write_text("in the way")
    await conductor.run("s-1", 30)

    def all_say_so() -> bool:
        beats = [beat_of(conductor, name) for name in NAMES]
        return all(beat is not None and "store: cut of step 6: " in beat.waiting_for for beat in beats)

    await conductor.until(all_say_so)
    assert "parts" in beat_of(conductor, "p1").waiting_for  # type: ignore[union-attr]
    await trains_until(conductor, "s-1", 8)
    await asyncio.sleep(2.0)
    assert max(report.step for report in conductor.steps["s-1"]) <= 12
    assert not conductor.failed
    parts.unlink()
    parts.with_name("aside").rename(parts)
    await ends_the_same(conductor, "s-1", network, data)
    await conductor.until(lambda: all(beat_of(conductor, name).waiting_for == "" for name in NAMES))  # type: ignore[union-attr]
