"""Limits of a network's file: one below, at, one above; and nothing large is made for a false claim."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

import networks.expand
import networks.network
from networks.diagnostics import Diagnostics, NetworkFileError
from networks.expressions import ExpressionError, evaluate
from networks.limits import (
    BLOCK_DEPTH,
    EXPRESSION_CHARS,
    EXPRESSION_DEPTH,
    EXTENT,
    INTEGER,
    NODES,
    NUMBER_CHARS,
    YAML_BYTES,
    YAML_DEPTH,
    YAML_VALUES,
)
from networks.load import load
from networks.network import BadNetworkError, Network
from networks.yaml_source import SourceText, parse, resolve


def around(limit: int) -> list[tuple[int, bool]]:
    """(size, whether it is allowed)."""
    return [(limit - 1, True), (limit, True), (limit + 1, False)]


def reads(text: str, allowed: bool, cause: str) -> None:
    if allowed:
        parse(SourceText("f.yaml", text), Diagnostics())
    else:
        with pytest.raises(NetworkFileError, match=cause):
            parse(SourceText("f.yaml", text), Diagnostics())


@pytest.mark.parametrize(("size", "allowed"), around(YAML_BYTES))
def test_the_size_of_a_file(size, allowed, tmp_path: Path):
    text = "a: 1\n#"
    text += "x" * (size - len(text))
    reads(text, allowed, "larger than 8 MiB")
    path = tmp_path / "n.yaml"
    path.write_text(text)
    with pytest.raises(NetworkFileError, match=r"'version'|missing|known" if allowed else "larger than 8 MiB"):
        load(path)


@pytest.mark.parametrize(("depth", "allowed"), around(YAML_DEPTH))
def test_the_depth_of_a_file(depth, allowed):
    reads("[" * depth + "]" * depth, allowed, f"deeper than {YAML_DEPTH}")
    reads("{a: " * depth + "1" + "}" * depth, allowed, f"deeper than {YAML_DEPTH}")


@pytest.mark.parametrize(("count", "allowed"), around(YAML_VALUES))
def test_the_values_of_a_file(count, allowed):
    reads("[" + "0," * (count - 1) + "]", allowed, "more than 500,000 values")


@pytest.mark.parametrize(("count", "allowed"), around(YAML_VALUES))
def test_aliases_count_as_what_they_stand_for(count, allowed):
    """The outer list, an anchor of 1,000 values, 498 aliases of it, and the rest."""
    anchor, aliases = "&a [" + "0," * 999 + "]", ",*a" * 498
    rest = count - 1 - 499 * 1000
    reads(f"[{anchor}{aliases}" + ",0" * rest + "]", allowed, "aliases written out")


def test_aliases_of_aliases_cost_nothing():
    lines = ["a0: &a0 [0,0,0,0,0,0,0,0,0,0]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    started = time.process_time()
    tracemalloc.start()
    try:
        reads("\n".join(lines), False, "aliases written out")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("size", "allowed"), around(NUMBER_CHARS))
def test_the_length_of_a_number(size, allowed):
    """What is longer is text, and no field takes it."""
    assert isinstance(resolve("1" * size), int if allowed else str)
    assert isinstance(resolve("1." + "1" * (size - 2)), float if allowed else str)


@pytest.mark.parametrize(("size", "allowed"), around(EXPRESSION_CHARS))
def test_the_length_of_an_expression(size, allowed):
    text = "1" + " " * (size - 1)
    if allowed:
        assert evaluate(text, {}) == 1
    else:
        with pytest.raises(ExpressionError, match=str(EXPRESSION_CHARS)):
            evaluate(text, {})


@pytest.mark.parametrize(("depth", "allowed"), around(EXPRESSION_DEPTH))
def test_the_depth_of_an_expression(depth, allowed):
    """Counted as the parser does: the first level is the expression itself."""
    inside = depth - 1
    text = "(" * inside + "1" + ")" * inside
    if allowed:
        assert evaluate(text, {}) == 1
    else:
        with pytest.raises(ExpressionError, match=r"nested|deep"):
            evaluate(text, {})


@pytest.mark.parametrize(("value", "allowed"), around(INTEGER))
def test_the_results_of_expressions(value, allowed):
    text = f"{value - 1} + 1"
    if allowed:
        assert evaluate(text, {}) == value
    else:
        with pytest.raises(ExpressionError):
            evaluate(text, {})
    with pytest.raises(ExpressionError):
        evaluate("9**9**9", {})


FILE = """version: 1
name: n
inputs:
  x: {{dtype: float32, shape: [batch, {extent}]}}
{blocks}
nodes:
  - {{id: b, type: {type}}}
  - {{id: o, type: relu}}
