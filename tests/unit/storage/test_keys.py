"""Ids, digests and keys: what is one, and that nothing else ever becomes part of a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.keys import (
    BadKeyError,
    blob_key,
    check_digest,
    check_id,
    check_key,
    check_prefix,
    manifest_key,
    network_prefix,
    session_prefix,
)
from storage.sealed import seal, unseal
from storage.store import CorruptError

BAD_IDS = [
    "../../other", "a/b", ".", "..", "%2e%2e", "a\0", "x" * 300, "x" * 64, "", "-a", "_a", "A", "а", "gpt\n", "gpt ",
    "ｇpt", "gpt.char", "~",
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_IDS, ids=range(len(BAD_IDS)))
def test_bad_ids_never_become_prefixes(value: str) -> None:
    for make in (
        check_id,
        network_prefix,
        lambda bad: session_prefix("net", bad),
        lambda bad: session_prefix(bad, "s"),
    ):
        with pytest.raises(BadKeyError):
            make(value)
    with pytest.raises(BadKeyError):
        check_digest(value)
    with pytest.raises(BadKeyError):
        blob_key(value)
    with pytest.raises(BadKeyError):
        manifest_key("networks/a/", 1, value)


@pytest.mark.parametrize("value", ["a", "0", "gpt-char", "mlp_digits-12", "x" * 63])
def test_good_ids(value: str) -> None:
    assert session_prefix(value, value) == f"networks/{value}/sessions/{value}/"
    check_key(session_prefix(value, value) + "parts/" + "a" * 64 + ".safetensors")


def test_a_long_name_is_cut_in_the_message() -> None:
    with pytest.raises(BadKeyError) as caught:
        check_id("x" * 100_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(BadKeyError) as caught:
        check_id("a\x1b[31m")
    assert "\x1b" not in str(caught.value)


@given(st.text(max_size=40))
def test_an_accepted_key_is_a_plain_relative_path(text: str) -> None:
    try:
        check_key(text)
    except BadKeyError:
        return
    assert text.isascii()
    assert text == text.lower()
    for segment in text.split("/"):
        assert segment.strip(".")
        assert ".." not in segment
    check_prefix(text)
    check_prefix(text + "/")


@given(st.from_regex(r"[a-z0-9_]{1,5}(/[a-z0-9_.-]{1,5}){0,3}", fullmatch=True), st.integers(0, 30))
def test_each_beginning_of_a_key_is_a_prefix(key: str, length: int) -> None:
    try:
        check_key(key)
    except BadKeyError:
        return
    check_prefix(key[:length])


def test_sealed_objects() -> None:
    data = seal({"term": 3, "text": "é"})
    assert unseal(data, dict, key="k") == {"term": 3, "text": "é"}
    for start in range(len(data) - 1):
        damaged = bytearray(data)
        damaged[start] ^= 1
        with pytest.raises(CorruptError, match="k is corrupt"):
            unseal(bytes(damaged), dict, key="k")
    for bad in (b"", b"{}", b"null", b"\x80\x04.", b"[" * 100_000):
        with pytest.raises(CorruptError):
            unseal(bad, dict, key="k")
    with pytest.raises(CorruptError):
        unseal(seal({"term": "three"}), dict[str, int], key="k")
