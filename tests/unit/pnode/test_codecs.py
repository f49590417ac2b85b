"""What a codec does to a tensor: bounds, golden values, and what comes of values that are not finite."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pnode.codecs import decode, encode, round_in_place_of_travel, rounded
from pnode.tensors import Received, pack, unpack
from wire.codec import MessageError, check_outgoing, tensor_bytes, tensor_problem
from wire.coded import BLOCK, coded_bytes
from wire.errors import MisuseError, RemoteError
from wire.messages import Hop, TensorMeta

FLOAT_MAX = torch.finfo(torch.float32).max
SMALLEST_NORMAL = 2.0**-126

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
tensors = st.builds(
    lambda values, rows: torch.tensor(values * rows, dtype=torch.float32).reshape(rows, len(values)),
    st.lists(floats, min_size=1, max_size=40) | st.lists(floats, min_size=BLOCK - 2, max_size=BLOCK + 3),
    st.integers(1, 3),
)


def blocks(tensor: Tensor) -> list[Tensor]:
    """The blocks of a tensor by hand: at most 256 neighbours of one row."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    return [row[start : start + 256] for row in rows for start in range(0, len(row), 256)]


@settings(deadline=None)
@given(tensors)
def test_bf16_is_within_two_to_the_minus_eight(tensor: Tensor) -> None:
    tensor = tensor.clamp(-3.38e38, 3.38e38)
    exact, found = tensor.double(), rounded(tensor, "bf16").double()
    assert torch.all((found - exact).abs() <= torch.maximum(exact.abs() * 2.0**-8, torch.tensor(2.0**-134)))


@settings(deadline=None)
@given(tensors)
def test_int8_is_within_absmax_over_254_of_its_block(tensor: Tensor) -> None:
    for exact, found in zip(blocks(tensor), blocks(rounded(tensor, "int8")), strict=True):
        highest = exact.abs().max().double()
        error = (found.double() - exact.double()).abs().max()
        if highest / 127 < SMALLEST_NORMAL * (1 + 1e-6):
            assert error <= highest, "such a small block may become zeros"
        else:
            assert error <= highest / 254 * (1 + 1e-5)
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("highest", [FLOAT_MAX, 3.4e38, 1.0, 2.0**-118, 127 * SMALLEST_NORMAL])
def test_int8_keeps_the_ends_of_the_range_finite(highest: float) -> None:
    tensor = torch.tensor([highest, -highest, highest / 2, 0.0])
    found = rounded(tensor, "int8")
    assert torch.isfinite(found).all()
    assert torch.all((found.double() - tensor.double()).abs() <= highest / 254 * (1 + 1e-5))


