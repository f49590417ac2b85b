"""The packed form of a data set: a JSON header and raw arrays, read by mapping the file.

Layout: `DCNRDATA`, the header's length (8 bytes, little-endian), the header (JSON), zeros up to a multiple of 64, then
the arrays, little-endian, each at a multiple of 64. Equal data give equal bytes, so the digest names the data. All is
checked when it is opened: sizes, types, places, and that every token is inside the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pnode.data.corpus import DataError
from pnode.data.limits import PACKED_HEADER_BYTES

MAGIC = b"DCNRDATA"
ALIGN = 64
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8", "float32": "<f4"}
SPLITS = ("train", "val")

Array = NDArray[Any]


class ArrayInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Type, shape and place of one array, counted from the end of the header."""

    dtype: str
    shape: list[int]
    offset: int


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a packed file holds. kind "tokens": `<split>.tokens`; "samples": `<split>.features`, `.targets`, `.ids`.

    `vocab`: number of token ids, or of classes.
    """

    kind: str
    vocab: int
    arrays: dict[str, ArrayInfo]
    tokenizer_digest: str = ""
    version: int = 1


@dataclass(frozen=True, slots=True)
class PackedData:
    """An opened data set; the arrays are read-only."""

    header: Header
    arrays: dict[str, Array]


def token_dtype(vocab: int) -> str:
    """The smallest type that holds every id."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def encode_packed(kind: str, vocab: int, arrays: Mapping[str, Array], *, tokenizer_digest: str = "") -> list[bytes]:
    """The packed form, as pieces to write one after the other."""
    infos: dict[str, ArrayInfo] = {}
    body: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        infos[name] = ArrayInfo(array.dtype.name, list(array.shape), offset)
        data = np.ascontiguousarray(array).astype(DTYPES[array.dtype.name], copy=False).tobytes()
        padding = -len(data) % ALIGN
        body += [data, bytes(padding)]
        offset += len(data) + padding
    header = msgspec.json.encode(Header(kind, vocab, infos, tokenizer_digest))
    start = len(MAGIC) + 8 + len(header)
    return [MAGIC, len(header).to_bytes(8, "little"), header, bytes(-start % ALIGN), *body]


def open_packed(source: Path | bytes, *, name: str = "") -> PackedData:
    """Open a packed file (mapped, not read) or bytes. Raises DataError for anything that isn't exactly one."""
    name = name or (str(source) if isinstance(source, Path) else "these bytes")
    try:
        whole: Array = (
            np.frombuffer(source, np.uint8) if isinstance(source, bytes) else np.memmap(source, np.uint8, mode="r")
        )
    except (OSError, ValueError) as error:
        raise DataError(f"{name} can't be opened as packed data: {error}") from error
    header, start = _read_header(whole, name)
    arrays: dict[str, Array] = {}
    end = 0
    for label, info in header.arrays.items():
        if info.dtype not in DTYPES or len(info.shape) > 8 or any(not 0 <= extent < 1 << 48 for extent in info.shape):
            raise DataError(f"{name}: array {label[:40]!r} has type {info.dtype[:20]!r} and shape {info.shape[:9]}")
        size = math.prod(info.shape) * np.dtype(DTYPES[info.dtype]).itemsize
        if info.offset != end or start + info.offset + size > len(whole):
            raise DataError(f"{name}: array {label[:40]!r} lies at {info.offset}, {size} bytes; the file is damaged")
        view = whole[start + info.offset : start + info.offset + size]
        arrays[label] = view.view(DTYPES[info.dtype]).reshape(info.shape)
        end = info.offset + size + (-size % ALIGN)
    if start + end != len(whole):
        raise DataError(f"{name} has {len(whole)} bytes, its header describes {start + end}")
    _check(header, arrays, name)
    return PackedData(header, arrays)


def _read_header(whole: Array, name: str) -> tuple[Header, int]:
    lead = bytes(whole[: len(MAGIC) + 8])
    if len(lead) < len(MAGIC) + 8 or not lead.startswith(MAGIC):
        raise DataError(f"{name} is not packed data", hint="pack it with `dcnr train`, which names it by digest")
    length = int.from_bytes(lead[len(MAGIC) :], "little")
    if length > PACKED_HEADER_BYTES:
        raise DataError(f"{name}: a header of {length} bytes, at most {PACKED_HEADER_BYTES} are allowed")
    try:
        header = msgspec.json.decode(bytes(whole[len(lead) : len(lead) + length]), type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{name}: bad header: {error}") from error
    if header.version != 1:
        raise DataError(f"{name} is packed data of version {header.version}; this program reads version 1")
    start = len(lead) + length
    return header, start + (-start % ALIGN)


def _check(header: Header, arrays: Mapping[str, Array], name: str) -> None:
    fields = {"tokens": ("tokens",), "samples": ("features", "targets", "ids")}.get(header.kind)
    if fields is None or set(arrays) != {f"{split}.{field}" for split in SPLITS for field in fields}:
        raise DataError(f"{name}: kind {header.kind[:20]!r} with arrays {sorted(arrays)[:8]}")
    for split in SPLITS:
        if header.kind == "tokens":
            ids = arrays[f"{split}.tokens"]
            if ids.ndim != 1 or ids.dtype.kind != "u":
                raise DataError(f"{name}: {split} tokens of type {ids.dtype} and shape {ids.shape}")
        else:
            features, ids, rows = (arrays[f"{split}.{field}"] for field in fields)
            if not (len(features.shape) >= 1 and ids.shape == rows.shape == features.shape[:1]):
                raise DataError(f"{name}: {split} has {features.shape} features for {ids.shape} targets")
            if features.dtype != np.float32 or ids.dtype != np.int64 or rows.dtype != np.int64:
                raise DataError(f"{name}: {split} has features of {features.dtype} and targets of {ids.dtype}")
        for start in range(0, len(ids), 1 << 22):
            block = ids[start : start + (1 << 22)]
            if block.min() < 0 or block.max() >= header.vocab:
                raise DataError(f"{name}: an id of {split} is outside 0 … {header.vocab - 1}")
