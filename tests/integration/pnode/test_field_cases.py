"""Cases from the field on three real PNode processes over TCP, each against one process that knows no wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

from networks.graph import NodeId
from networks.load import load, read_recipe
from networks.network import Network
from pnode.data import open_source, pack
from pnode.reference import NotFinite, Reference
from storage.checkpoints import load_part, read_head, read_manifest
from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_training import (
    GPT,
    SMALL,
    assert_same,
    at_random,
    prepare_network,
    spread,
    states_of,
    train_here,
)
from wire.ids import new_request_id
from wire.messages import InspectRun, VNodeReport
from wire.requests import RefusedError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

HEAD = """
version: 1
name: case
inputs:
  pixels: {dtype: float32, shape: [batch, 64]}
  targets: {dtype: int64, shape: [batch]}
"""

WIDE = (
    HEAD
    + """
nodes:
  - {id: fc1, type: linear, in: 64, out: 65536}
  - {id: act, type: relu}
  - {id: fc2, type: linear, in: 65536, out: 10}
  - {id: loss, type: cross_entropy}
edges:
  - pixels -> fc1 -> act -> fc2 -> loss.logits
  - targets -> loss.targets
outputs: {logits: fc2, loss: loss}
train:
  data: {dataset: digits, split: 0.8, sampler: shuffle}
  batch: 128
  microbatches: 2
  steps: 6
  optimizer: {type: adamw, lr: 1e-3, clip: 1.0}
"""
)  # an activation of a microbatch has 16 MiB

BRANCHES = (
    HEAD
    + """
nodes:
  - {id: stem, type: linear, in: 64, out: 32}
  - {id: halves, type: split, parts: 2}
  - {id: left, type: linear, in: 16, out: 16}
  - {id: right, type: linear, in: 16, out: 16}
  - {id: sum, type: add}
  - {id: idle, type: linear, in: 16, out: 16}
  - {id: end, type: tanh}
  - {id: head, type: linear, in: 16, out: 10}
  - {id: loss, type: cross_entropy}
edges:
  - pixels -> stem -> halves
  - halves.0 -> left -> sum -> head -> loss.logits
  - halves.1 -> right -> sum
  - halves.1 -> idle -> end
  - targets -> loss.targets
outputs: {logits: head, loss: loss, unused: end}
train:
  data: {dataset: digits, split: 0.8, sampler: shuffle}
  batch: 64
  microbatches: 4
  steps: 8
  optimizer: {type: adamw, lr: 1e-2, weight_decay: 0.1, clip: 1.0}
"""
)

EXPLODING = (
    HEAD
    + """
nodes:
  - {id: fc1, type: linear, in: 64, out: 32}
  - {id: act1, type: relu}
  - {id: fc2, type: linear, in: 32, out: 32}
  - {id: act2, type: relu}
  - {id: head, type: linear, in: 32, out: 10}
  - {id: loss, type: cross_entropy}
edges:
  - pixels -> fc1 -> act1 -> fc2 -> act2 -> head -> loss.logits
  - targets -> loss.targets
outputs: {logits: head, loss: loss}
train:
  data: {dataset: digits, split: 0.8, sampler: shuffle}
  batch: 64
  microbatches: 2
  steps: 40
  optimizer: {type: sgd, lr: 1e6}
