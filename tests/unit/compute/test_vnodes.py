"""VNodes: first weights, state in and out, ties, frozen weights, traces, local clipping."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from networks.graph import NodeId
from pnode.reference import Reference, train
from pnode.vnodes import StateError, VNodes
from tests.golden.samples import FILES, GPT, MLP, Memory, read
from wire.errors import MisuseError

CPU = torch.device("cpu")


def test_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    whole = VNodes(network, [node.id for node in network.graph.nodes], device=CPU, seed=4)
    torch.manual_seed(77)
    alone = VNodes(network, [NodeId("fc2")], device=CPU, seed=4)
    other = VNodes(network, [NodeId("fc2")], device=CPU, seed=5)
    assert torch.equal(whole.state("fc2")["param.weight"], alone.state("fc2")["param.weight"])
    assert not torch.equal(other.state("fc2")["param.weight"], alone.state("fc2")["param.weight"])


def test_state_keys_and_exact_round_trip(tmp_path: Path) -> None:
    for name in ("mlp", "cnn", "gpt"):
        network = read(FILES[name], tmp_path)
        source = Memory(network)
        first = train(network, source, steps=2, seed=1)
        second = Reference(network, source, seed=9)
        second.load_state(first.state())
        for step in (2, 3):
            assert first.step(step).loss == second.step(step).loss
        for node, state in first.state().items():
            for key, tensor in state.items():
                assert torch.equal(tensor, second.state()[node][key])
    assert set(first.state()[NodeId("tok")]) == {
        "param.weight", "optim.exp_avg.weight", "optim.exp_avg_sq.weight", "optim.step.weight",
    }  # fmt: skip
    assert "head" not in first.state(), "a tied weight belongs to its owner"
    assert float(first.state()[NodeId("tok")]["optim.step.weight"]) == 4.0


def test_state_that_does_not_fit_is_refused_by_key(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    vnodes = VNodes(network, [NodeId("fc1")], device=CPU, seed=0)
    good = vnodes.state("fc1")
    cases = {
        "param.bias": {key: value for key, value in good.items() if key != "param.bias"},
        "param.extra": {**good, "param.extra": torch.zeros(1)},
        "param.weight": {**good, "param.weight": torch.zeros(2, 2)},
        "optim.exp_avg.weight": {**good, "optim.exp_avg.weight": good["optim.exp_avg.weight"].to(torch.bfloat16)},
    }
    for key, state in cases.items():
        with pytest.raises(StateError, match=key):
            vnodes.load_state("fc1", state)
    with pytest.raises(MisuseError, match="fc2"):
        vnodes.state("fc2")
    with pytest.raises(MisuseError, match="nowhere"):
        VNodes(network, [NodeId("nowhere")], device=CPU, seed=0)


def test_a_state_is_a_copy(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    reference = Reference(network, Memory(network))
    kept = reference.state()
    frozen = {node: {key: value.clone() for key, value in state.items()} for node, state in kept.items()}
    reference.step(0)
    assert all(torch.equal(kept[n][k], frozen[n][k]) for n in kept for k in kept[n])


def test_tied_uses_share_memory_where_they_can(tmp_path: Path) -> None:
    network = read(GPT, tmp_path)
    both = VNodes(network, [NodeId("tok"), NodeId("head")], device=CPU, seed=0)
    tok, head = both.modules[NodeId("tok")].weight, both.modules[NodeId("head")].weight
    assert tok is not head
    assert tok.data_ptr() == head.data_ptr()  # type: ignore[operator, union-attr]
    user = VNodes(network, [NodeId("head")], device=CPU, seed=0)
    assert torch.equal(user.modules[NodeId("head")].weight, tok)  # type: ignore[arg-type]
    assert user.parameters == []
    user.set_tie_version("tok", torch.ones(29, 24))
    assert bool((user.modules[NodeId("head")].weight == 1).all())
    with pytest.raises(MisuseError, match=r"expected \(29, 24\), got \(3,\)"):
        user.set_tie_version("tok", torch.ones(3))
    owner = VNodes(network, [NodeId("tok")], device=CPU, seed=0)
    with pytest.raises(MisuseError, match="tie gradient of 'head'"):
        owner.add_tie_gradient("head", torch.ones(3))
    with pytest.raises(MisuseError, match="tied"):
        owner.tie_gradient("pos")
    version = owner.tie_version("tok")
    assert version.data_ptr() != owner.modules[NodeId("tok")].weight.data_ptr()  # type: ignore[operator, union-attr]


def test_a_tied_parameter_counts_once_in_the_norm(tmp_path: Path) -> None:
    network = read(GPT, tmp_path)
    reference = Reference(network, Memory(network))
    reference.executor.forward(0, 0, {})
    reference.executor.backward(0, 0, {})
    uses = [reference.vnodes.modules[NodeId(n)].weight.grad.clone() for n in ("tok", "head")]  # type: ignore[union-attr, operator]
    report = reference.vnodes.report()
    names = {index: (node, name) for index, node, name, _ in reference.vnodes.parameters}
    squares = {names[index]: square for index, square in report.norms}
    assert squares["tok", "weight"] == pytest.approx(float((uses[0] + uses[1]).norm()) ** 2, rel=1e-6)  # type: ignore[index, operator]
    assert not [node for node, _ in squares if node == "head"]


def test_frozen_weights_stay(tmp_path: Path) -> None:
    text = MLP.replace("id: fc1, type: linear,", "id: fc1, type: linear, frozen: true,")
    network = read(text, tmp_path)
    reference = Reference(network, Memory(network))
    before = reference.state()
    reference.step(0)
    after = reference.state()
    assert torch.equal(before[NodeId("fc1")]["param.weight"], after[NodeId("fc1")]["param.weight"])
    assert not torch.equal(before[NodeId("fc2")]["param.weight"], after[NodeId("fc2")]["param.weight"])
    assert set(after[NodeId("fc1")]) == {"param.weight", "param.bias"}


def test_gradients_are_kept_only_with_trace_and_zero_where_none_came(tmp_path: Path) -> None:
    network = read(FILES["moe"], tmp_path)
    plain = Reference(network, Memory(network))
    plain.step(0)
    assert plain.vnodes.gradients("a") == {}
    traced = Reference(network, Memory(network), trace=True)
    before = traced.vnodes.state("unused")
    traced.step(0)
    assert bool((traced.vnodes.gradients("unused")["weight"] == 0).all())
    assert bool((traced.vnodes.gradients("a")["weight"] != 0).any())
    assert torch.equal(before["param.weight"], traced.vnodes.state("unused")["param.weight"])


def test_clip_local_limits_each_vnode(tmp_path: Path) -> None:
    network = read(MLP, tmp_path, "train.optimizer={type: sgd, lr: 1.0, clip_local: 0.01}")
    reference = Reference(network, Memory(network))
    before = reference.state()
    reference.step(0)
    after = reference.state()
    for node, old in before.items():
        moved = sum(float((after[node][key] - old[key]).norm()) ** 2 for key in old) ** 0.5
        assert moved == pytest.approx(0.01, rel=1e-3), node


def test_stats_for_people(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    reference = Reference(network, Memory(network))
    done = reference.step(0)
    stats = reference.vnodes.stats()
    assert stats["fc1"].parameters == {"weight": [33, 12], "bias": [33]}
    assert sum(each.gradient_norm**2 for each in stats.values()) ** 0.5 == pytest.approx(done.gradient_norm, rel=1e-6)
    assert stats["act1"].weight_norm == 0.0
    assert stats["fc1"].weight_norm > 0.0


def test_discard_leaves_no_trace(tmp_path: Path) -> None:
    network = read(GPT, tmp_path)
    reference, other = Reference(network, Memory(network)), Reference(network, Memory(network))
    reference.executor.forward(0, 0, {})
    reference.executor.backward(0, 0, {})
    reference.vnodes.report()
    reference.vnodes.discard()
    assert reference.step(0).gradient_norm == other.step(0).gradient_norm
