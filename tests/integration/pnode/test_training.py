"""Three real PNode processes over TCP train exactly what one process trains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from networks.load import load, read_recipe
from networks.network import Network
from pnode import reference
from pnode.data import open_source, pack
from storage.checkpoints import load_part
from tests.integration.pnode.conductor import Conductor

SMALL = [
    "train.data.limit_bytes=200000", "train.steps=6", "train.batch=6", "train.microbatches=3",
]  # fmt: skip
GPT = ["vars.ctx=16", "vars.d=32", "vars.heads=2", "vars.layers=2"]


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[Conductor]:
    found = Conductor(tmp_path)
    await found.start()
    yield found
    await found.close()


async def three(conductor: Conductor) -> None:
    for name in ("p1", "p2", "p3"):
        await conductor.spawn(name)
    await conductor.until(lambda: conductor.peers.keys() == {"p1", "p2", "p3"})


def prepare_network(name: str, sets: list[str], tmp_path: Path) -> tuple[Network, bytes]:
    recipe = read_recipe(name, sets)
    assert recipe.data is not None
    packed = pack(recipe.data, cache_dir=tmp_path / "cache", progress=None)
    data = Path(packed.path).read_bytes()
    return load(name, sets=sets, vars={"vocab": packed.vocab} if packed.vocab else {}), data


def spread(network: Network, pnodes: int = 3) -> dict[str, str]:
    """Contiguous thirds, so that a tied head is far from its owner."""
    nodes = network.graph.nodes
    return {str(node.id): f"p{1 + index * pnodes // len(nodes)}" for index, node in enumerate(nodes)}


async def states_of(conductor: Conductor, session: str, step: int) -> dict[str, dict[str, torch.Tensor]]:
    manifest = await conductor.commit(session, step)
    prefix = conductor.deployments[session].store_prefix
    return {part.vnode: await load_part(conductor.store, prefix, part) for part in manifest.parts}


def train_here(network: Network, data: bytes) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    source = open_source(data, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs)
    losses: list[float] = []
    trained = reference.train(network, source, threads=1, on_step=lambda step: losses.append(step.loss))
    return losses, {str(node): state for node, state in trained.state().items()}


def assert_same(ours: dict[str, dict[str, torch.Tensor]], theirs: dict[str, dict[str, torch.Tensor]]) -> None:
    assert ours.keys() == theirs.keys()
    for vnode, state in theirs.items():
        assert ours[vnode].keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(ours[vnode][key], tensor), f"{vnode} {key}"


@pytest.mark.e2e
async def test_a_tied_gpt_on_three_pnodes_equals_one_process(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("gpt-char", [*SMALL, *GPT], tmp_path)
    await three(conductor)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("gpt-1", network, digest, spread(network))
    await conductor.run("gpt-1", 6)
    await conductor.until(lambda: conductor.all_held("gpt-1", 6))
    losses, theirs = train_here(network, data)
    assert [step.loss for step in conductor.steps["gpt-1"]] == losses
    assert_same(await states_of(conductor, "gpt-1", 6), theirs)