def test_golden_bytes_of_int8() -> None:
    tensor = torch.tensor([[127.0, -1.0, 0.4, 0.6], [-254.0, 3.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    data = bytes(encode(tensor, "int8").numpy().tobytes())
    assert data[:12] == struct.pack("<3f", 1.0, 2.0, 0.0)
    assert list(struct.unpack("12b", data[12:])) == [127, -1, 0, 1, -127, 2, 0, 0, 0, 0, 0, 0]  # 1.5 -> 2, 0.5 -> 0
    expected = torch.tensor([[127.0, -1.0, 0.0, 1.0], [-254.0, 4.0, 0.0, 0.0], [0.0] * 4])
    assert torch.equal(rounded(tensor, "int8"), expected)


def test_golden_bytes_of_bf16() -> None:
    tensor = torch.tensor([1.0, 1.00390625, 1.01171875, -2.5])  # 1 + 2^-8 and 1 + 3 * 2^-8: ties, to even
    assert encode(tensor, "bf16").numpy().tobytes() == struct.pack("<4H", 0x3F80, 0x3F80, 0x3F82, 0xC020)


def test_int8_against_plain_torch() -> None:
    torch.manual_seed(5)
    tensor = torch.randn(3, 5, 600) * torch.logspace(-6, 6, 600)
    expected = tensor.clone()
    for row in expected.view(-1, 600):
        for start in range(0, 600, 256):
            scale = row[start : start + 256].abs().max() / 127
            row[start : start + 256] = torch.round(row[start : start + 256] / scale) * scale
    assert torch.equal(rounded(tensor, "int8"), expected)
    assert encode(tensor, "int8").numel() == 3 * 5 * (600 + 3 * 4) == coded_bytes("int8", [3, 5, 600])


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (3, 0), (4, 3), (2, 3, 257), (1, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_comes_back_and_has_the_size_that_is_said(
    codec: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    data = encode(tensor, codec)
    assert data.numel() == coded_bytes(codec, shape)
    found = decode(data, codec, dtype, shape)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert rounded(tensor, codec).data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_the_result_depends_on_values_alone_not_on_layout_or_other_samples(codec: str) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(6, 4, 300)
    whole = rounded(tensor, codec)
    assert torch.equal(whole, torch.cat([rounded(part, codec) for part in tensor.split([1, 2, 3])]))
    strange = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strange.is_contiguous()
    assert torch.equal(rounded(strange, codec), whole)
    assert rounded(strange, codec).is_contiguous()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_is_not_finite_is_still_seen_behind_the_edge(codec: str, bad: float) -> None:
    tensor = torch.randn(2, 300)
    tensor[1, 270] = bad
    found = rounded(tensor, codec)
    assert not bool(torch.isfinite(found.sum()))
    assert torch.isfinite(found[0]).all()
    if codec == "int8":
        assert torch.isfinite(found[1, :256]).all()
        assert found[1, 256:].isnan().all(), "the whole block, so that no value of it can be taken for a number"


def test_gradients_are_coded_on_their_way_back() -> None:
    value = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(3, 8)
    (round_in_place_of_travel(value, "int8") * weight).sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, rounded(weight, "int8"))
    assert not torch.equal(value.grad, weight)


def test_packed_and_back() -> None:
    tensor = torch.randn(4, 256)
    packed = pack([tensor], "int8")
    assert packed.metas == (TensorMeta("float32", [4, 256], "int8"),)
    assert packed.size_bytes == 4 * 260
    (found,) = unpack(Received(packed.metas, packed.frames), None, "int8")
    assert torch.equal(found, rounded(tensor, "int8"))


@pytest.mark.parametrize(
    ("meta", "size", "codec", "says"),
    [
        (TensorMeta("float32", [8], "int8"), 32, "", "expected a tensor without codec, got one coded by 'int8'"),
        (TensorMeta("float32", [8]), 32, "int8", "expected a tensor coded by 'int8', got one without codec"),
        (TensorMeta("float32", [8], "bf16"), 16, "int8", "coded by 'int8', got one coded by 'bf16'"),
        (TensorMeta("int64", [8], "int8"), 12, "int8", "int64 can't be coded by 'int8'"),
        (TensorMeta("float32", [8], "int8"), 11, "int8", r"expected 12 bytes for float32\(8,\) as int8, got 11"),
        (TensorMeta("float32", [8], "int8"), 13, "int8", "expected 12 bytes"),
        (TensorMeta("float32", [1 << 40], "int8"), 12, "int8", "as int8, got 12"),
        (TensorMeta("float32", [-8, -1], "int8"), 12, "int8", "extent -8"),
    ],
)
def test_other_codecs_sizes_and_types_are_refused(meta: TensorMeta, size: int, codec: str, says: str) -> None:
    with pytest.raises(RemoteError, match=says):
        unpack(Received([meta], [memoryview(bytearray(size))]), None, codec)


@pytest.mark.parametrize("codec", ["", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(), (0,), (4, 3), (2, 3, 257), (1, 512)])
def test_the_wire_takes_a_coded_tensor_of_its_size_and_no_other(codec: str, shape: tuple[int, ...]) -> None:
    packed = pack([torch.ones(shape)], codec)
    hop = Hop("s", 1, 0, 1, 0, 0, 0, 1, "p0", 0, list(packed.metas))
    assert check_outgoing(hop, packed.frames, hop.lane) == [packed.size_bytes]
    assert tensor_problem(hop, [packed.size_bytes]) == ""
    assert "expected" in tensor_problem(hop, [packed.size_bytes + 1])
    with pytest.raises(MisuseError, match="expected"):
        check_outgoing(hop, [bytes(packed.size_bytes + 1)], hop.lane)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (TensorMeta("float32", [8], "int4"), "codec 'int4'"),
        (TensorMeta("float32", [8], "none"), "codec 'none'"),
        (TensorMeta("int64", [8], "bf16"), "int64 can't be coded by 'bf16'"),
        (TensorMeta("float32", [-8], "int8"), "extent -8"),
        (TensorMeta("float32", [1 << 30, 1 << 30, 0], "int8"), "strides"),
    ],
)
def test_the_wire_refuses_what_no_codec_makes(meta: TensorMeta, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        tensor_bytes(meta)
