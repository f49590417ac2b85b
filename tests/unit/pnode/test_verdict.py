from __future__ import annotations

import itertools
import math

import pytest
import torch

from pnode.events import ReportArrived
from pnode.share import hop_problem, microbatch_rows
from pnode.verdict import clip_scale, decide, gradient_norm
from tests.unit.pnode.cluster import graph_of, shares_of

SHARE = shares_of(
    graph_of([("a", "b"), ("b", "c")], loss="c", trainable={"a", "b"}), {"a": "p1", "b": "p2", "c": "p3"}
)["p3"]


@pytest.mark.parametrize("clip", [None, 0.5, 1.0, 1e9])
def test_the_scale_is_what_torch_clips_by(clip: float | None) -> None:
    gradients = [torch.rand(5, 4, dtype=torch.float64), torch.rand(7, dtype=torch.float64)]
    count = 6
    norms = [(index, float((g**2).sum())) for index, g in enumerate(gradients)]
    ours = [g * clip_scale(gradient_norm(norms, count), count, clip) for g in gradients]
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient / count
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(theirs, clip)
    for mine, parameter in zip(ours, theirs, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=0)


def test_the_order_of_arrival_changes_nothing() -> None:
    norms = [(index, 10.0 ** (index * 3 - 12)) for index in range(8)]
    assert len({gradient_norm(order, 3) for order in itertools.permutations(norms, 8)}) == 1


def report(sender: str, finite: bool = True, culprit: str = "", value: float = 1.0) -> ReportArrived:
    return ReportArrived(sender, 0, ((0, value),), finite, culprit)


def test_the_culprit_is_the_first_in_network_order() -> None:
    reports = {"p1": report("p1"), "p2": report("p2", False, "b"), "p3": report("p3", False, "c")}
    decision = decide(0, reports, loss=1.0, count=3, share=SHARE, hold=True, save=True)
    assert (decision.apply, decision.culprit, decision.hold, decision.save) == (False, "b", False, False)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_not_applied(loss: float) -> None:
    decision = decide(0, {"p1": report("p1")}, loss=loss, count=3, share=SHARE, hold=False, save=False)
    assert (decision.apply, decision.culprit) == (False, "c")
    decision = decide(0, {"p1": report("p1", value=math.inf)}, loss=1.0, count=3, share=SHARE, hold=False, save=False)
    assert not decision.apply


def test_microbatches_are_cut_as_torch_cuts_them() -> None:
    for batch, parts in [(12, 4), (13, 4), (5, 3), (1, 1)]:
        assert microbatch_rows(batch, parts) == [len(each) for each in torch.tensor_split(torch.zeros(batch), parts)]


@pytest.mark.parametrize(
    ("metas", "backward", "says"),
    [
        ([("float32", [2, 4])], False, ""),
        ([("float32", [2, 4])], True, ""),
        ([("float32", [3, 4])], False, "expected float32(2, 4), got float32(3, 4)"),
        ([("float64", [2, 4])], False, "expected float32(2, 4), got float64(2, 4)"),
        ([("bfloat16", [2, 4])], False, "got bfloat16(2, 4)"),
        ([], False, "expected 1 tensors, got 0"),
    ],
)
def test_a_hop_is_what_the_graph_says(metas: list[tuple[str, list[int]]], backward: bool, says: str) -> None:
    graph = graph_of([("a", "b")], loss="b", trainable={"a"})
    channel = shares_of(graph, {"a": "p1", "b": "p2"})["p2"].plan.channels[0]
    found = hop_problem(
        graph, channel, backward=backward, expected=1, rows=2, metas=metas, floats=frozenset({"float32"})
    )
    assert says in found
    assert bool(says) == bool(found)
