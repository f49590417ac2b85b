"""Blocks written out, chains, ports, ties, pins, order: against graphs written by hand."""

from __future__ import annotations

import contextlib
import time
from random import Random

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks.assemble import topological
from networks.diagnostics import Diagnostics, Spot
from networks.expand import Flat, FlatEdge, FlatNode
from networks.graph import PortRef
from networks.load import Network, NetworkFileError, load
from networks.yaml_source import SourceText
from tests.unit.networks.files import Files

HEAD = "version: 1\nname: g\ninputs: {x: {dtype: float32, shape: [batch, 8]}}\n"


def edges(network: Network) -> list[str]:
    return [str(edge) for edge in network.graph.edges]


def ids(network: Network) -> list[str]:
    return [str(node.id) for node in network.graph.nodes]


def test_repeat_chains_copies(files: Files) -> None:
    network = files.load(
        HEAD
        + """
blocks:
  b:
    inputs: [v]
    nodes: [{id: f, type: relu}, {id: add, type: add}]
    edges: [v -> f -> add, v -> add]
    output: add
nodes:
  - {id: pre, type: relu}
  - {id: h, type: block, block: b, repeat: 2}
  - {id: post, type: relu}
edges: [x -> pre -> h -> post]
outputs: {y: post, all: h, first: h.0.add, one: h.1.f}
"""
    )
    assert ids(network) == ["pre", "h.0.f", "h.0.add", "h.1.f", "h.1.add", "post"]
    assert edges(network) == [
        "pre.y -> h.0.f.x", "h.0.f.y -> h.0.add.0", "pre.y -> h.0.add.1",
        "h.0.add.y -> h.1.f.x", "h.1.f.y -> h.1.add.0", "h.0.add.y -> h.1.add.1",
        "x -> pre.x", "h.1.add.y -> post.x",
    ]  # fmt: skip
    assert network.graph.outputs == {
        "y": PortRef("post", "y"), "all": PortRef("h.1.add", "y"), "first": PortRef("h.0.add", "y"),
        "one": PortRef("h.1.f", "y"),
    }  # type: ignore[arg-type]  # fmt: skip
    assert [edge.index for edge in network.graph.edges] == list(range(8))


def test_nested_blocks_with_several_ports(files: Files) -> None:
    network = files.load(
        HEAD
        + """
blocks:
  inner: {inputs: [a, b], nodes: [{id: m, type: mul}], edges: [a -> m, b -> m], output: m}
  outer:
    inputs: [left, right]
    nodes: [{id: i, type: block, block: inner}, {id: s, type: split, parts: 2}]
    edges: [right -> i.a, left -> i.b, i -> s]
    outputs: {lo: s.0, hi: s.1}
nodes:
  - {id: r, type: relu}
  - {id: o, type: block, block: outer}
  - {id: c, type: concat}
edges: [x -> r, x -> o.left, r -> o.right, o.hi -> c, o.lo -> c]
outputs: {y: c, hi: o.hi}
"""
    )
    assert ids(network) == ["r", "o.i.m", "o.s", "c"]
    assert edges(network) == [
        "r.y -> o.i.m.0", "x -> o.i.m.1", "o.i.m.y -> o.s.x", "x -> r.x", "o.s.1 -> c.0", "o.s.0 -> c.1",
    ]  # fmt: skip
    assert str(network.graph.outputs["hi"]) == "o.s.1"


def test_bare_names_take_free_ports_in_order_and_numbers_order_edges(files: Files) -> None:
    body = "nodes: [{id: a, type: relu}, {id: b, type: tanh}, {id: c, type: concat}]\noutputs: {y: c}\nedges: "
    plain = files.load(HEAD + body + "[x -> a -> c, x -> b -> c]\n")
    assert [str(edge) for edge in plain.graph.in_edges()["c"]] == ["a.y -> c.0", "b.y -> c.1"]  # type: ignore[index]
    turned = files.load(HEAD + body + "[x -> a -> c.1, x -> b -> c]\n")
    assert [str(edge) for edge in turned.graph.in_edges()["c"]] == ["b.y -> c.0", "a.y -> c.1"]  # type: ignore[index]
    assert "'c' gets nothing at '0'" in files.errors(HEAD + body + "[x -> a -> c.1, x -> b -> c.2]\n")[0]
    assert "'c.0' already gets 'a'" in files.errors(HEAD + body + "[x -> a -> c.0, x -> b -> c.0]\n")[0].replace(
        "'c'", "'c.0'"
    )


