"""Comparing two runs: zero is zero, and anything else is found and named."""

from __future__ import annotations

import math

import pytest
import torch

from cli.comparing import GRADIENT, LOSS, WEIGHT, Comparison
from wire.errors import DCNRError


def traced(change: float = 0.0) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.arange(4.0)
    weight[2] += change
    return {"fc": {"param.weight": weight, "grad.weight": torch.ones(4)}, "bn": {"buffer.mean": torch.zeros(2)}}


def test_equal_runs_are_exact() -> None:
    found = Comparison()
    found.loss(1, 2.5, 2.5)
    found.tensors_of(1, traced(), traced())
    assert found.exact
    assert found.relative == 0


def test_one_bit_is_a_difference() -> None:
    found = Comparison()
    found.loss(1, 2.5, 2.5)
    found.tensors_of(7, traced(2.0**-22), traced())
    assert not found.exact
    assert found.gaps[WEIGHT].absolute == 2.0**-22
    assert found.gaps[WEIGHT].where == "step 7, fc.param.weight"
    assert found.gaps[WEIGHT].relative == pytest.approx(2.0**-22 / math.sqrt(14))
    assert found.gaps[GRADIENT].absolute == 0


def test_a_run_that_is_not_a_number_is_far_away() -> None:
    found = Comparison()
    found.loss(1, math.nan, 2.5)
    found.tensors_of(1, traced(math.nan), traced())
    assert found.gaps[LOSS].absolute == math.inf
    assert found.gaps[WEIGHT].absolute == math.inf


def test_nothing_compared_is_not_exact() -> None:
    assert not Comparison().exact


def test_missing_tensors_are_an_error() -> None:
    odd = traced()
    del odd["fc"]["grad.weight"]
    with pytest.raises(DCNRError, match=r"fc: .*grad\.weight"):
        Comparison().tensors_of(1, odd, traced())
    with pytest.raises(DCNRError, match="the same VNodes: bn"):
        Comparison().tensors_of(1, {"fc": traced()["fc"]}, traced())
    other = traced()
    other["bn"]["buffer.mean"] = torch.zeros(3)
    with pytest.raises(DCNRError, match=r"expected torch.float32 \(2,\), got torch.float32 \(3,\)"):
        Comparison().tensors_of(1, other, traced())
