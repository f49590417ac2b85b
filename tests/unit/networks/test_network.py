"""Canonical bytes: the same for the same meaning, and nothing else is accepted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks.load import BadNetworkError, Network, load, shipped
from tests.unit.networks.files import MLP, Files, changed

VOCAB = {"vocab": 65}
NAMES = [path.stem for path in shipped()]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_round_trip(name: str) -> None:
    network = load(name, vars=VOCAB)
    data = network.to_bytes()
    again = Network.from_bytes(data)
    assert again.to_bytes() == data
    assert again.digest == network.digest
    assert again.graph.edges == network.graph.edges
    assert again.graph.costs == network.graph.costs
    assert again.graph.inputs == network.graph.inputs
    assert list(again.graph.inputs) == list(network.graph.inputs)
    assert list(again.graph.outputs.items()) == list(network.graph.outputs.items())
    assert [(node.id, node.type, node.params, node.tie, node.order) for node in again.graph.nodes] == [
        (node.id, node.type, node.params, node.tie, node.order) for node in network.graph.nodes
    ]
    assert again.recipe == network.recipe
    assert again.vars == network.vars


def test_the_digest_is_of_the_meaning(files: Files) -> None:
    digest = files.load(MLP).digest
    assert files.load("# a comment\n\n" + MLP).digest == digest
    assert files.load(changed(("lr: 1e-3", "lr: 0.001"))).digest == digest
    assert files.load(changed(("in: 8,", "in: $d,"))).digest == digest
    assert files.load(changed(("lr: 1e-3", "lr: 2e-3"))).digest != digest
    assert files.load(changed(("type: relu", "type: gelu"))).digest != digest
    assert files.load(MLP, sets=["train.seed=1"]).digest != digest


def damaged(change: object) -> bytes:
    """The bytes of mlp-digits after a change to their JSON, canonical again."""
    data = json.loads(load("mlp-digits").to_bytes())
    assert callable(change)
    change(data)
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def put(*path: str | int, value: object) -> object:
    def change(data: object) -> None:
        for key in path[:-1]:
            data = data[key]  # type: ignore[index]
        data[path[-1]] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("format", value=2),
        put("format", value="1"),
        put("name", value="../x"),
        put("name", value="a\0"),
        put("extra", value=1),
        put("nodes", value=[]),
        put("nodes", 0, "type", value="os.system"),
        put("nodes", 0, "id", value="../x"),
        put("nodes", 1, "id", value="flat"),
        put("nodes", 1, "params", "in", value="64"),
        put("nodes", 1, "params", "in", value=65),
        put("nodes", 1, "params", "evil", value=1),
        put("nodes", 1, "tie", value="x"),
        put("nodes", 1, "params", value={}),
        put("edges", value=[]),
        put("edges", 0, value=["nope:", "flat:x"]),
        put("edges", 0, value=["pixels:", "nope:x"]),
        put("edges", 0, value=["pixels:", "flat:y"]),
        put("edges", 0, value=["pixels", "flat"]),
        put("edges", 1, value=["head:y", "fc1:x"]),
        put("inputs", value=[]),
        put("inputs", 0, "shape", value=["batch", -1]),
        put("inputs", 0, "shape", value=[]),
        put("inputs", 0, "dtype", value="float99"),
        put("inputs", 1, "name", value="pixels"),
        put("outputs", value=[["loss", "head:y"]]),
        put("outputs", value=[["loss", "nope:y"]]),
        put("place", value={"x": "p1"}),
        put("place", value={"fc1": "../p1"}),
        put("train", value={}),
        put("train", "batch", value=True),
        put("train", "steps", value="1"),
        put("train", "batch", value=10**30),
        put("vars", value={"d": [1]}),
        put("nodes", 1, "params", "out", value=2**62),
    ],
)
def test_bytes_that_lie_are_refused(change: object) -> None:
    with pytest.raises(BadNetworkError):
        Network.from_bytes(damaged(change))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b'"' + b"a" * 1000, b"1e999", b"NaN",
        b'{"format":1' + b',"format":1' * 1000 + b"}", b" " * (16 * 2**20 + 1), b"9" * 100_000,
    ],
)  # fmt: skip
def test_bytes_that_are_no_network(data: bytes) -> None:
    with pytest.raises(BadNetworkError):
        Network.from_bytes(data)


def test_only_the_canonical_form_is_accepted() -> None:
    data = load("mlp-digits").to_bytes()
    for other in (data + b" ", data.replace(b":", b": ", 1), data.replace(b'"name"', b'"nam\\u0065"')):
        with pytest.raises(BadNetworkError, match="canonical"):
            Network.from_bytes(other)
    assert Network.from_bytes(bytearray(data)).to_bytes() == Network.from_bytes(memoryview(data)).to_bytes() == data


def test_nodes_out_of_order_are_refused() -> None:
    def swap(data: dict[str, list[object]]) -> None:
        data["nodes"][0], data["nodes"][1] = data["nodes"][1], data["nodes"][0]

    with pytest.raises(BadNetworkError, match="canonical"):
        Network.from_bytes(damaged(swap))


GOOD = load("moe-digits").to_bytes()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_flipped_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    changed_bytes = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(GOOD) - 1))
        changed_bytes[at] = data.draw(st.sampled_from(b'0123456789"[]{},:.-abcxyz\\\x00\xff'))
    try:
        network = Network.from_bytes(bytes(changed_bytes))
    except BadNetworkError:
        return
    assert network.to_bytes() == changed_bytes