def test_a_port_in_the_middle_of_a_chain_is_an_input_else_an_output(files: Files) -> None:
    network = files.load(
        HEAD + "nodes: [{id: s, type: split, parts: 2}, {id: r, type: relu}]\nedges: [x -> s.1 -> r]\noutputs: {y: r}\n"
    )
    assert edges(network) == ["x -> s.x", "s.1 -> r.x"]
    network = files.load(
        HEAD + "nodes: [{id: a, type: add}, {id: r, type: relu}]\nedges: [x -> a.0 -> r]\noutputs: {y: r}\n"
    )
    assert edges(network) == ["x -> a.0", "a.y -> r.x"]


def test_several_outputs_need_a_name(files: Files) -> None:
    body = "nodes: [{id: s, type: split, parts: 2}, {id: r, type: relu}]\noutputs: {y: r}\nedges: [x -> s -> r]\n"
    assert files.errors(HEAD + body) == ["6:14: 's' has several outputs | say which: s.0, s.1"]
    found = files.errors(HEAD + body.replace("s -> r", "s.7 -> r").replace("x -> s.7", "x -> s, s.7"))
    assert found == ["6:17: 's' has no output port '7' | it has 0, 1"]


def test_topological_order_breaks_ties_by_place(files: Files) -> None:
    network = files.load(
        HEAD + "nodes: [{id: d, type: add}, {id: c, type: relu}, {id: b, type: relu}, {id: a, type: relu}]\n"
        "edges: [x -> a -> d, x -> b -> d, x -> c -> d]\noutputs: {y: d}\n"
    )
    assert ids(network) == ["c", "b", "a", "d"]


@settings(deadline=None)
@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_topological_order_is_always_the_first_that_is_ready(count: int, random: Random) -> None:
    hidden = random.sample(range(count), count)
    links = [(hidden[a], hidden[b]) for a in range(count) for b in range(a + 1, count) if random.random() < 0.4]
    here = Spot(SourceText("f", ""), 1, 1)
    flat = Flat([FlatNode(f"n{i}", "relu", None, here) for i in range(count)])
    flat.edges = [FlatEdge((f"n{a}", "y"), (f"n{b}", "x"), here) for a, b in links]
    expected: list[int] = []
    while len(expected) < count:
        ready = [i for i in range(count) if i not in expected and all(a in expected for a, b in links if b == i)]
        expected.append(min(ready))
    assert topological(flat, Diagnostics()) == [f"n{i}" for i in expected]


BLOCK_FAULTS = [
    ("{inputs: [v], nodes: [{id: f, type: block, block: b}], edges: [v -> f], output: f}", "contains itself: b -> b"),
    ("{inputs: [v], nodes: [{id: f, type: relu}], edges: [v -> f]}", "needs either 'output' or 'outputs'"),
    ("{inputs: [v], nodes: [{id: f, type: relu}], edges: [v -> f], output: g}", "no node or input in block 'b'"),
    ("{inputs: [v], nodes: [{id: f, type: relu}], edges: [v -> f], output: v}", "output 'v' is an input"),
    ("{inputs: [v, w], nodes: [{id: f, type: relu}], edges: [v -> f], output: f}", "input 'w' of block 'b' is never"),
    ("{inputs: [v, v], nodes: [{id: f, type: relu}], edges: [v -> f], output: f}", "input 'v' appears twice"),
    ("{inputs: [v], nodes: [{id: f, type: rellu}], edges: [v -> f], output: f}", "unknown node type 'rellu'"),
    ("{inputs: [v], nodes: [{id: f, type: relu}], edges: [v -> f], output: f, name: q}", "'name' is not known in a"),
    ("{inputs: [v], edges: [v -> f], output: f}", "'nodes' is missing in block 'b'"),
    ("5", "block 'b' must be a mapping"),
    ("{inputs: [v], nodes: [{id: f, type: relu}], edges: [x -> f, v -> f], output: f}", "is called 'x'"),
]


