"""Codecs in network files: arrows, the recipe's default, errors with their place, and the canonical bytes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from networks.codecs import CodedGroup, summary_of, wish_of
from networks.graph import NodeId
from networks.network import BadNetworkError, Network
from networks.schema import json_schema
from networks.stages import wished_groups
from tests.unit.networks.files import MLP, Files, changed
from tests.unit.networks.test_schema import instance
from wire.coded import coded_bytes

CHAIN = "x -> fc1 -> act -> fc2 -> loss.logits"


def arrows(chain: str) -> str:
    return changed((CHAIN, chain))


def codecs_of(network: Network) -> dict[str, str]:
    return {str(edge): edge.codec for edge in network.graph.edges if edge.codec}


def test_an_arrow_names_a_codec(files: Files) -> None:
    network = files.load(arrows("x -> fc1 -int8-> act -none->   fc2 -auto-> loss.logits"))
    assert codecs_of(network) == {"fc1.y -> act.x": "int8", "act.y -> fc2.x": "none", "fc2.y -> loss.logits": "auto"}
    assert network.recipe.codec == "none"


def test_an_arrow_without_space_is_part_of_a_name_as_ever(files: Files) -> None:
    text = changed(("id: fc1", "id: fc1-int8"), (CHAIN, "x->fc1-int8->act->fc2->loss.logits"))
    assert codecs_of(files.load(text)) == {}


def test_blocks_keep_their_own_codecs_and_take_those_that_lead_to_them(files: Files) -> None:
    text = """\
version: 1
name: blocks
inputs: {x: {dtype: float32, shape: [batch, 4]}}
blocks:
  pair:
    inputs: [v]
    nodes:
      - {id: a, type: linear, in: 4, out: 4}
      - {id: b, type: relu}
      - {id: s, type: add}
    edges:
      - v -> a -bf16-> b -> s
      - v -none-> s
    output: s
nodes:
  - {id: in, type: linear, in: 4, out: 4}
  - {id: h, type: block, block: pair, repeat: 2}
  - {id: out, type: relu}
edges:
  - x -> in -int8-> h -auto-> out
outputs: {y: out}
"""
    assert codecs_of(files.load(text)) == {
        "in.y -> h.0.a.x": "int8",
        "h.0.a.y -> h.0.b.x": "bf16",
        "in.y -> h.0.s.1": "none",
        "h.1.a.y -> h.1.b.x": "bf16",
        "h.0.s.y -> h.1.s.1": "none",
        "h.1.s.y -> out.x": "auto",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            arrows("x -> fc1 -int9-> act -> fc2 -> loss.logits"),
            "13:15: no codec is called 'int9' | did you mean 'int8'?",
        ),
        (arrows("x -> fc1 --> act -> fc2 -> loss.logits"), "13:15: no codec is called ''"),
        (arrows("x -int8-> fc1 -> act -> fc2 -> loss.logits"), "13:15: 'x' is an input: it is read where it is used"),
        (changed(("  batch: 4", "  codec: int9\n  batch: 4")), "17:10: 'train.codec'"),
        (changed(("  batch: 4", "  codec: 8\n  batch: 4")), "17:10: 'train.codec'"),
    ],
)
def test_errors_say_where_and_what_next(files: Files, text: str, expected: str) -> None:
    found = files.errors(text)
    assert any(one.startswith(expected) for one in found), found
    assert len(found) == 1


def test_only_float32_values_can_be_coded(files: Files) -> None:
    text = changed(("dtype: float32", "dtype: int64"), ("{id: fc1, type: linear, in: 8, out: 16}",
                   "{id: fc1, type: flatten}"), (CHAIN, "x -> fc1 -int8-> act -> fc2 -> loss.logits"))  # fmt: skip
    assert any("only float32 can be coded" in one for one in files.errors(text))


def test_it_can_be_set_on_the_command_line(files: Files) -> None:
    network = files.load(arrows("x -> fc1 -none-> act -> fc2 -> loss.logits"), sets=["train.codec=int8"])
    assert network.recipe.codec == "int8"
    wishes = {str(edge): wish_of(network.graph, edge.index, "int8") for edge in network.graph.edges}
    assert wishes == {
        "x -> fc1.x": "none",
        "fc1.y -> act.x": "none",
        "act.y -> fc2.x": "int8",
        "fc2.y -> loss.logits": "int8",
        "targets -> loss.targets": "none",
    }
    assert any("'train.codec'" in one for one in files.errors(MLP, sets=["train.codec=fast"]))


def test_only_edges_that_cross_are_coded(files: Files) -> None:
    graph = files.load(MLP).graph
    placement = {NodeId("fc1"): "p1", NodeId("act"): "p1", NodeId("fc2"): "p2", NodeId("loss"): "p2"}
    assert [group for _, group in wished_groups(graph, placement, "int8")] == [CodedGroup("int8", (2,))] or [
        str(graph.edges[edge]) for _, group in wished_groups(graph, placement, "int8") for edge in group.edges
    ] == ["act.y -> fc2.x"]
    assert wished_groups(graph, placement, "none") == []
    assert wished_groups(graph, dict.fromkeys(placement, "p1"), "int8") == []


def test_bytes_keep_codecs_and_are_as_before_without_any(files: Files) -> None:
    plain = files.load(MLP)
    assert b"codec" not in plain.to_bytes(), "networks that are stored already keep their digest"
    network = files.load(arrows("x -> fc1 -int8-> act -> fc2 -> loss.logits"), sets=["train.codec=auto"])
    again = Network.from_bytes(network.to_bytes())
    assert again.digest == network.digest != plain.digest
    assert codecs_of(again) == {"fc1.y -> act.x": "int8"}
    assert again.recipe.codec == "auto"


@pytest.mark.parametrize("codecs", [{"1": "int4"}, {"99": "int8"}, {"-1": "int8"}, {"x": "int8"}, {"0": "int8"}])
def test_bytes_with_impossible_codecs_are_refused(files: Files, codecs: dict[str, str]) -> None:
    whole = json.loads(files.load(MLP).to_bytes())
    assert whole["edges"][0][0].startswith("x:")
    data = json.dumps({**whole, "codecs": codecs}, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(BadNetworkError):
        Network.from_bytes(data)


def test_the_schema_knows_the_arrows() -> None:
    validator = jsonschema.Draft7Validator(json_schema())
    assert validator.is_valid(instance(arrows("x -> fc1 -int8-> act -auto-> fc2 -> loss.logits")))
    assert not validator.is_valid(instance(arrows("x -> fc1 -int9-> act -> fc2 -> loss.logits")))
    assert validator.is_valid(instance(changed(("  batch: 4", "  codec: auto\n  batch: 4"))))
    assert not validator.is_valid(instance(changed(("  batch: 4", "  codec: int9\n  batch: 4"))))


def test_sizes_by_hand() -> None:
    assert coded_bytes("bf16", [3, 5]) == 30
    assert coded_bytes("int8", [3, 5]) == 15 + 3 * 4
    assert coded_bytes("int8", [2, 257]) == 2 * 257 + 2 * 2 * 4
    assert coded_bytes("int8", []) == 5
    assert coded_bytes("", [3, 5]) == 60
    assert coded_bytes("int8", [0, 5]) == 0
    with pytest.raises(KeyError):
        coded_bytes("int4", [1])


def test_for_people() -> None:
    assert summary_of([]) == ""
    assert summary_of([CodedGroup("int8", (1,))]) == "int8 on 1 edge"
    assert summary_of([CodedGroup("int8", (1, 2)), CodedGroup("bf16", (3,))]) == "bf16 on 1 edges, int8 on 2"
