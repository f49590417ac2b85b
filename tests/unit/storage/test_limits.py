"""Limits of what is read from a store: one below, at, one above; and nothing large is made for a false claim."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

import storage.checkpoints
import storage.sealed
import storage.tensors
from storage.checkpoints import Manifest, decode_manifest, read_manifest
from storage.keys import BadKeyError, check_key, manifest_key
from storage.limits import (
    KEY_CHARS,
    MANIFEST_PARTS,
    PART_HEADER_BYTES,
    PART_TENSORS,
    SEALED_BYTES,
    SEGMENT_CHARS,
    TENSOR_DIMS,
    TENSOR_EXTENT,
    TENSOR_NAME_CHARS,
)
from storage.open import open_store
from storage.sealed import read_sealed, seal, unseal
from storage.store import CorruptError, digest_of
from storage.tensors import check_tensors
from storage.terms import TermRecord
from wire.messages import Part

PREFIX = "networks/n/sessions/s/"


def around(limit: int) -> list[tuple[int, bool]]:
    """(size, whether it is allowed)."""
    return [(limit - 1, True), (limit, True), (limit + 1, False)]


@pytest.mark.parametrize(("size", "allowed"), around(KEY_CHARS))
def test_the_length_of_a_key(size, allowed):
    key = ("a" * 100 + "/") * 5
    key += "b" * (size - len(key))
    if allowed:
        assert check_key(key) == key
    else:
        with pytest.raises(BadKeyError, match=str(size)):
            check_key(key)


@pytest.mark.parametrize(("size", "allowed"), around(SEGMENT_CHARS))
def test_the_length_of_a_segment(size, allowed):
    if allowed:
        assert check_key("a/" + "b" * size)
    else:
        with pytest.raises(BadKeyError, match="segment"):
            check_key("a/" + "b" * size)


@pytest.mark.parametrize(("size", "allowed"), around(SEALED_BYTES))
async def test_the_size_of_a_sealed_record(size, allowed, tmp_path: Path):
    store = open_store(str(tmp_path))
    data = seal(TermRecord("c", 1))
    data += b" " * (size - len(data))
    await store.put("registry/term.json", data)
    if allowed:
        record, _ = await read_sealed(store, "registry/term.json", TermRecord)
        assert record.cluster == "c"
    else:
        with pytest.raises(CorruptError, match=f"at most {SEALED_BYTES}"):
            await read_sealed(store, "registry/term.json", TermRecord)


@pytest.mark.parametrize(("size", "allowed"), around(4000))
async def test_the_size_of_a_manifest(size, allowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a smaller limit than 64 MiB, to be quick."""
    monkeypatch.setattr(storage.checkpoints, "MANIFEST_BYTES", 4000)
    store = open_store(str(tmp_path))
    data = Manifest("s", "n", "0" * 64, 3, []).to_bytes()
    data += b" " * (size - len(data))
    key = manifest_key(PREFIX, 3, digest_of(data))
    await store.put(key, data)
    if allowed:
        assert (await read_manifest(store, PREFIX, key, digest_of(data))).step == 3
    else:
        with pytest.raises(CorruptError, match="at most 4000"):
            await read_manifest(store, PREFIX, key, digest_of(data))


@pytest.mark.parametrize(("count", "allowed"), around(MANIFEST_PARTS))
def test_the_parts_of_a_manifest(count, allowed):
    data = Manifest("s", "n", "0" * 64, 3, [Part("v", "d", 1)] * count).to_bytes()
    if allowed:
        assert len(decode_manifest(data, key="m").parts) == count
    else:
        with pytest.raises(CorruptError, match=f"length <= {MANIFEST_PARTS}"):
            decode_manifest(data, key="m")


@pytest.mark.parametrize("inside", [b"[" * 200_000, b'{"a":' * 200_000, b'"\xff"', b"1" * 6000, b'"\\ud800"', b""])
def test_records_and_manifests_that_are_none(inside):
    for data in (inside, b'{"sha256":"x","body":' + inside, b'{"session":' + inside):
        with pytest.raises(CorruptError):
            unseal(data, TermRecord, key="registry/term.json")
        with pytest.raises(CorruptError):
            decode_manifest(data, key="m")


# ---------------------------------------------------------------- safetensors


def part(header: dict[str, Any], body: bytes = b"", pad_to: int = 0) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (pad_to - len(text))
    return len(text).to_bytes(8, "little") + text + body


def info(shape: list[int], size: int = 0, start: int = 0, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def checks(data: bytes, allowed: bool, cause: str) -> None:
    if allowed:
        check_tensors(data, key="part")
    else:
        with pytest.raises(CorruptError, match=cause):
            check_tensors(data, key="part")


@pytest.mark.parametrize(("size", "allowed"), around(PART_HEADER_BYTES))
def test_the_size_of_a_header(size, allowed):
    checks(part({"a": info([1], 1)}, b"x", pad_to=size), allowed, f"header of {size} bytes")


@pytest.mark.parametrize(("count", "allowed"), around(PART_TENSORS))
def test_the_number_of_tensors(count, allowed):
    empty = json.dumps(info([0]))
    text = "{" + ",".join(f'"{number:x}":{empty}' for number in range(count)) + "}"
    checks(len(text).to_bytes(8, "little") + text.encode(), allowed, f"{count} tensors, at most {PART_TENSORS}")


@pytest.mark.parametrize(("size", "allowed"), around(TENSOR_NAME_CHARS))
def test_the_length_of_a_tensors_name(size, allowed):
    checks(part({"n" * size: info([0])}), allowed, "tensor 'nnn")


@pytest.mark.parametrize(("dims", "allowed"), around(TENSOR_DIMS))
def test_the_dimensions_of_a_tensor(dims, allowed):
    checks(part({"a": info([1] * dims, 1)}, b"x"), allowed, "has the shape")


@pytest.mark.parametrize(("extent", "allowed"), around(TENSOR_EXTENT))
def test_the_extents_of_a_tensor(extent, allowed):
    checks(part({"a": info([extent, 0])}), allowed, "has the shape")


def test_an_empty_tensor_hides_no_extents():
    checks(part({"a": info([1 << 20, 1 << 20, 0])}), True, "")
    checks(part({"a": info([1 << 20, (1 << 20) + 1, 0])}), False, "has the shape")


def test_a_claim_of_a_terabyte_makes_nothing_large():
    claims = [
        (1 << 40).to_bytes(8, "little") + b"{}",
        b"\xff" * 8 + b"{}",
        part({"a": info([1 << 40], 1 << 40)}),
        part({"a": {"dtype": "F64", "shape": [1 << 37], "data_offsets": [0, 1 << 40]}}, b"x" * 100),
    ]
    tracemalloc.start()
    try:
        for claim in claims:
            with pytest.raises(CorruptError):
                check_tensors(claim, key="part")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_where_the_limits_are():
    """One place: no module has a number of its own."""
    assert storage.tensors.PART_TENSORS is PART_TENSORS
    assert storage.sealed.SEALED_BYTES is SEALED_BYTES
    assert msgspec.json.schema(Manifest)["$defs"]["Manifest"]["properties"]["parts"]["maxItems"] == MANIFEST_PARTS