@pytest.mark.parametrize(("block", "expected"), BLOCK_FAULTS)
def test_faults_in_blocks(files: Files, block: str, expected: str) -> None:
    text = (
        HEAD + f"blocks:\n  b: {block}\nnodes: [{{id: h, type: block, block: b}}]\nedges: [x -> h]\noutputs: {{y: h}}\n"
    )
    found = files.errors(text)
    assert any(expected in one for one in found), found


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("repeat: 0", "'h.repeat' must be at least 1"),
        ("repeat: 20000", "'h.repeat' must be at most 10000"),
        ("repeat: two", "'h.repeat' must be a whole number"),
        ("repeat: 2, dim: 3", "'dim' is not known in a node of type 'block'"),
    ],
)
def test_faults_in_nodes_of_type_block(files: Files, node: str, expected: str) -> None:
    text = HEAD + (
        "blocks:\n  b: {inputs: [v], nodes: [{id: f, type: relu}], edges: [v -> f], output: f}\n"
        f"nodes: [{{id: h, type: block, block: b, {node}}}]\nedges: [x -> h]\noutputs: {{y: h}}\n"
    )
    found = files.errors(text)
    assert any(expected in one for one in found), found


def test_only_one_input_and_output_repeat(files: Files) -> None:
    text = HEAD + (
        "blocks:\n  b: {inputs: [v, w], nodes: [{id: f, type: add}], edges: [v -> f, w -> f], output: f}\n"
        "nodes: [{id: h, type: block, block: b, repeat: 2}]\nedges: [x -> h.v, x -> h.w]\noutputs: {y: h}\n"
    )
    assert any("only a block with one input and one output can repeat" in one for one in files.errors(text))


def test_nested_repeats_cannot_explode(files: Files) -> None:
    blocks = "  b0: {inputs: [v], nodes: [{id: f, type: relu}], edges: [v -> f], output: f}\n"
    for level in range(1, 6):
        blocks += (
            f"  b{level}: {{inputs: [v], nodes: [{{id: h, type: block, block: b{level - 1}, repeat: 10000}}], "
            "edges: [v -> h], output: h}\n"
        )
    text = HEAD + f"blocks:\n{blocks}nodes: [{{id: h, type: block, block: b5}}]\nedges: [x -> h]\noutputs: {{y: h}}\n"
    assert "more than 100,000 nodes" in files.errors(text)[0]


def test_blocks_that_contain_each_other(files: Files) -> None:
    text = HEAD + (
        "blocks:\n"
        "  a: {inputs: [v], nodes: [{id: f, type: block, block: b}], edges: [v -> f], output: f}\n"
        "  b: {inputs: [v], nodes: [{id: f, type: block, block: a}], edges: [v -> f], output: f}\n"
        "nodes: [{id: h, type: block, block: a}]\nedges: [x -> h]\noutputs: {y: h}\n"
    )
    assert "block 'a' contains itself: a -> b -> a" in files.errors(text)[0]


TIED = """version: 1
name: tied
inputs: {t: {dtype: int64, shape: [batch, 4]}}
nodes:
  - {id: tok, type: embedding, num: 10, dim: 8}
  - {id: head, type: linear, in: 8, out: 10, bias: false, tie: tok}
edges: [t -> tok -> head]
outputs: {y: head}
"""


def test_a_tied_weight_counts_once_at_its_first_use(files: Files) -> None:
    network = files.load(TIED)
    assert network.parameters == 80
    assert network.graph.ties() == {"tok": ["head"]}
    assert network.graph.costs["head"].parameters == {}  # type: ignore[index]
    turned = files.load(TIED.replace(", tie: tok", "").replace("dim: 8}", "dim: 8, tie: head}"))
    assert turned.graph.ties() == {"tok": ["head"]}
    assert turned.digest == network.digest


def test_a_tied_linear_keeps_its_own_bias(files: Files) -> None:
    network = files.load(TIED.replace("bias: false, ", ""))
    assert list(network.graph.costs["head"].parameters) == ["bias"]  # type: ignore[index]
    assert network.parameters == 90


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tie: tok", "tie: tak", "no node is called 'tak' | did you mean 'tok'?"),
        ("tie: tok", "tie: head", "'head' is tied to itself"),
        ("dim: 8}", "dim: 8}\n  - {id: r, type: relu, tie: tok}", "is of type relu, which has no weight to share"),
        (
            "out: 10",
            "out: 11",
            "'head' has a weight float32(11, 8), but 'tok', to which it is tied, has float32(10, 8)",
        ),
    ],
)
def test_ties_that_make_no_sense(files: Files, old: str, new: str, expected: str) -> None:
    text = TIED.replace(old, new).replace("tok -> head", "tok -> r -> head" if "relu" in new else "tok -> head")
    found = files.errors(text)
    assert any(expected in one for one in found), found


