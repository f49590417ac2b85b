"""The short campaign for every day: each kind of fault at least once, on three small networks; the seed is printed.

`python -m tests.chaos` is the long one. Another seed: DCNR_CHAOS_SEED=17 pytest tests/chaos/test_short.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cli.chaos.engine import Rules
from cli.chaos.faults import Kind
from cli.chaos.fleet import Launch, Shape
from cli.chaos.reference import undisturbed
from cli.chaos.trial import Survived, Trial, undergo
from cli.terminal import Terminal
from tests.chaos.campaign import listened
from tests.chaos.nets import CNN, GPT, MOE, Net
from tests.chaos.smalldisk import small_disk
from tests.chaos.weed import Weed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SEED = int(os.environ.get("DCNR_CHAOS_SEED") or time.time())


def survive(net: Net, shape: Shape, order: tuple[Kind, ...], tmp_path: Path) -> Survived:
    """A run that is hurt in this order and then held has to be where the undisturbed one is after as many steps."""
    prepared = net.prepared(tmp_path / "data", steps=100_000)
    story: list[str] = []
    shape = replace(shape, seed=SEED)
    rules = Rules(faults=len(order), stuck_s=90.0, pause_at_end=True)
    trial = Trial(shape, SEED, dict.fromkeys(order, 1.0), rules, 0.1, members=3, order=order, told=listened(story))
    print(f"DCNR_CHAOS_SEED={SEED}")
    try:
        survived = asyncio.run(undergo(trial, prepared, Terminal("json")))
    finally:
        print("\n".join(story))
    steps = survived.outcome.step
    expected = undisturbed(prepared, steps, threads=1)
    problems = survived.sight.compare(expected.losses, expected.hashes[steps], steps)
    assert problems + survived.outcome.breaches == []
    assert survived.outcome.state == "paused"
    assert survived.sight.highest > max(wound.step for wound in survived.outcome.wounds)
    assert [wound.kind for wound in survived.outcome.wounds] == list(order)
    return survived


def test_processes_die_and_stand_still(tmp_path: Path, launch: Launch) -> None:
    """kill -9 and SIGSTOP of PNodes, one PNode after another, the orchestrator, a usurper, a client."""
    order = (Kind.KILL, Kind.ORCHESTRATOR, Kind.DOUBLE, Kind.CLI, Kind.PAUSE, Kind.USURP)
    survived = survive(GPT, Shape(tmp_path / "home", 5, 1.0, launch=launch), order, tmp_path)
    assert survived.outcome.epochs > 1


def test_lines_and_the_s3_server_fail(tmp_path: Path, launch: Launch) -> None:
    """Connections are reset and cut, bits flip, SeaweedFS is killed; the proxy stands before it too."""
    weed = Weed(tmp_path / "weed")
    try:
        weed.start()
        weed.make_bucket("dcnr")
        order = (Kind.DROP, Kind.STORE, Kind.FLIP, Kind.CUT, Kind.KILL, Kind.FLIP, Kind.DROP)
        shape = Shape(tmp_path / "home", 5, 1.0, store=weed.url("dcnr", "short"), server=weed, launch=launch)
        survive(CNN, shape, order, tmp_path)
    finally:
        weed.stop()


def test_slow_lines_and_a_full_disk(tmp_path: Path, launch: Launch) -> None:
    """Connections are delayed, throttled and cut in one direction; the store's disk is full for a while."""
    with small_disk(tmp_path / "disk") as disk:
        order = (Kind.DELAY, Kind.DISK, Kind.THROTTLE, Kind.ONEWAY, Kind.KILL, Kind.DISK)
        if disk is None:
            order = tuple(kind for kind in order if kind is not Kind.DISK)
        store = (disk / "store").as_uri() if disk is not None else ""
        survive(MOE, Shape(tmp_path / "home", 5, 1.0, store=store, disk=disk, launch=launch), order, tmp_path)
