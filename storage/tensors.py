"""The state of one VNode as safetensors bytes, and back.

- Equal states give equal bytes: the digest of the bytes names the state.
- Types and bits stay exactly as they were, bfloat16 weights beside float32 moments among them.
- Everything is checked here before any tensor is made: header length, tensor count, names, types, shapes, offsets that
  cover the data exactly. Nothing in a file is ever executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from storage.limits import PART_HEADER_BYTES, PART_TENSORS, TENSOR_DIMS, TENSOR_EXTENT, TENSOR_NAME_CHARS
from storage.store import CorruptError
from wire.errors import MisuseError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

_FORMATS = ((b"\x80", "pickle"), (b"PK", "a zip archive, as torch.save writes"), (b"\x93NUMPY", "npy"))


class _TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def encode_tensors(state: Mapping[str, Tensor]) -> bytes:
    """safetensors bytes of `state`, the same for equal states whatever the order of its keys.

    Raises MisuseError for a name or type that can't be stored.
    """
    ready: dict[str, Tensor] = {}
    for name in sorted(state):
        if not name or len(name) > TENSOR_NAME_CHARS or name == "__metadata__":
            raise MisuseError(f"a tensor can't be stored under the name {name[:100]!r}")
        ready[name] = state[name].detach().cpu().contiguous()
    if len(ready) > PART_TENSORS:
        raise MisuseError(f"a part holds {len(ready)} tensors, at most {PART_TENSORS} are allowed")
    try:
        return safetensors_torch.save(_unshared(ready))
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise MisuseError(f"state with {list(ready)[:5]} can't be stored: {error}") from error


def _unshared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that lie in a storage of another one, or in a larger one, are copied: safetensors refuses them."""
    seen: set[int] = set()
    alone: dict[str, Tensor] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size()
        seen.add(storage.data_ptr())
        alone[name] = tensor.clone() if shared else tensor
    return alone


def decode_tensors(data: bytes, *, key: str) -> dict[str, Tensor]:
    """The tensors of safetensors bytes. Raises CorruptError naming `key` for anything that isn't exactly that."""
    check_tensors(data, key=key)
    try:
        return safetensors_torch.load(data)
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise CorruptError(f"{key} can't be read as safetensors: {error}", key=key) from error


def check_tensors(data: bytes, *, key: str) -> None:
    """Check the whole structure of safetensors bytes without making a tensor. Raises CorruptError."""

    def refuse(cause: str) -> CorruptError:
        return CorruptError(f"{key} is not safetensors: {cause}", key=key, hint="only safetensors are ever read")

    for start, name in _FORMATS:
        if data.startswith(start) and (len(data) < 9 or data[8:9] != b"{"):
            raise refuse(f"it looks like {name}")
    if len(data) < 8:
        raise refuse(f"{len(data)} bytes")
    length = int.from_bytes(data[:8], "little")
    if length > PART_HEADER_BYTES or 8 + length > len(data):
        raise refuse(f"header of {length} bytes in {len(data)}, at most {PART_HEADER_BYTES} are allowed")
    try:
        raw = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        if len(raw) > PART_TENSORS:
            raise refuse(f"{len(raw)} tensors, at most {PART_TENSORS} are allowed")
        found = {name: msgspec.json.decode(info, type=_TensorInfo) for name, info in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(f"header: {error}") from error
    position = 0
    for name, info in sorted(found.items(), key=lambda item: item[1].data_offsets):
        if len(name) > TENSOR_NAME_CHARS or info.dtype not in ITEM_BYTES:
            raise refuse(f"tensor {name[:100]!r} of type {info.dtype[:20]!r}")
        if len(info.shape) > TENSOR_DIMS or any(not 0 <= extent <= TENSOR_EXTENT for extent in info.shape):
            raise refuse(f"tensor {name!r} has the shape {info.shape[: TENSOR_DIMS + 1]}")
        if math.prod(filter(None, info.shape)) > TENSOR_EXTENT:
            raise refuse(f"tensor {name!r} has the shape {info.shape}")
        size = math.prod(info.shape) * ITEM_BYTES[info.dtype]
        if info.data_offsets != (position, position + size):
            raise refuse(f"tensor {name!r} lies at {info.data_offsets}, expected {(position, position + size)}")
        position += size
    if 8 + length + position != len(data):
        raise refuse(f"{len(data)} bytes, its header describes {8 + length + position}")
