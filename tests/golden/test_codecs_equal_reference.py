"""With codecs too a network gives the bits of one process, whatever the placement, if that rounds the same groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from networks.graph import NodeId
from networks.network import Network
from networks.stages import wished_groups
from pnode import codecs, tensors
from pnode.codecs import Rounded
from pnode.reference import Reference, Step
from tests.golden.cut import Cut, random_groups, random_placement
from tests.golden.samples import FILES, Memory, read
from tests.golden.test_cut_equals_reference import CASES, difference

STEPS = 3


def run_reference(
    network: Network, source: Memory, groups: tuple
) -> tuple[list[Step], dict[NodeId, dict[str, Tensor]]]:  # type: ignore[type-arg]
    reference = Reference(network, source, seed=3, groups=groups)
    return [reference.step(step) for step in range(STEPS)], reference.state()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_groups_of_one_placement_give_the_same_bits_in_any_other(case: str, precision: str, tmp_path: Path) -> None:
    name, sets = CASES[case]
    network = read(FILES[name], tmp_path, *sets, "train.microbatches=2", f"train.precision={precision}")
    source = Memory(network, ignored=0.2)
    plain, unrounded = run_reference(network, source, ())
    coded = rounded_only = 0
    for seed in range(4):
        print(f"seed {seed}")
        first = random_placement(network, 3, seed)
        groups = random_groups(network, first, seed)
        losses, whole = run_reference(network, source, groups)
        if groups and precision == "float32":
            assert difference(whole, unrounded), "a run with codecs is not the run without"
        for pnodes, other in ((0, first), (1, seed), (2, seed + 1), (3, seed + 2), (5, seed + 3)):
            placement = random_placement(network, pnodes, other) if pnodes else first
            cut = Cut(network, source, placement, seed=3, groups=groups)  # type: ignore[arg-type]
            got = [cut.step(step) for step in range(STEPS)]
            assert got == [(step.loss, step.gradient_norm) for step in losses], (seed, pnodes)
            assert difference(cut.state(), whole) == [], (seed, pnodes)
            coded += cut.coded
            rounded_only += bool(groups) and not cut.coded
    assert coded > 0
    assert rounded_only > 0, "groups that do not cross any more have to be rounded all the same"
    assert len(plain) == STEPS


def test_recomputed_activations_are_rounded_again(tmp_path: Path) -> None:
    network = read(FILES["gpt"], tmp_path, "vars.drop=0.1", "train.microbatches=2", "train.recompute=true")
    source = Memory(network)
    groups = random_groups(network, random_placement(network, 3, 1), 1)
    losses, whole = run_reference(network, source, groups)
    cut = Cut(network, source, random_placement(network, 3, 2), seed=3, groups=groups)
    assert [cut.step(step) for step in range(STEPS)] == [(step.loss, step.gradient_norm) for step in losses]
    assert difference(cut.state(), whole) == []


def test_inference_is_the_same_in_one_stage_and_in_many(tmp_path: Path) -> None:
    network = read(FILES["moe"], tmp_path)
    source = Memory(network)
    placement = random_placement(network, 3, 0)
    groups = random_groups(network, placement, 0)
    batch = source.batch("train", 0, 0, 0)
    inputs = {name: batch[name] for name in network.graph.inputs}
    one, _ = Reference(network, source, seed=3, groups=groups).infer(inputs, set(network.graph.outputs))
    bare, _ = Reference(network, source, seed=3).infer(inputs, set(network.graph.outputs))
    many = Cut(network, source, placement, seed=3, groups=groups).infer(inputs)
    assert many.keys() == one.keys()
    assert all(torch.equal(many[name], one[name]) for name in one)
    assert not all(torch.equal(bare[name], one[name]) for name in one)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_value_that_is_not_finite_fails_the_step_and_names_its_vnode(codec: str, bad: float, tmp_path: Path) -> None:
    network = read(FILES["mlp"], tmp_path)
    source = Memory(network)
    placement = {node.id: "p0" if node.order < 3 else "p1" for node in network.graph.nodes}
    groups = tuple(group for _, group in wished_groups(network.graph, placement, codec))
    cut = Cut(network, source, placement, groups=groups)
    with torch.no_grad():
        next(cut.vnodes["p0"].modules[NodeId("fc2")].parameters())[0, 0] = bad
    cut.forward(0, 0)
    assert cut.coded
    cut.backward(0, 0)
    maker, loss = (cut.vnodes[name].report() for name in ("p0", "p1"))
    assert (maker.finite, maker.culprit) == (False, "fc2")
    assert (loss.finite, loss.culprit) == (False, "")


# ------------------------------------------------------------ planted bugs


def scale_of_another_block(patch: pytest.MonkeyPatch) -> None:
    def wrong(data: Tensor, codec: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
        count = codecs.blocks_of(shape) * codecs.SCALE_BYTES if codec == "int8" else 0
        data = torch.cat([data[:count].roll(codecs.SCALE_BYTES), data[count:]])
        return codecs.decode(data, codec, dtype, shape)

    patch.setattr(tensors, "decode", wrong)


def gradient_not_coded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounded, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def activation_not_coded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounded, "forward", staticmethod(_as_it_is))


def _as_it_is(ctx: codecs.Any, value: Tensor, codec: str) -> Tensor:
    ctx.codec = codec
    return value.clone()


def decoded_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(data: Tensor, codec: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
        found = codecs.decode(data, codec, dtype, shape)
        if codec != "int8":
            return found
        scales = data[: 4 * codecs.blocks_of(shape)].view(torch.float32)
        last = shape[-1] if shape else 1
        return (found.reshape(-1, last) * scales.reshape(-1, 1)).reshape(shape)

    patch.setattr(tensors, "decode", twice)


def truncated_bf16(patch: pytest.MonkeyPatch) -> None:
    """The lower half cut off, instead of rounded, on the wire alone."""

    def cut(tensor: Tensor, codec: str) -> Tensor:
        if codec != "bf16":
            return codecs.encode(tensor, codec)
        return tensor.contiguous().view(torch.int16).reshape(-1, 2)[:, 1].contiguous().view(torch.uint8)

    patch.setattr(tensors, "encode", cut)


PLANTED = [scale_of_another_block, gradient_not_coded, activation_not_coded, decoded_twice, truncated_bf16]


@pytest.mark.parametrize("plant", PLANTED, ids=[plant.__name__ for plant in PLANTED])
def test_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = read(FILES["gpt"], tmp_path, "train.microbatches=2")
    source = Memory(network)
    placement = random_placement(network, 3, 1)
    groups = random_groups(network, placement, 1)
    assert {group.codec for group in groups} == {"bf16", "int8"}

    def differences() -> list[str]:
        _, whole = run_reference(network, source, groups)
        cut = Cut(network, source, placement, seed=3, groups=groups)
        for step in range(STEPS):
            cut.step(step)
        return difference(cut.state(), whole)

    assert differences() == []
    plant(monkeypatch)
    assert differences() != []
