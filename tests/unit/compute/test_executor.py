"""StageExecutor: static gradient flow, recomputation, precision, inference, devices, values that are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from networks.graph import NodeId
from networks.stages import cut_stages
from pnode.executor import MEASURE_EVERY, StageExecutor
from pnode.liveness import find_live
from pnode.reference import NotFinite, Reference, train
from pnode.vnodes import VNodes
from tests.golden.cut import Cut, random_placement
from tests.golden.samples import CNN, FILES, GPT, MLP, MOE, Memory, read
from tests.golden.test_cut_equals_reference import difference
from wire.errors import MisuseError

CPU = torch.device("cpu")


def test_unused_and_frozen_branches_give_no_gradient_and_wait_for_none(tmp_path: Path) -> None:
    """Field case B54: two branches that meet again, one unused branch; nothing hangs, gradients are autograd's."""
    network = read(MOE, tmp_path)
    placement = {node.id: node.id.replace(".", "-") for node in network.graph.nodes}
    cut = Cut(network, Memory(network), placement)
    names = {channel.index: str(channel.port) for channel in cut.plan.channels}
    targets = {channel.index: [edge.dst.node for edge in channel.edges] for channel in cut.plan.channels}
    flows = {(names[c.index], *targets[c.index]): cut.stages[c.dst].needs_gradient(c.index) for c in cut.plan.channels}
    assert flows["stem.y", "unused"] is False
    assert flows["unused.y", "dead"] is False
    assert flows["part.0", "wa"] is True
    assert all(flow for key, flow in flows.items() if "unused" not in (key[0][:6], key[1]))
    cut.step(0)
    assert all(stage.stash_count == 0 for stage in cut.stages)


def test_an_error_names_the_vnode_that_failed_not_the_first_of_its_stage(tmp_path: Path) -> None:
    """Calls are fused into chains; each link keeps its name."""
    network = read(MLP, tmp_path)
    reference = Reference(network, Memory(network))
    inputs = dict(Memory(network).batch("train", 0, 0))
    (wrong,) = (name for name in inputs if inputs[name].dtype == torch.int64)
    with pytest.raises(IndexError, match="out of bounds") as caught:
        reference.executor.infer({}, {**inputs, wrong: torch.full_like(inputs[wrong], 999)}, {"loss"})
    assert caught.value.vnode == "loss"  # type: ignore[attr-defined]
    for node in ("fc1", "fc2", "head"):

        def broken(*_: object, node: str = node) -> None:
            raise ZeroDivisionError(node)

        program = Reference(network, Memory(network)).executor.program
        for op in program.fused:
            op.chain = tuple(broken if link == node else call for link, call in zip(op.links, op.chain, strict=True))
        slots: list = [torch.zeros(7, 12)] * program.size
        with pytest.raises(ZeroDivisionError) as planted:
            program.run(slots, program.fused)
        assert planted.value.vnode == node  # type: ignore[attr-defined]


def test_what_is_live_is_known_from_the_graph(tmp_path: Path) -> None:
    network = read(MLP.replace("id: fc2, type: linear,", "id: fc2, type: linear, frozen: true,"), tmp_path)
    live = find_live(network.graph)
    assert live.trainable == {"fc1", "head"}
    everything = MLP
    for node in ("fc1", "fc2"):
        everything = everything.replace(f"id: {node}, type: linear,", f"id: {node}, type: linear, frozen: true,")
    network = read(everything, tmp_path)
    edges = {str(edge): edge.index in find_live(network.graph).live for edge in network.graph.edges}
    assert edges["head.y -> loss.logits"]
    assert sum(edges.values()) == 1


