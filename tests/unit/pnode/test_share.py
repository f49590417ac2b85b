"""What a hop's tensors have to be, by graph and deployment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from networks.codecs import CodedGroup, groups_problem
from networks.graph import Graph, NodeId
from networks.stages import cut_stages
from pnode.share import hop_problem
from tests.unit.pnode.cluster import graph_of

GRAPH: Graph = graph_of([("a", "b"), ("a", "c"), ("b", "loss"), ("c", "loss")], loss="loss", trainable={"a", "b"})
PLACEMENT = {NodeId("a"): "p1", NodeId("b"): "p2", NodeId("c"): "p2", NodeId("loss"): "p2"}
FLOATS = frozenset({"float32"})


def problem(groups: Sequence[CodedGroup], codec: str, backward: bool = False) -> str:
    (channel,) = cut_stages(GRAPH, PLACEMENT, groups).channels
    return hop_problem(
        GRAPH, channel, backward=backward, expected=1, rows=2, metas=[("float32", [2, 4], codec)], floats=FLOATS
    )


@pytest.mark.parametrize("backward", [False, True])
def test_a_hop_has_the_codec_of_the_deployment_and_no_other(backward: bool) -> None:
    coded = [CodedGroup("int8", (0, 1))]
    assert problem((), "", backward) == ""
    assert problem(coded, "int8", backward) == ""
    assert problem((), "int8", backward) == "expected it without codec, got it coded by 'int8'"
    assert problem(coded, "", backward) == "expected it coded by 'int8', got it without codec"
    assert "got it coded by 'bf16'" in problem(coded, "bf16", backward)


def test_a_group_has_a_channel_of_its_own_and_a_split_group_none_that_is_coded() -> None:
    one = cut_stages(GRAPH, PLACEMENT, [CodedGroup("int8", (0,))]).channels
    assert [(channel.codec, [edge.index for edge in channel.edges]) for channel in one] == [("int8", [0]), ("", [1])]
    apart = {**PLACEMENT, NodeId("c"): "p3"}
    split = cut_stages(GRAPH, apart, [CodedGroup("int8", (0, 1))]).channels
    assert [channel.codec for channel in split if channel.port.node == "a"] == ["", ""]
    home = cut_stages(GRAPH, dict.fromkeys(PLACEMENT, "p1"), [CodedGroup("int8", (0, 1))])
    assert home.channels == ()
    assert home.groups == (CodedGroup("int8", (0, 1)),)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([CodedGroup("int8", (0, 1)), CodedGroup("bf16", (2,))], ""),
        ([CodedGroup("int4", (0,))], "codec 'int4' is not known here; known are bf16, int8"),
        ([CodedGroup("none", (0,))], "codec 'none' is not known here"),
        ([CodedGroup("int8", ())], "none of this network's"),
        ([CodedGroup("int8", (1, 0))], "not in order"),
        ([CodedGroup("int8", (0, 0))], "not in order"),
        ([CodedGroup("int8", (-1,))], "none of this network's"),
        ([CodedGroup("int8", (4,))], "none of this network's"),
        ([CodedGroup("int8", (0, 2))], "several values"),
        ([CodedGroup("int8", (0,)), CodedGroup("bf16", (0, 1))], "in two coded groups"),
    ],
)
def test_groups_that_come_from_elsewhere_are_checked(groups: Sequence[CodedGroup], says: str) -> None:
    found = groups_problem(GRAPH, groups)
    assert (says in found) if says else not found
