"""Three real PNode processes over TCP train exactly what one process trains."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from networks.load import load, read_recipe
from networks.network import Network
from pnode import reference
from pnode.data import open_source, pack
from storage.checkpoints import load_part, read_head
from storage.tensors import decode_tensors
from tests.integration.pnode.conductor import Conductor
from wire.requests import RefusedError

SMALL = [
    "train.data.limit_bytes=200000", "train.steps=6", "train.batch=6", "train.microbatches=3",
]  # fmt: skip
GPT = ["vars.ctx=16", "vars.d=32", "vars.heads=2", "vars.layers=2"]


pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def conductor(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Conductor]:
    """Three PNodes that all tests of this module share."""
    found = Conductor(tmp_path_factory.mktemp("cluster"))
    await found.start()
    for name in ("p1", "p2", "p3"):
        await found.spawn(name)
    await found.until(lambda: found.peers.keys() == {"p1", "p2", "p3"})
    yield found
    await found.close()
    assert sorted(found.gone) == ["p1", "p2", "p3"]


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


def at_random(network: Network, seed: int) -> dict[str, str]:
    pick = random.Random(seed)
    return {str(node.id): f"p{pick.randint(1, 3)}" for node in network.graph.nodes}


async def test_a_tied_gpt_on_three_pnodes_equals_one_process(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("gpt-char", [*SMALL, *GPT], tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("gpt-1", network, digest, spread(network))
    await conductor.run("gpt-1", 6)
    await conductor.until(lambda: conductor.all_held("gpt-1", 6))
    losses, theirs = train_here(network, data)
    assert [step.loss for step in conductor.steps["gpt-1"]] == losses
    assert [step.step for step in conductor.steps["gpt-1"]] == [1, 2, 3, 4, 5, 6]
    assert len({step.ids_digest for step in conductor.steps["gpt-1"]}) == 6
    assert_same(await states_of(conductor, "gpt-1", 6), theirs)
    await conductor.release("gpt-1")


async def test_networks_train_side_by_side_in_any_placement(conductor: Conductor, tmp_path: Path) -> None:
    """Branches that split and meet, batch statistics, ties with dropout: all at once on the same PNodes."""
    runs = {}
    for number, (name, sets) in enumerate(
        [("gpt-char", [*SMALL, *GPT, "vars.dropout=0.1"]), ("moe-digits", []), ("cnn-digits", []), ("mlp-digits", [])]
    ):
        sets = [*sets, "train.steps=4"]
        network, data = prepare_network(name, sets, tmp_path)
        _, digest = await conductor.put(network, data)
        session = f"side-{number}"
        await conductor.deploy(session, network, digest, at_random(network, number))
        runs[session] = (network, data)
    for session in runs:
        await conductor.run(session, 4)
    for session, (network, data) in runs.items():
        await conductor.until(lambda session=session: conductor.all_held(session, 4))
        losses, theirs = train_here(network, data)
        assert [step.loss for step in conductor.steps[session]] == losses, network.id
        assert_same(await states_of(conductor, session, 4), theirs)
        await conductor.release(session)
    assert not conductor.failed


async def test_resume_from_a_checkpoint_goes_on_with_the_same_samples(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("gpt-char", [*SMALL, *GPT, "vars.dropout=0.1"], tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("resume-1", network, digest, spread(network), trace=True)
    await conductor.run("resume-1", 3)
    await conductor.until(lambda: conductor.all_held("resume-1", 3))
    manifest = await conductor.commit("resume-1", 3)
    head = await read_head(conductor.store, conductor.deployments["resume-1"].store_prefix)
    assert head is not None
    await conductor.release("resume-1")
    await conductor.deploy(
        "resume-1", network, digest, at_random(network, 5), start_step=3, manifest_digest=head.manifest_digest,
        manifest_key=head.manifest_key,
    )  # fmt: skip
    await conductor.run("resume-1", 6)
    await conductor.until(lambda: conductor.all_held("resume-1", 6))
    losses, theirs = train_here(network, data)
    assert [step.loss for step in conductor.steps["resume-1"]] == losses
    assert_same(await states_of(conductor, "resume-1", 6), theirs)
    assert manifest.step == 3
    prefix = conductor.deployments["resume-1"].store_prefix
    traced = [entry.key async for entry in conductor.store.list(f"{prefix}trace/2/")]
    assert f"{prefix}trace/2/tok.safetensors" in traced
    stored = await conductor.store.get(f"{prefix}trace/2/tok.safetensors")
    assert {"param.weight", "grad.weight"} <= decode_tensors(stored.data, key="trace").keys()
    await conductor.release("resume-1")


async def test_hold_stops_all_at_one_step_and_saves_it(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("gpt-char", [*SMALL, *GPT, "train.steps=5000"], tmp_path)
    _, digest = await conductor.put(network, data)
    placement = spread(network)
    await conductor.deploy("hold-1", network, digest, placement)
    await conductor.run("hold-1", 5000)
    await conductor.until(lambda: len(conductor.steps.get("hold-1", [])) > 3)
    with pytest.raises(RefusedError, match="decides about holds"):
        await conductor.hold("hold-1", "p1", True)
    await conductor.hold("hold-1", "p3", True)
    await conductor.until(lambda: len(conductor.held.get("hold-1", {})) == 3)
    (step,) = set(conductor.held["hold-1"].values())
    manifest = await conductor.commit("hold-1", step)
    assert manifest.step == step < 5000
    await conductor.release("hold-1")


async def test_a_loss_that_is_not_finite_ends_the_run_everywhere(conductor: Conductor, tmp_path: Path) -> None:
    sets = [*SMALL, *GPT, "train.optimizer.lr=1e30", "train.optimizer.clip=1e30", "train.schedule={type: constant}"]
    network, data = prepare_network("gpt-char", sets, tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("nan-1", network, digest, spread(network))
    await conductor.run("nan-1", 6)
    await conductor.until(lambda: bool(conductor.failed))
    (failed,) = conductor.failed
    conductor.failed.clear()
    assert failed.vnode in conductor.deployments["nan-1"].placement
    assert f"step {failed.step + 1} was not applied: a value in VNode '{failed.vnode}' is not finite" in failed.text
    with pytest.raises(RefusedError, match="not finite"):
        await conductor.run("nan-1", 6)
    await conductor.release("nan-1")


async def test_a_deployment_that_can_not_be_is_refused_with_the_cause(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("mlp-digits", [], tmp_path)
    _, digest = await conductor.put(network, data)
    with pytest.raises(RefusedError, match="0000"):
        await conductor.deploy("bad-1", network, digest, spread(network), network_digest="0" * 64)
    with pytest.raises(RefusedError, match="no checkpoint is named"):
        await conductor.deploy("bad-1", network, digest, spread(network), start_step=3)
    await conductor.deploy("bad-1", network, digest, spread(network))
    conductor.epochs["bad-1"] = 1
    with pytest.raises(RefusedError, match="epoch 2 of bad-1 is over, epoch 3"):
        await conductor.deploy("bad-1", network, digest, spread(network))
    conductor.epochs["bad-1"] = 3
    await conductor.release("bad-1")


async def test_the_loop_stays_quick_while_it_computes(conductor: Conductor, tmp_path: Path) -> None:
    """Heartbeats carry the worst lag of the loop since the last one."""
    network, data = prepare_network("gpt-char", [*SMALL, *GPT, "train.steps=100000"], tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("lag-1", network, digest, spread(network))
    await conductor.run("lag-1", 100_000)
    lags: list[float] = []
    seen: dict[str, object] = {}
    for _ in range(20):
        await asyncio.sleep(0.2)
        for name, beat in conductor.beats.items():
            if seen.get(name) is not beat:
                seen[name] = beat
                lags.append(beat.loop_lag_s)
    await conductor.hold("lag-1", "p3", False)
    await conductor.until(lambda: len(conductor.held.get("lag-1", {})) == 3)
    await conductor.release("lag-1")
    assert sorted(lags)[len(lags) // 2] < 0.05


async def test_whoever_waits_for_a_killed_pnode_says_so(conductor: Conductor, tmp_path: Path) -> None:
    """Last of this module: it takes p2 away. That the run then fails is the orchestrator's part, by the lease."""
    network, data = prepare_network("gpt-char", [*SMALL, *GPT, "train.steps=100000"], tmp_path)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("kill-1", network, digest, spread(network))
    await conductor.run("kill-1", 100_000)
    await conductor.until(lambda: len(conductor.steps.get("kill-1", [])) > 1)
    conductor.processes["p2"].kill()

    def all_wait() -> bool:
        beats = [beat for name in ("p1", "p3") for beat in conductor.beats[name].sessions if beat.session == "kill-1"]
        assert all(beat.limit_s > beat.waiting_s for beat in beats), "no wait is shown without its deadline"
        return len(beats) == 2 and all("p2: " in beat.waiting_for and beat.waiting_s > 1.0 for beat in beats)

    await conductor.until(all_wait)
    await conductor.processes["p2"].wait()
    conductor.gone.append("p2")