"""
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def conductor(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Conductor]:
    """Three PNodes that all tests of this module share."""
    found = Conductor(tmp_path_factory.mktemp("cases"))
    await found.start()
    for name in ("p1", "p2", "p3"):
        await found.spawn(name)
    await found.until(lambda: found.peers.keys() == {"p1", "p2", "p3"})
    yield found
    await found.close()
    assert sorted(found.gone) == ["p1", "p2", "p3"]


def from_text(text: str, folder: Path, *sets: str) -> tuple[Network, bytes]:
    path = folder / "case.yaml"
    path.write_text(text)
    recipe = read_recipe(path, list(sets))
    assert recipe.data is not None
    packed = pack(recipe.data, cache_dir=folder / "cache", progress=None)
    return load(path, sets=list(sets)), Path(packed.path).read_bytes()


async def run(
    conductor: Conductor, session: str, network: Network, data: bytes, placement: dict[str, str], **options: object
) -> list[float]:
    """Deploy, train to the end, and the losses."""
    _, digest = await conductor.put(network, data)
    steps = network.recipe.steps
    await conductor.deploy(session, network, digest, placement, **options)
    await conductor.run(session, steps)
    await conductor.until(lambda: conductor.all_held(session, steps) or bool(conductor.failed), 180)
    assert not conductor.failed
    return [step.loss for step in conductor.steps[session]]


async def inspect(conductor: Conductor, session: str) -> dict[str, VNodeReport]:
    """What all PNodes say about their VNodes."""
    found = {}
    for peer in conductor.deployments[session].peers.values():
        question = InspectRun(str(new_request_id()), session, conductor.epochs[session])
        _, frames = await conductor.bus.ask(peer, question, timeout_s=20)
        found |= {report.vnode: report for report in msgspec.msgpack.decode(frames[0], type=list[VNodeReport])}
    return found


async def test_large_activations_sent_without_a_copy_arrive_as_they_were(conductor: Conductor, tmp_path: Path) -> None:
    """Field case B09: 16 MiB hops both ways through a relu, updates right behind them; the state is the one of a run
    that sends nothing."""
    network, data = from_text(WIDE, tmp_path)
    placement = {"fc1": "p1", "act": "p2", "fc2": "p3", "loss": "p3"}
    ours = await run(conductor, "wide-1", network, data, placement)
    losses, theirs = train_here(network, data)
    assert ours == losses
    assert_same(await states_of(conductor, "wide-1", network.recipe.steps), theirs)
    reports = await inspect(conductor, "wide-1")
    assert reports["act"].bytes_out >= 2 * 2 * 16 * 2**20 * network.recipe.steps
    await conductor.release("wide-1")


@pytest.mark.parametrize("seed", [1, 2])
async def test_branches_that_meet_again_and_one_that_does_not(conductor: Conductor, tmp_path: Path, seed: int) -> None:
    """Field case B54: the unused branch is fed by a border of its own, gets no gradient and keeps its weights."""
    network, data = from_text(BRANCHES, tmp_path)
    session = f"branch-{seed}"
    placement = {**at_random(network, seed), "halves": "p1", "idle": "p2", "left": "p2", "right": "p3"}
    ours = await run(conductor, session, network, data, placement, trace=True)
    losses, theirs = train_here(network, data)
    assert ours == losses
    states = await states_of(conductor, session, network.recipe.steps)
    assert_same(states, theirs)
    start = Reference(network, None, seed=network.recipe.seed).state()[NodeId("idle")]  # type: ignore[arg-type]
    assert torch.equal(states["idle"]["param.weight"], start["param.weight"])
    assert (await inspect(conductor, session))["idle"].gradient_norm == 0.0
    await conductor.release(session)


@pytest.mark.parametrize("recompute", ["true", "false"])
async def test_dropout_survives_recomputation_and_migration(
    conductor: Conductor, tmp_path: Path, recompute: str
) -> None:
    """Field cases B57 and B55: every VNode of a tied GPT moves to another PNode half-way; losses and state are those
    of one process that neither recomputes nor moves."""
    sets = [*SMALL, *GPT, "vars.dropout=0.1", "train.steps=8"]
    plain, data = prepare_network("gpt-char", sets, tmp_path)
    network, _ = prepare_network("gpt-char", [*sets, f"train.recompute={recompute}"], tmp_path)
    session = f"moves-{recompute}"
    _, digest = await conductor.put(network, data)
    first = spread(network)
    await conductor.deploy(session, network, digest, first)
    await conductor.run(session, 4)
    await conductor.until(lambda: conductor.all_held(session, 4))
    await conductor.commit(session, 4)
    head = await read_head(conductor.store, conductor.deployments[session].store_prefix)
    assert head is not None
    await conductor.release(session)
    moved = {vnode: {"p1": "p2", "p2": "p3", "p3": "p1"}[pnode] for vnode, pnode in first.items()}
    await conductor.deploy(
        session, network, digest, moved, start_step=4, manifest_digest=head.manifest_digest,
        manifest_key=head.manifest_key,
    )  # fmt: skip
    await conductor.run(session, 8)
    await conductor.until(lambda: conductor.all_held(session, 8))
    losses, theirs = train_here(plain, data)
    assert [step.loss for step in conductor.steps[session]] == losses
    assert_same(await states_of(conductor, session, 8), theirs)
    await conductor.release(session)


def last_good_step(network: Network, data: bytes) -> tuple[Reference, int, str]:
    """Train in one process until a value is not finite: its state before that, the steps made, the VNode."""
    source = open_source(data, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs)
    reference = Reference(network, source, seed=network.recipe.seed)
    for step in range(network.recipe.steps):
        try:
            reference.step(step)
        except NotFinite as error:
            return reference, step, error.vnode
    raise AssertionError("it does not explode")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
async def test_a_step_that_is_not_finite_is_applied_nowhere(
    conductor: Conductor, tmp_path: Path, precision: str
) -> None:
    """The loss becomes Inf after some good steps: all VNodes keep the state of the last one, its checkpoint stays and
    loads, VNode and step are named, and the run does not go on."""
    network, data = from_text(EXPLODING, tmp_path, f"train.precision={precision}")
    theirs, good, culprit = last_good_step(network, data)
    assert 1 <= good < network.recipe.steps
    session = f"inf-{precision}"
    _, digest = await conductor.put(network, data)
    placement = dict(
        zip(("fc1", "act1", "fc2", "act2", "head", "loss"), ("p1", "p2", "p2", "p3", "p1", "p3"), strict=True)
    )
    await conductor.deploy(session, network, digest, placement, checkpoint_every=good)
    await conductor.run(session, network.recipe.steps)
    await conductor.until(lambda: bool(conductor.failed))
    (failed,) = conductor.failed
    conductor.failed.clear()
    assert failed.step == good
    assert failed.vnode == culprit
    assert f"step {good + 1} was not applied: a value in VNode '{culprit}' is not finite" in failed.text
    assert [step.step for step in conductor.steps[session]] == list(range(1, good + 1))

    reports = await inspect(conductor, session)
    norms = theirs.vnodes.stats()
    assert {report.step for report in reports.values()} == {good}
    assert {vnode: report.weight_norm for vnode, report in reports.items()} == {
        str(vnode): stats.weight_norm for vnode, stats in norms.items()
    }
    await conductor.commit(session, good)
    await stays(conductor, session, good, theirs)
    with pytest.raises(RefusedError, match="not finite"):
        await conductor.run(session, network.recipe.steps)
    await conductor.release(session)
    await stays(conductor, session, good, theirs)


async def stays(conductor: Conductor, session: str, step: int, theirs: Reference) -> None:
    """The head is the cut of that step, and all of it loads."""
    prefix = conductor.deployments[session].store_prefix
    head = await read_head(conductor.store, prefix)
    assert head is not None
    assert head.step == step
    manifest = await read_manifest(conductor.store, prefix, head.manifest_key, head.manifest_digest)
    states = {part.vnode: await load_part(conductor.store, prefix, part) for part in manifest.parts}
    assert_same(states, {str(vnode): state for vnode, state in theirs.state().items()})
