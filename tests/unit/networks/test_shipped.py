"""The networks that come with DCNR: that they are what they claim, and that `--set` reaches everything."""

from __future__ import annotations

import math

import pytest

from networks.graph import NodeId, TensorSpec
from networks.load import NetworkFileError, load, read_recipe, shipped
from networks.recipe import AdamW, Cosine
from networks.summary import summarize

VOCAB = {"vocab": 65}


def test_gpt_char_is_the_nano_gpt_of_the_cpu_recipe() -> None:
    network = load("gpt-char", vars=VOCAB)
    v, ctx, d, layers = 65, 64, 128, 4
    block = d + 3 * d * d + d * d + d + 4 * d * d + 4 * d * d
    assert network.parameters == v * d + ctx * d + layers * block + d == 804_096
    assert network.graph.ties() == {"tok": ["head"]}
    names = {name for cost in network.graph.costs.values() for name in cost.parameters}
    assert not any("bias" in name for name in names)
    recipe = network.recipe
    assert (recipe.batch, recipe.steps, recipe.microbatches) == (12, 2000, 4)
    assert recipe.optimizer == AdamW(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, clip=1.0)
    assert recipe.schedule == Cosine(type="cosine", warmup=100, min_lr=1e-4)
    assert recipe.data is not None
    assert (recipe.data.text, recipe.data.tokenizer, recipe.data.split, recipe.data.sampler, recipe.data.context) == (
        "python-stdlib", "char", 0.9, "random", 64,
    )  # fmt: skip


def test_gpt_char_starts_as_nano_gpt_does() -> None:
    graph = load("gpt-char", vars=VOCAB).graph
    residual = 0.02 / math.sqrt(2 * 4)
    for node in graph.nodes:
        if node.type in ("embedding", "position", "attention") or node.id.endswith(".up"):
            assert node.params.init.std == 0.02  # type: ignore[attr-defined]
        if node.type == "attention":
            assert node.params.out_init.std == pytest.approx(residual, rel=1e-12)  # type: ignore[attr-defined]
        if node.id.endswith(".down"):
            assert node.params.init.std == pytest.approx(residual, rel=1e-12)  # type: ignore[attr-defined]


def test_dropout_is_one_override_away() -> None:
    def rates(rate: str | None) -> set[float]:
        sets = [] if rate is None else [f"vars.dropout={rate}"]
        nodes = load("gpt-char", vars=VOCAB, sets=sets).graph.nodes
        return {node.params.p for node in nodes if node.type == "dropout"} | {  # type: ignore[attr-defined]
            node.params.dropout  # type: ignore[attr-defined]
            for node in nodes
            if node.type == "attention"
        }

    assert rates(None) == {0.0}
    assert rates("0.1") == {0.1}


def test_a_gpt_of_other_sizes() -> None:
    network = load("gpt-char", vars={"vocab": 100}, sets=["vars.d=32", "vars.layers=2", "vars.heads=2", "vars.ctx=16"])
    assert [node.id for node in network.graph.nodes if node.type == "attention"] == ["h.0.attn", "h.1.attn"]
    assert network.graph.inputs["tokens"] == TensorSpec("int64", ("batch", 16))


def test_moe_has_a_split_a_three_way_fan_out_and_a_merge() -> None:
    graph = load("moe-digits").graph
    readers = {str(port): [edge.dst.node for edge in found] for port, found in graph.out_edges().items()}
    assert {"expert1.up", "expert2.up", "expert3.up"} <= set(readers["act.y"])
    assert {"share.0", "share.1", "share.2"} <= set(readers)
    assert len(graph.in_edges()[NodeId("merge")]) == 4


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_each_is_trainable(path: object) -> None:
    assert read_recipe(str(path)).data is not None
    network = load(str(path), vars=VOCAB)
    assert network.graph.loss == "loss"
    assert "logits" in network.graph.outputs
    assert set(network.graph.inputs) - {"targets"} in ({"tokens"}, {"pixels"})
    with open(str(path), encoding="utf-8") as file:
        assert file.readline().startswith("# ")


