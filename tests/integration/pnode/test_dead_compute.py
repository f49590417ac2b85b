"""Forward requests to a PNode whose compute thread has ended (field case B26) are answered soon, with the cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_field_cases import from_text
from tests.integration.pnode.test_inference import Client
from tests.integration.pnode.test_standing_still import CASE, PLACEMENT
from wire.messages import InferFailed, InferOutput

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ANSWER_S = 10.0
"""The daemon looks at its threads once a second; a request may be open for 60 s."""


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[Conductor]:
    found = Conductor(tmp_path)
    await found.start()
    yield found
    await found.close()


@pytest.mark.parametrize("state", ["at rest", "training"])
@pytest.mark.parametrize("how", ["end", "vanish"])
async def test_open_and_later_requests_are_answered(conductor: Conductor, tmp_path: Path, how: str, state: str) -> None:
    flag = tmp_path / "p2.flag"
    for name in ("p1", "p3"):
        await conductor.spawn(name)
    await conductor.spawn("p2", program=["tests.e2e.strange_pnode", how, "0", str(flag)])
    await conductor.until(lambda: conductor.beats.keys() == {"p1", "p2", "p3"})
    network, data = from_text(CASE, tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("s-1", network, digest, PLACEMENT)
    until = 5 if state == "at rest" else network.recipe.steps
    await conductor.run("s-1", until)
    if state == "at rest":
        await conductor.until(lambda: conductor.all_held("s-1", until))
    client = Client(conductor)
    await client.start()
    try:
        pixels = torch.rand(3, 1, 8, 8)
        found = await client.ask("s-1", ["logits"], pixels=pixels)
        assert isinstance(found["logits"][0], InferOutput)
        flag.touch()
        for _ in range(3):
            async with asyncio.timeout(ANSWER_S):
                found = await client.ask("s-1", ["logits"], pixels=pixels)
            failed = found["failed"][0]
            assert isinstance(failed, InferFailed)
            if failed.pnode == "p2":
                assert "thread" in failed.text, failed
        assert failed.pnode == "p2"
        await conductor.until(lambda: conductor.beats["p2"].compute == "dead", 10)
        assert conductor.processes["p2"].returncode is None
    finally:
        await client.bus.close()
