"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from cli import units

SIZES = [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_400_000, "3.4 MB"), (5e12, "5.0 TB"), (5e15, "5000.0 TB")]
DURATIONS = [
    (0.00002, "20 µs"),
    (0.0851, "85 ms"),
    (3.21, "3.2 s"),
    (125, "2:05"),
    (3723, "1:02:03"),
    (3 * 86400 + 4 * 3600, "3 d 4 h"),
    (math.nan, "-"),
    (math.inf, "-"),
    (-1, "-"),
]
COUNTS = [(0, "0"), (9.53, "9.5"), (950, "950"), (1234, "1.23k"), (12_345, "12.3k"), (4.56e6, "4.56M")]


@pytest.mark.parametrize(("value", "text"), SIZES)
def test_size(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(("value", "text"), DURATIONS)
def test_duration(value: float, text: str) -> None:
    assert units.duration(value) == text


@pytest.mark.parametrize(("value", "text"), COUNTS)
def test_compact(value: float, text: str) -> None:
    assert units.compact(value) == text


def test_words() -> None:
    assert units.plural(1, "PNode") == "1 PNode"
    assert units.plural(4, "microbatch") == "4 microbatches"
    assert units.plural(2, "PNode process") == "2 PNode processes"
    assert units.count(804096) == "804,096"
    assert units.loss(math.nan) == "nan"
    assert units.loss(1.23456) == "1.2346"
