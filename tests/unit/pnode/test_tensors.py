from __future__ import annotations

import struct

import pytest
import torch

from pnode.tensors import Received, pack, unpack
from wire.errors import RemoteError
from wire.messages import TensorMeta

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 5), (64, 128)])
def test_any_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    packed = pack([tensor, tensor.T.contiguous().T if tensor.dim() == 2 else tensor])
    received = Received(packed.metas, [memoryview(bytes(frame)) for frame in packed.frames])
    for found in unpack(received):
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


def test_sending_does_not_copy_and_receiving_a_large_one_neither() -> None:
    tensor = torch.rand(64, 256)
    (frame,) = pack([tensor]).frames
    tensor[0, 0] = 7.0
    (found,) = unpack(Received([TensorMeta("float32", [64, 256])], [frame]))
    assert found[0, 0] == 7.0
    assert found.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("count", [1, 3, 1000, 5000])
def test_a_received_tensor_is_the_frames_memory_however_small(count: int) -> None:
    frame = memoryview(bytearray(torch.rand(count).numpy().tobytes()))
    (found,) = unpack(Received([TensorMeta("float32", [count])], [frame]))
    found[-1] = 7.0
    assert struct.unpack("f", frame[-4:]) == (7.0,)


@pytest.mark.parametrize("count", [1, 3, 1000, 5000])
def test_a_frame_that_may_not_be_written_to_is_copied(count: int) -> None:
    data = torch.rand(count)
    frame = memoryview(data.numpy().tobytes())
    assert frame.readonly
    (found,) = unpack(Received([TensorMeta("float32", [count])], [frame]))
    assert torch.equal(found, data)
    found.mul_(-1.0)
    assert torch.equal(torch.frombuffer(bytearray(frame), dtype=torch.float32), data)


@pytest.mark.parametrize(
    ("meta", "size", "says"),
    [
        (TensorMeta("float32", [3]), 8, r"expected 12 bytes for float32\(3,\), got 8"),
        (TensorMeta("float33", [3]), 12, "unknown dtype 'float33'"),
        (TensorMeta("float32", [-1, -3]), 12, r"float32\(-1, -3\)"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(meta: TensorMeta, size: int, says: str) -> None:
    with pytest.raises(RemoteError, match=says):
        unpack(Received([meta], [memoryview(bytes(size))]))
    with pytest.raises(RemoteError, match="0 frames came"):
        unpack(Received([meta], []))
