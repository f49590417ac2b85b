"""A network cut anywhere gives the bits of one process: loss, gradient norm, gradients and every state tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from networks.graph import NodeId
from pnode.reference import Reference
from tests.golden.cut import Cut, random_placement
from tests.golden.samples import FILES, Memory, read

STEPS = 3

CASES = {
    "mlp": ("mlp", ()),
    "cnn": ("cnn", ()),
    "gpt": ("gpt", ("vars.drop=0.1",)),
    "gpt-grouped-rotary": ("gpt", ("vars.drop=0.1", "vars.heads=4", "vars.kv=2", "vars.rotary=true")),
    "moe": ("moe", ()),
    "views": ("views", ()),
}


def difference(ours: dict[NodeId, dict[str, Tensor]], other: dict[NodeId, dict[str, Tensor]]) -> list[str]:
    """What is not equal to the last bit."""
    assert ours.keys() == other.keys()
    found = []
    for node, state in ours.items():
        assert state.keys() == other[node].keys()
        found += [f"{node}.{key}" for key in state if not torch.equal(state[key], other[node][key])]
    return found


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_random_placements(case: str, microbatches: int, tmp_path: Path) -> None:
    name, sets = CASES[case]
    network = read(FILES[name], tmp_path, *sets, f"train.microbatches={microbatches}")
    source = Memory(network, ignored=0.2)
    reference = Reference(network, source, seed=3, trace=True)
    losses = [reference.step(step) for step in range(STEPS)]
    whole = reference.state()
    gradients = {node.id: reference.vnodes.gradients(node.id) for node in network.graph.nodes}
    hops = 0
    for pnodes in (1, 2, 3, 5):
        for seed in range(5):
            cut = Cut(network, source, random_placement(network, pnodes, seed), seed=3, trace=True)
            got = [cut.step(step) for step in range(STEPS)]
            assert got == [(step.loss, step.gradient_norm) for step in losses], (pnodes, seed)
            assert difference(cut.state(), whole) == [], (pnodes, seed)
            ours = {node: cut.vnodes[cut.placement[node]].gradients(node) for node in cut.placement}
            assert difference(ours, gradients) == [], (pnodes, seed)
            assert all(stage.stash_count == 0 for stage in cut.stages)
            hops += cut.hops
    assert hops > 0