edges:
  - x -> b -> o
outputs: {{y: o}}
"""


def network(tmp_path: Path, *, repeat: int = 1, nesting: int = 0, extent: int = 4) -> Network:
    """A chain of `repeat` nodes and one more, in `nesting` blocks inside one another."""
    rows = ["blocks:"] if nesting or repeat > 1 else []
    for level in range(max(nesting, 1) if rows else 0):
        last = level == max(nesting, 1) - 1
        kind = "{id: i, type: relu}" if last else f"{{id: i, type: block, block: k{level + 1}}}"
        rows.append(f"  k{level}: {{inputs: [x], nodes: [{kind}], edges: [x -> i], output: i}}")
    kind = f"block, block: k0, repeat: {repeat}" if rows else "relu"
    path = tmp_path / "n.yaml"
    path.write_text(FILE.format(extent=extent, blocks="\n".join(rows), type=kind))
    return load(path)


@pytest.mark.parametrize(("value", "allowed"), around(EXTENT))
def test_the_extents_of_an_input(value, allowed, tmp_path: Path):
    if allowed:
        assert network(tmp_path, extent=value).graph.inputs["x"].shape[-1] == value
    else:
        with pytest.raises(NetworkFileError, match="1,000,000"):
            network(tmp_path, extent=value)


@pytest.mark.parametrize(("count", "allowed"), around(50))
def test_the_nodes_of_a_network(count, allowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a smaller limit than 100,000, to be quick; what is far above the real one is refused before it is made."""
    monkeypatch.setattr(networks.expand, "NODES", 50)
    if allowed:
        assert len(network(tmp_path, repeat=count - 1).graph.nodes) == count
    else:
        with pytest.raises(NetworkFileError, match="nodes"):
            network(tmp_path, repeat=count - 1)


def test_a_claim_of_very_many_nodes_makes_none(tmp_path: Path):
    for repeat in (NODES * 10, 1 << 40):
        started = time.process_time()
        with pytest.raises(NetworkFileError):
            network(tmp_path, repeat=repeat)
        assert time.process_time() - started < 1


@pytest.mark.parametrize(("count", "allowed"), around(50))
def test_the_edges_of_a_network(count, allowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(networks.expand, "EDGES", 50)
    if allowed:
        assert len(network(tmp_path, repeat=count - 1).graph.edges) == count
    else:
        with pytest.raises(NetworkFileError, match="edges"):
            network(tmp_path, repeat=count - 1)


@pytest.mark.parametrize(("depth", "allowed"), around(BLOCK_DEPTH))
def test_blocks_inside_one_another(depth, allowed, tmp_path: Path):
    if allowed:
        assert len(network(tmp_path, nesting=depth).graph.nodes) == 2
    else:
        with pytest.raises(NetworkFileError, match=str(BLOCK_DEPTH)):
            network(tmp_path, nesting=depth)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_size_of_canonical_bytes(over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = network(tmp_path).to_bytes()
    monkeypatch.setattr(networks.network, "NETWORK_BYTES", len(data) - over)
    if over <= 0:
        assert Network.from_bytes(data).to_bytes() == data
    else:
        with pytest.raises(BadNetworkError, match="over the limit"):
            Network.from_bytes(data)
