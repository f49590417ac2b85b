"""Tensors as raw frames and back, without a copy where the memory allows it.

A frame shares the tensor's memory, so the tensor must not change until the message is acknowledged: activations and
gradients never do (no operation here works in place on them), parameters are copied first. The bus hands over frames in
memory of their own, aligned and writable, so a received tensor is that memory. A frame that may not be written to is
somebody else's, so it is copied. Whoever computes with a tensor copies it again if its address is not aligned
(pnode.forks.received).

On an edge with a codec a frame holds the coded bytes (pnode.codecs); dtype and shape are those of the tensor that comes
out. The receiver names the codec that it expects, and takes no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from networks.codecs import codec_text
from pnode.codecs import decode, encode
from wire.codec import MessageError, tensor_bytes
from wire.errors import RemoteError
from wire.messages import TensorMeta

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors ready to be sent."""

    metas: tuple[TensorMeta, ...]
    frames: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(frame.nbytes for frame in self.frames)


@dataclass(frozen=True, slots=True)
class Received:
    """Tensors as they came; their dtypes and shapes are checked before, their sizes by `unpack`."""

    metas: Sequence[TensorMeta]
    frames: Sequence[memoryview]


def pack(tensors: Iterable[torch.Tensor], codec: str = "") -> Packed:
    """Tensors of any device as contiguous CPU bytes; no copy for contiguous CPU tensors without a codec."""
    metas: list[TensorMeta] = []
    frames: list[memoryview] = []
    for tensor in tensors:
        if codec:
            metas.append(TensorMeta(NAMES[tensor.dtype], list(tensor.shape), codec))
            frames.append(encode(tensor, codec).cpu().numpy().data)
            continue
        plain = tensor.detach().cpu().contiguous()
        metas.append(TensorMeta(NAMES[plain.dtype], list(plain.shape)))
        frames.append(plain.reshape(-1).view(torch.uint8).numpy().data)
    return Packed(tuple(metas), tuple(frames))


def unpack(received: Received, device: torch.device | None = None, codec: str = "") -> list[torch.Tensor]:
    """The tensors of received frames, all of them coded by `codec`.

    Raises `RemoteError` if a frame has not the size that its dtype, shape and codec say, or another codec.
    """
    if len(received.metas) != len(received.frames):
        raise RemoteError(f"{len(received.metas)} tensors announced, {len(received.frames)} frames came")
    return [_tensor(meta, frame, device, codec) for meta, frame in zip(received.metas, received.frames, strict=True)]


def _tensor(meta: TensorMeta, frame: memoryview, device: torch.device | None, codec: str) -> torch.Tensor:
    dtype = DTYPES.get(meta.dtype)
    if dtype is None:
        raise RemoteError(f"unknown dtype {meta.dtype!r}")
    if meta.codec != codec:
        raise RemoteError(f"expected a tensor {codec_text(codec)}, got one {codec_text(meta.codec)}")
    try:
        expected = tensor_bytes(meta)
    except MessageError as error:
        raise RemoteError(error.message) from error
    if frame.nbytes != expected:
        what = f" as {codec}" if codec else ""
        raise RemoteError(f"expected {expected} bytes for {meta.dtype}{tuple(meta.shape)}{what}, got {frame.nbytes}")
    if expected == 0:
        return torch.empty(meta.shape, dtype=dtype, device=device)
    array = np.frombuffer(frame, dtype=np.uint8)
    flat = torch.from_numpy(array if array.flags.writeable else array.copy())
    if codec:
        here = flat if device is None or device.type == "cpu" else flat.to(device)
        return decode(here, codec, dtype, meta.shape)
    tensor = flat.view(dtype).reshape(meta.shape)
    return tensor if device is None or device.type == "cpu" else tensor.to(device)
