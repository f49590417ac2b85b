"""A gradient report holds more norms than a message header could, and nothing but norms gets in."""

from __future__ import annotations

import math

import msgspec
import pytest

from pnode.norms import pack_norms, read_norms
from wire.limits import HEADER_BYTES


def test_as_many_norms_as_a_large_network_has() -> None:
    norms = tuple((index, index / 3) for index in range(20_000))
    frame = pack_norms(norms)
    assert frame.nbytes > HEADER_BYTES
    assert read_norms([frame]) == norms


def test_values_that_are_not_finite_arrive_as_they_are() -> None:
    norms = read_norms([pack_norms(((0, math.inf), (1, math.nan)))])
    assert norms is not None
    assert norms[0] == (0, math.inf)
    assert math.isnan(norms[1][1])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"", b""],
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode({"norms": 1})],
        [msgspec.msgpack.encode([[0, "a"]])],
        [msgspec.msgpack.encode([[0, 1.0, 2.0]])],
        [msgspec.msgpack.encode([[0.5, 1.0]])],
        [msgspec.msgpack.encode([[0, 1.0]]) + b"\x00"],
        [b"\xdd\x7f\xff\xff\xff"],
    ],
)
def test_anything_else_is_no_report(frames: list[bytes]) -> None:
    assert read_norms([memoryview(frame) for frame in frames]) is None