def test_ties_inside_blocks_and_across_copies(files: Files) -> None:
    network = files.load(
        HEAD
        + """
blocks:
  b:
    inputs: [v]
    nodes:
      - {id: f, type: linear, in: 8, out: 8}
      - {id: g, type: linear, in: 8, out: 8, tie: f}
      - {id: o, type: linear, in: 8, out: 8, tie: top}
    edges: [v -> f -> g -> o]
    output: o
nodes: [{id: top, type: linear, in: 8, out: 8}, {id: h, type: block, block: b, repeat: 2}]
edges: [x -> top -> h]
outputs: {y: h}
"""
    )
    assert network.graph.ties() == {"h.0.f": ["h.0.g"], "h.1.f": ["h.1.g"], "top": ["h.0.o", "h.1.o"]}


def test_pins_name_nodes_or_whole_blocks() -> None:
    network = load(
        "gpt-char", vars={"vocab": 65}, sets=["place.h=p1", "place.h.3=p2", "place.h.3.act=p3", "place.head=gpu-box"]
    )
    pins = network.graph.pins
    assert pins["head"] == "gpu-box"  # type: ignore[index]
    assert pins["h.0.act"] == "p1"  # type: ignore[index]
    assert pins["h.3.ln1"] == "p2"  # type: ignore[index]
    assert pins["h.3.act"] == "p3"  # type: ignore[index]
    assert "tok" not in pins
    assert Network.from_bytes(network.to_bytes()).graph.pins == pins


def test_unused_branches_are_allowed(files: Files) -> None:
    network = files.load(
        HEAD + "nodes: [{id: s, type: split, parts: 2}, {id: dead, type: relu}, {id: r, type: relu}]\n"
        "edges: [x -> s, s.0 -> r, r -> dead]\noutputs: {y: r}\n"
    )
    assert ids(network) == ["s", "r", "dead"]


def test_a_network_without_edges_to_a_variadic_node(files: Files) -> None:
    text = HEAD + "nodes: [{id: a, type: add}, {id: r, type: relu}]\nedges: [x -> r]\noutputs: {y: r}\n"
    assert files.errors(text) == ["4:14: 'a' gets no input | add an edge such as '… -> a'"]


def test_numbers_beyond_all_measure_are_an_error_not_a_crash(files: Files) -> None:
    text = HEAD.replace("8]", "8]") + (
        "nodes: [{id: f, type: linear, in: 8, out: 4611686018427387904}, {id: g, type: relu}]\n"
        "edges: [x -> f -> g]\noutputs: {y: g}\n"
    )
    assert "'f'" in files.errors(text)[0]


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        ("type: attention, dim: 8, heads: 2, rotary: true, causal: true", "[batch, 1000000, 8]"),
        ("type: attention, dim: 8, heads: 2, rotary: true, head_dim: 100000000", "[batch, 8, 8]"),
        ("type: attention, dim: 8, heads: 2, dropout: 0.1, causal: true", "[batch, 1000000, 8]"),
        ("type: dropout, p: 0.1", "[batch, 1000000, 1000]"),
        ("type: linear, in: 8, out: 1000000000000", "[batch, 8]"),
        ("type: conv2d, in: 8, out: 8, kernel: 1000000000, padding: 1000000000", "[batch, 8, 8, 8]"),
        ("type: split, parts: 2000000000", "[batch, 8]"),
    ],
)
def test_shapes_of_any_size_cost_no_memory(files: Files, node: str, shape: str) -> None:
    text = HEAD.replace("[batch, 8]", shape) + f"nodes: [{{id: n, {node}}}]\nedges: [x -> n]\noutputs: {{y: n}}\n"
    path = files.write(text)
    before, started = psutil.Process().memory_info().rss, time.process_time()
    with contextlib.suppress(NetworkFileError):
        load(path)
    assert psutil.Process().memory_info().rss - before < 100 * 2**20
    assert time.process_time() - started < 3.0
