"""Field case B01: a PNode stands still while its neighbours send to it. Real processes, SIGSTOP and SIGCONT."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_field_cases import from_text, inspect
from tests.integration.pnode.test_recovery import ends_the_same, trains_until
from wire.messages import SessionBeat

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(280)]

NAMES = ("p1", "p2", "p3")
STEPS, MICROBATCHES, HOP_BYTES = 250, 8, 65536
CASE = f"""
version: 1
name: case
inputs:
  pixels: {{dtype: float32, shape: [batch, 1, 8, 8]}}
  targets: {{dtype: int64, shape: [batch]}}
nodes:
  - {{id: flat, type: flatten}}
  - {{id: fc1, type: linear, in: 64, out: 512}}
  - {{id: act1, type: relu}}
  - {{id: act2, type: tanh}}
  - {{id: head, type: linear, in: 512, out: 10}}
  - {{id: loss, type: cross_entropy}}
edges:
  - pixels -> flat -> fc1 -> act1 -> act2 -> head -> loss.logits
  - targets -> loss.targets
outputs: {{logits: head, loss: loss}}
train:
  data: {{dataset: digits, split: 0.8, sampler: shuffle}}
  batch: 256
  microbatches: {MICROBATCHES}
  steps: {STEPS}
  optimizer: {{type: adamw, lr: 1e-3}}
"""
PLACEMENT = {"flat": "p1", "fc1": "p1", "act1": "p2", "act2": "p2", "head": "p3", "loss": "p3"}
HALF_LEASE_S = 5.0
WINDOW_BYTES = 64 << 20
"""Twice what a link holds unacknowledged; 2,000 activations would be 125 MiB."""


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[Conductor]:
    found = Conductor(tmp_path)
    await found.start()
    yield found
    await found.close()


def beat_of(conductor: Conductor, pnode: str) -> SessionBeat:
    return next(one for one in conductor.beats[pnode].sessions if one.session == "s-1")


async def test_two_thousand_activations_and_a_receiver_that_stands_still(conductor: Conductor, tmp_path: Path) -> None:
    """Every activation is sent once and answered once, whoever is stopped and whenever; the sender slows down."""
    for name in NAMES:
        await conductor.spawn(name)
    await conductor.until(lambda: conductor.beats.keys() == set(NAMES))
    network, data = from_text(CASE, tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("s-1", network, digest, PLACEMENT)
    await conductor.run("s-1", STEPS)
    pick = random.Random(1)
    for turn, stopped in enumerate(("p2", "p3", "p1")):
        await trains_until(conductor, "s-1", 40 + 60 * turn + pick.randint(0, 20))
        before = {name: conductor.beats[name].rss_bytes for name in NAMES}
        conductor.processes[stopped].send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(HALF_LEASE_S)
            others = [name for name in NAMES if name != stopped]
            waits = {name: beat_of(conductor, name) for name in others}
            assert any(wait.waiting_for.startswith(f"{stopped}: ") for wait in waits.values()), waits
            for wait in waits.values():
                assert wait.waiting_for == "" or (wait.waiting_s > 2.0 and wait.limit_s == 900.0), wait
            grown = {name: conductor.beats[name].rss_bytes - before[name] for name in others}
            assert max(grown.values()) < WINDOW_BYTES, grown
        finally:
            conductor.processes[stopped].send_signal(signal.SIGCONT)
    await conductor.until(lambda: conductor.all_held("s-1", STEPS) or bool(conductor.failed), 200)
    assert not conductor.failed
    reports = await inspect(conductor, "s-1")
    hops = STEPS * MICROBATCHES
    assert hops == 2000
    assert reports["fc1"].bytes_out == hops * HOP_BYTES, "activations, to p2"
    assert reports["act1"].bytes_out == hops * HOP_BYTES, "gradients, to p1"
    assert reports["act2"].bytes_out == hops * HOP_BYTES, "activations, to p3"
    assert reports["head"].bytes_out == hops * HOP_BYTES, "gradients, to p2"
    await ends_the_same(conductor, "s-1", network, data)


async def test_beyond_the_limit_the_wait_ends_with_the_name_of_who_was_waited_for(
    conductor: Conductor, tmp_path: Path
) -> None:
    for name in NAMES:
        await conductor.spawn(name, "--compute-limit", "6", "--wait-limit", "6")
    await conductor.until(lambda: conductor.beats.keys() == set(NAMES))
    network, data = from_text(CASE, tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("s-1", network, digest, PLACEMENT)
    await conductor.run("s-1", STEPS)
    await trains_until(conductor, "s-1", 20)
    conductor.processes["p2"].send_signal(signal.SIGSTOP)
    try:
        await conductor.until(lambda: {failed.pnode for failed in conductor.failed} >= {"p1", "p3"}, 30)
    finally:
        conductor.processes["p2"].send_signal(signal.SIGCONT)
    for failed in conductor.failed:
        if failed.pnode != "p2":
            assert failed.cause == "wait"
            assert "waited 6 s for p2: " in failed.text
            assert "--wait-limit" in failed.hint
