from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from networks.load import load
from networks.network import Network
from networks.recipe import DataRecipe
from pnode import reference
from pnode.data import open_source, pack
from tests.sim.pipeline import Pipeline
from wire.sim import Line, run_sim

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SETS = [
    "vars.ctx=8", "vars.d=8", "vars.heads=2", "vars.layers=2", "vars.dropout=0.1", "train.steps=4", "train.batch=5",
    "train.microbatches=3", "train.checkpoint.every=2",
]  # fmt: skip
BAD = Line(delay_s=0.01, jitter_s=0.02, drop=0.05, duplicate=0.05, reorder=0.2, reorder_s=0.1, damage=0.01)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Network, bytes]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    recipe = DataRecipe(text=str(folder / "text.txt"), tokenizer="char")
    packed = pack(recipe, cache_dir=folder, progress=None)
    network = load("gpt-char", sets=SETS, vars={"vocab": packed.vocab or 0})
    return network, Path(packed.path).read_bytes()


@pytest.fixture(scope="module")
def expected(tiny: tuple[Network, bytes]) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    network, data = tiny
    torch.set_num_threads(1)
    source = open_source(data, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs)
    losses: list[float] = []
    trained = reference.train(network, source, on_step=lambda step: losses.append(step.loss))
    return losses, {str(node): state for node, state in trained.state().items()}


def placements(network: Network, seed: int) -> dict[str, str]:
    """Thirds for seed 0, else anything on three PNodes, so that ties and loops between machines occur."""
    nodes = network.graph.nodes
    if seed == 0:
        return {str(node.id): f"p{1 + 3 * node.order // len(nodes)}" for node in nodes}
    pick = random.Random(seed)
    return {str(node.id): f"p{pick.randint(1, 3)}" for node in nodes}


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_changes_no_bit(
    seed: int,
    tiny: tuple[Network, bytes],
    expected: tuple[list[float], dict[str, dict[str, torch.Tensor]]],
    tmp_path: Path,
) -> None:
    network, data = tiny
    pipeline = Pipeline(network, data, placements(network, seed), seed=seed, line=BAD, home=tmp_path)
    run_sim(pipeline.run(network.recipe.steps))
    assert not pipeline.failed
    losses, theirs = expected
    assert pipeline.losses == losses
    ours = pipeline.states()
    assert ours.keys() == theirs.keys()
    for vnode, state in theirs.items():
        for key, tensor in state.items():
            assert torch.equal(ours[vnode][key], tensor), f"{vnode} {key}"
    assert {step for _, step in pipeline.saved} == {2, 4}
    for session in pipeline.sessions.values():
        assert not session.core.refused
        assert not session.hub.counters


def test_the_same_seed_does_the_same(tiny: tuple[Network, bytes], tmp_path: Path) -> None:
    network, data = tiny
    seen = []
    for _ in range(2):
        pipeline = Pipeline(network, data, placements(network, 3), seed=3, line=BAD, home=tmp_path)
        run_sim(pipeline.run(2))
        seen.append((dict(pipeline.net.counters), list(pipeline.sessions["p1"].core.story)))
    assert seen[0] == seen[1]


def test_a_crashed_pnode_fails_the_run_with_its_name(tiny: tuple[Network, bytes], tmp_path: Path) -> None:
    network, data = tiny

    async def crash(pipeline: Pipeline) -> None:
        await asyncio.sleep(0.3)
        pipeline.net.crash(pipeline.buses["p2"])

    pipeline = Pipeline(network, data, placements(network, 0), seed=1, line=Line(), home=tmp_path)
    run_sim(pipeline.run(network.recipe.steps, during=crash))
    assert {message.pnode for message in pipeline.failed} <= {"p1", "p3"}
    assert "p2 is lost" in pipeline.failed[0].text


def test_a_partition_is_waited_out(
    tiny: tuple[Network, bytes], expected: tuple[list[float], dict[str, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    network, data = tiny
    waits: list[str] = []

    async def cut(pipeline: Pipeline) -> None:
        await asyncio.sleep(0.2)
        pipeline.net.partition("p1", "p2")
        await asyncio.sleep(3.0)
        for session in pipeline.sessions.values():
            beat = session.beat(asyncio.get_running_loop().time())
            assert beat.waiting_s > 2.0
            waits.append(beat.waiting_for)
        pipeline.net.heal("p1", "p2")

    pipeline = Pipeline(network, data, placements(network, 0), seed=1, line=Line(), home=tmp_path)
    run_sim(pipeline.run(network.recipe.steps, during=cut))
    assert pipeline.losses == expected[0]
    assert any("p1: " in wait or "p2: " in wait for wait in waits)
    assert all("step" in wait for wait in waits)