@pytest.mark.parametrize("name", ["gpt", "cnn", "moe"])
def test_recomputation_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Field case B57: dropout masks are drawn again alike, statistics are updated once."""
    sets = ["train.microbatches=2", *(["vars.drop=0.1"] if name == "gpt" else [])]
    network = read(FILES[name], tmp_path, *sets)
    again = read(FILES[name], tmp_path, *sets, "train.recompute=true")
    plain, saving = Reference(network, Memory(network)), Reference(again, Memory(again))
    for step in range(4):
        assert plain.step(step).loss == saving.step(step).loss
    assert difference(plain.state(), saving.state()) == []
    cut = Cut(again, Memory(again), random_placement(again, 3, 2))
    for step in range(4):
        cut.step(step)
    assert difference(plain.state(), cut.state()) == []


def test_recomputation_keeps_no_graph(tmp_path: Path) -> None:
    network = read(GPT, tmp_path, "train.recompute=true")
    reference = Reference(network, Memory(network))
    done = reference.executor.forward(0, 0, {})
    assert done.loss is not None
    assert not done.loss.requires_grad
    (stash,) = reference.executor._stash.values()
    assert stash.slots is None


def test_dropout_follows_step_microbatch_and_seed_alone(tmp_path: Path) -> None:
    network = read(GPT, tmp_path, "vars.drop=0.1")
    batch = Memory(network).batch("train", 0, 0)
    source = Memory(network, given={(step, 0): batch for step in range(3)})

    def loss(seed: int, step: int) -> float:
        vnodes = VNodes(network, [node.id for node in network.graph.nodes], device=CPU, seed=1)
        vnodes.context.seed = seed
        plan = cut_stages(network.graph, dict.fromkeys(vnodes.modules, "here"))
        made = StageExecutor(vnodes, plan, 0, data=source, recipe=network.recipe).forward(step, 0, {})  # type: ignore[arg-type]
        assert made.loss is not None
        return float(made.loss)

    assert loss(1, 0) == loss(1, 0)
    assert len({loss(1, 0), loss(1, 1), loss(2, 0)}) == 3


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_bf16_keeps_float32_master_weights(name: str, tmp_path: Path) -> None:
    network = read(FILES[name], tmp_path, "train.precision=bf16", "train.optimizer.lr=1e-3")
    exact = read(FILES[name], tmp_path, "train.optimizer.lr=1e-3")
    half, full = Reference(network, Memory(network)), Reference(exact, Memory(exact))
    for step in range(6):
        a, b = half.step(step), full.step(step)
        assert a.loss == pytest.approx(b.loss, rel=0.02)
        assert a.loss != b.loss
    for state in half.state().values():
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    cut = Cut(network, Memory(network), random_placement(network, 3, 1))
    again = Reference(network, Memory(network))
    for step in range(3):
        assert cut.step(step)[0] == again.step(step).loss
    if name == "mlp":
        sent = cut.stages[0].forward(9, 0, {}).sends
        assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}


def test_misuse_is_named(tmp_path: Path) -> None:
    network = read(MLP, tmp_path, "train.microbatches=2")
    placement = {node.id: "p0" if node.order < 3 else "p1" for node in network.graph.nodes}
    cut = Cut(network, Memory(network), placement)
    first, second = cut.stages
    with pytest.raises(MisuseError, match="nothing came on channel 0"):
        second.forward(0, 0, {})
    with pytest.raises(MisuseError, match="without its F"):
        first.backward(0, 0, {})
    first.forward(0, 0, {})
    with pytest.raises(MisuseError, match="ran already"):
        first.forward(0, 0, {})
    with pytest.raises(MisuseError, match="expected 1 gradients on channel 0, got 0"):
        first.backward(0, 0, {0: []})
    first.forward(0, 1, {})
    assert first.stash_count == 1
    first.drop_stash()
    assert first.stash_count == 0
    bare = StageExecutor(cut.vnodes["p0"], cut.plan, 0, data=None, recipe=network.recipe)
    with pytest.raises(MisuseError, match="no data"):
        bare.forward(0, 0, {})


def test_sent_tensors_never_change(tmp_path: Path) -> None:
    """Field case B09: whatever follows a send (backward, update, later microbatches), the sent bytes stay."""
    for name in FILES:
        network = read(FILES[name], tmp_path, "train.microbatches=2")
        cut = Cut(network, Memory(network), random_placement(network, 3, 4))
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for stage in cut.stages:
            forward, backward = stage.forward, stage.backward

            def watched_forward(*args, call=forward, kept=kept):  # type: ignore[no-untyped-def]
                done = call(*args)
                kept.extend((tensor, tensor.clone()) for tensor in done.sends.values())
                return done

            def watched_backward(*args, call=backward, kept=kept):  # type: ignore[no-untyped-def]
                done = call(*args)
                kept.extend((tensor, tensor.clone()) for tensors in done.values() for tensor in tensors)
                return done

            stage.forward, stage.backward = watched_forward, watched_backward  # type: ignore[method-assign]
        for step in range(3):
            cut.step(step)
        assert kept
        assert all(torch.equal(sent, copy) for sent, copy in kept)
        owned = {p.untyped_storage().data_ptr() for v in cut.vnodes.values() for _, _, _, p in v.parameters}
        assert all(sent.untyped_storage().data_ptr() not in owned for sent, _ in kept)


def test_time_per_vnode_is_measured_now_and_then_without_changing_a_bit(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    reference = Reference(network, Memory(network))
    reference.step(0)
    assert reference.executor.times() == {}
    reference.step(1)
    times = reference.executor.times()
    assert times.keys() == {node.id for node in network.graph.nodes}
    assert all(forward > 0 for forward, _ in times.values())
    assert times[NodeId("fc1")][1] > 0
    other = train(network, Memory(network), steps=1, seed=0)
    placement = {node.id: "p0" if node.order < 3 else "p1" for node in network.graph.nodes}
    cut = Cut(network, Memory(network), placement)
    cut.step(0)
    cut.step(1)
    other.step(1)
    assert difference(other.state(), cut.state()) == []
    assert MEASURE_EVERY > 1


# ------------------------------------------------------------ inference


def test_inference_runs_what_is_needed_and_says_what_is_missing(tmp_path: Path) -> None:
    network = read(CNN, tmp_path)
    reference = Reference(network, Memory(network))
    reference.step(0)
    batch = Memory(network).batch("train", 0, 0)
    made, count = reference.infer({"x": batch["x"]}, {"logits"})
    assert (list(made), count) == (["logits"], None)
    assert not made["logits"].requires_grad
    both, count = reference.infer(batch, {"logits", "loss"})
    assert count == 8
    assert torch.equal(both["logits"], made["logits"])
    with pytest.raises(MisuseError, match="'targets'"):
        reference.infer({"x": batch["x"]}, {"loss"})
    with pytest.raises(MisuseError, match="no output"):
        reference.infer(batch, {"nothing"})
    again, _ = reference.infer(batch, {"logits"})
    assert torch.equal(again["logits"], made["logits"]), "evaluation changes no statistics"
    undisturbed = Reference(network, Memory(network))
    undisturbed.step(0)
    assert reference.step(1).loss == undisturbed.step(1).loss


def test_inference_through_stages_equals_one_process(tmp_path: Path) -> None:
    network = read(MOE, tmp_path)
    cut = Cut(network, Memory(network), random_placement(network, 4, 0))
    batch = Memory(network).batch("train", 0, 0)
    want, _ = Reference(network, Memory(network)).infer(batch, {"logits"})
    wires: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for index, stage in enumerate(cut.stages):
        needed = {channel.index for channel in cut.plan.ins(index)} & stage.infer_channels({"logits"})
        assert needed <= wires.keys()
        inputs = {name: batch[name] for name in stage.infer_inputs({"logits"})}
        sends, made, count = stage.infer({channel: wires[channel] for channel in needed}, inputs, {"logits"})
        assert sends.keys() <= stage.infer_channels({"logits"})
        assert count is None
        wires.update(sends)
        found.update(made)
    assert torch.equal(found["logits"], want["logits"])
    assert {"unused", "dead"}.isdisjoint(op.node for stage in cut.stages for op in stage._request({"logits"}).ops)


# ------------------------------------------------------------ devices


def test_a_second_device_computes_the_same(tmp_path: Path) -> None:
    network = read(GPT, tmp_path, "vars.drop=0.1")
    reference = Reference(network, Memory(network))
    cut = Cut(network, Memory(network), random_placement(network, 2, 1), device=torch.device("cpu", 1))
    for step in range(2):
        assert cut.step(step)[0] == reference.step(step).loss


class OneDevice(TorchDispatchMode):
    """Refuses every operation that mixes tensors of two devices; only explicit copies may."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        copies = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if len(devices) > 1 and func not in copies:
            raise AssertionError(f"{func} mixes {devices}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FILES)
def test_every_tensor_is_on_the_given_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's meta device stands in for a second one: it has shapes and refuses to hand out values."""
    sets = ["vars.drop=0.1", "vars.rotary=true"] if name == "gpt" else []
    network = read(FILES[name], tmp_path, *sets, "train.optimizer={type: adamw, lr: 1e-3}")
    device = torch.device("meta")
    monkeypatch.setattr(StageExecutor, "_count", lambda *args: 1)
    monkeypatch.setattr(StageExecutor, "_watch", lambda *args: None)
    nodes = [node.id for node in network.graph.nodes]
    plan = cut_stages(network.graph, dict.fromkeys(nodes, "here"))
    with OneDevice():
        vnodes = VNodes(network, nodes, device=device, seed=0)
        stage = StageExecutor(vnodes, plan, 0, data=Memory(network), recipe=network.recipe)
        done = stage.forward(0, 0, {})
        assert done.loss is not None
        assert done.loss.device == device
        stage.backward(0, 0, {})
        vnodes._sum_ties()
        vnodes.update(0, 1.0)
    for _, _, _, parameter in vnodes.parameters:
        assert parameter.device == device
    with pytest.raises(AssertionError, match="mixes"), OneDevice():
        torch.ones(3) + torch.ones(3, device=device)


# ------------------------------------------------------------ values that are not finite


@pytest.mark.parametrize("pnodes", [1, 3])
def test_the_vnode_where_a_value_stops_being_finite_is_named(pnodes: int, tmp_path: Path) -> None:
    network = read(MOE, tmp_path)
    placement = random_placement(network, pnodes, 1)
    cut = Cut(network, Memory(network), placement)
    with torch.no_grad():
        cut.vnodes[placement[NodeId("b3")]].modules[NodeId("b3")].weight.fill_(1e38)  # type: ignore[operator, union-attr]
        cut.vnodes[placement[NodeId("b1")]].modules[NodeId("b1")].bias.fill_(10.0)  # type: ignore[operator, union-attr]
    cut.forward(0, 0)
    cut.backward(0, 0)
    reports = cut.report()
    assert not all(report.finite for report in reports)
    assert {report.culprit for report in reports if report.culprit} == {"b3"}


def test_a_gradient_that_overflows_is_found_too(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    reference = Reference(network, Memory(network))
    with torch.no_grad():
        for node, factor in (("fc1", 1e-30), ("fc2", 1e30), ("head", 1e12)):
            reference.vnodes.modules[NodeId(node)].weight.mul_(factor)  # type: ignore[operator, union-attr]
            reference.vnodes.modules[NodeId(node)].bias.zero_()  # type: ignore[operator, union-attr]
    with pytest.raises(NotFinite) as caught:
        reference.step(0)
    assert caught.value.loss < float("inf")
    assert caught.value.vnode == "fc1"


def test_training_ends_at_the_first_step_that_is_not_finite(tmp_path: Path) -> None:
    network = read(MLP.replace("tanh", "relu"), tmp_path, "train.optimizer={type: sgd, lr: 1e9}")
    steps: list[int] = []
    before: list[dict[NodeId, dict[str, torch.Tensor]]] = []
    reference = Reference(network, Memory(network))

    def run() -> None:
        for step in range(20):
            before.append(reference.state())
            steps.append(reference.step(step).step)

    with pytest.raises(NotFinite) as caught:
        run()
    assert caught.value.step == len(steps) + 1 > 1
    assert caught.value.vnode
    assert f"step {caught.value.step} was not applied" in str(caught.value)
    assert difference(reference.state(), before[-1]) == [], "the step was not applied"


def test_a_step_without_targets_is_refused(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    with pytest.raises(MisuseError, match="no target"):
        Reference(network, Memory(network, ignored=2.0)).step(0)


def test_a_network_without_a_loss_can_only_infer(tmp_path: Path) -> None:
    network = read(MLP, tmp_path)
    graph = dataclasses.replace(network.graph, loss=None)
    lossless = dataclasses.replace(network, graph=graph)
    reference = Reference(lossless, Memory(network))
    with pytest.raises(MisuseError, match="no loss"):
        reference.step(0)
    made, _ = reference.infer(Memory(network).batch("train", 0, 0), {"logits"})
    assert made["logits"].shape == (7, 5)