def test_summary_adds_up() -> None:
    network = load("gpt-char", vars=VOCAB)
    summary = summarize(network.graph)
    assert summary.totals.parameters == network.parameters == 804_096
    assert summary.totals.parameter_bytes == 4 * 804_096
    assert [row.id for row in summary.nodes] == [node.id for node in network.graph.nodes]
    head = next(row for row in summary.nodes if row.id == "head")
    assert (head.parameters, head.tie, head.forward_flops) == (0, "tok", 2 * 64 * 128 * 65)
    up = next(row for row in summary.nodes if row.id == "h.0.up")
    assert (up.forward_flops, up.parameters) == (2 * 64 * 128 * 512, 128 * 512)
    edge = next(row for row in summary.edges if row.target == "h.0.act")
    assert (edge.source, edge.size_bytes) == ("h.0.up", 64 * 512 * 4)
    tokens = next(row for row in summary.edges if row.source == "tokens")
    assert (tokens.target, tokens.tensor, tokens.size_bytes) == ("tok", "int64(batch, 64)", 64 * 8)
    assert any(row.target == "loss.logits" for row in summary.edges)
    assert summary.totals.edge_bytes == sum(row.size_bytes for row in summary.edges)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.optimizer.lr=2e-3", lambda n: n.recipe.optimizer.lr == 2e-3),
        ("train.optimizer.betas=[0.8, 0.9]", lambda n: n.recipe.optimizer.betas == (0.8, 0.9)),
        ("train.optimizer={type: sgd, lr: 0.1}", lambda n: n.recipe.optimizer.type == "sgd"),
        ("train.checkpoint.every=5", lambda n: n.recipe.checkpoint.every == 5),
        ("train.data.text=/a path/with: odd, things", lambda n: n.recipe.data.text == "/a path/with: odd, things"),
        ("train.data.text='2024'", lambda n: n.recipe.data.text == "2024"),
        ("train.steps=$(10*layers)", lambda n: n.recipe.steps == 40),
        ("vars.layers=2", lambda n: len(n.graph.nodes) == 27),
        ("nodes.head.frozen=true", lambda n: n.graph.node("head").params.frozen),
        ("nodes.ln_f.bias=true", lambda n: n.parameters == 804_096 + 128),
        ("blocks.transformer.ln1.bias=true", lambda n: n.parameters == 804_096 + 4 * 128),
        ("blocks.transformer.attn.init.std=0.5", lambda n: n.graph.node("h.0.attn").params.init.std == 0.5),
        ("blocks.transformer.act.type=silu", lambda n: n.graph.node("h.1.act").type == "silu"),
        ("name=mine", lambda n: n.id == "mine"),
        ("place.h.0=p1", lambda n: len(n.graph.pins) == 10),
    ],
)
def test_overrides(override: str, read: object) -> None:
    assert callable(read)
    assert read(load("gpt-char", vars=VOCAB, sets=[override]))


def test_an_override_of_a_shared_value_changes_only_one_node() -> None:
    graph = load("gpt-char", vars=VOCAB, sets=["blocks.transformer.attn.init.std=0.5"]).graph
    assert graph.node("tok").params.init.std == 0.02  # type: ignore[attr-defined]


def test_the_last_override_counts() -> None:
    assert load("mlp-digits", sets=["train.seed=1", "train.seed=2"]).recipe.seed == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.optimizr.lr=1", "'train.optimizr' is not known here"),
        ("train.optimizer.lrr=1", "'train.optimizer.lrr' is not known here"),
        ("train.optimizer.lr=fast", "--set:1:20: 'train.optimizer.lr' must be a number, got text 'fast'"),
        ("train.optimizer.lr.x=1", "'lr' holds no keys"),
        ("train.batch", "'train.batch' is no override"),
        ("=5", "'=5' is no override"),
        ("trian.batch=5", "'trian' can't be set"),
        ("edges=[]", "'edges' can't be set"),
        ("nodes.hed.bias=true", "no node is called 'hed'"),
        ("nodes.head=5", "names no key of a node"),
        ("nodes.head.id=x", "a node's id can't be set"),
        ("nodes.h.0.attn.bias=true", "'0' is not known in a node of type 'block'"),
        ("blocks.transformr.attn.bias=true", "no block is called 'transformr'"),
        ("blocks.transformer.attnn.bias=true", "no node is called 'attnn'"),
        ("nodes.head.bias=yes", "'head.bias' must be true or false, got text 'yes'"),
        ("train.optimizer.betas=[0.9", "not valid YAML"),
        ("train.optimizer={a: 1, a: 2}", "key 'a' appears twice"),
        ("vars.layers=0", "'h.repeat' must be at least 1, got 0 from '$layers'"),
        ("vars.ctx=x", "extents are whole numbers"),
        ("vars.d=130", "dim 130 must divide by heads 4"),
        ("train.data.text=\x1b[31m", None),
    ],
)
def test_bad_overrides(override: str, expected: str | None) -> None:
    if expected is None:
        assert load("gpt-char", vars=VOCAB, sets=[override]).recipe.data is not None
        return
    with pytest.raises(NetworkFileError) as caught:
        load("gpt-char", vars=VOCAB, sets=[override])
    assert expected in str(caught.value)
