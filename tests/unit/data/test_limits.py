"""Limits of data sets and tokenizers: one below, at, one above."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pnode.data.corpus
import pnode.data.packed
import pnode.data.tokenizers
from pnode.data.corpus import DataError, read_corpus
from pnode.data.limits import SPECIAL_TOKEN_CHARS, SPECIAL_TOKENS
from pnode.data.packed import MAGIC, open_packed
from pnode.data.tokenizers import BytesTokenizer, tokenizer_from_bytes


def around(limit: int) -> list[tuple[int, bool]]:
    """(size, whether it is allowed)."""
    return [(limit - 1, True), (limit, True), (limit + 1, False)]


def stored(**changed: Any) -> bytes:
    return json.dumps({"type": "bytes", "special_tokens": [], **changed}).encode()


@pytest.mark.parametrize(("size", "allowed"), around(1000))
def test_the_size_of_a_tokenizer(size, allowed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pnode.data.tokenizers, "TOKENIZER_BYTES", 1000)
    data = stored() + b" " * (size - len(stored()))
    if allowed:
        assert tokenizer_from_bytes(data).vocab == 256
    else:
        with pytest.raises(DataError, match="at most 1000"):
            tokenizer_from_bytes(data)


@pytest.mark.parametrize(("count", "allowed"), around(100))
def test_the_tokens_of_a_tokenizer(count, allowed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pnode.data.tokenizers, "VOCAB", 100)
    chars = "".join(chr(0x4E00 + number) for number in range(count))
    if allowed:
        assert tokenizer_from_bytes(stored(type="char", chars=chars)).vocab == count
    else:
        for data in (stored(type="char", chars=chars), stored(type="bpe", vocab=["a"] * count)):
            with pytest.raises(DataError, match="101 tokens"):
                tokenizer_from_bytes(data)


@pytest.mark.parametrize(("count", "allowed"), around(100))
def test_the_merges_of_a_tokenizer(count, allowed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pnode.data.tokenizers, "MERGES", 100)
    with pytest.raises(DataError, match="is not in the vocabulary" if allowed else "101 merges"):
        tokenizer_from_bytes(stored(type="bpe", vocab=["a"], merges=[["a", "a"]] * count))


@pytest.mark.parametrize(("count", "allowed"), around(SPECIAL_TOKENS))
def test_the_number_of_special_tokens(count, allowed):
    tokens = [f"<{number}>" for number in range(count)]
    if allowed:
        assert tokenizer_from_bytes(stored(special_tokens=tokens)).vocab == 256 + count
    else:
        with pytest.raises(DataError, match="1025 special tokens"):
            tokenizer_from_bytes(stored(special_tokens=tokens))


@pytest.mark.parametrize(("size", "allowed"), around(SPECIAL_TOKEN_CHARS))
def test_the_length_of_special_tokens(size, allowed):
    if allowed:
        assert BytesTokenizer(["s" * size]).vocab == 257
    else:
        with pytest.raises(DataError, match="257 characters"):
            BytesTokenizer(["s" * size])


@pytest.mark.parametrize(("size", "allowed"), around(1000))
def test_the_length_of_a_line_of_json(size, allowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Counted with its end; what is longer is never held."""
    monkeypatch.setattr(pnode.data.corpus, "LINE_BYTES", 1000)
    line = '{"text": ""}\n'
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "first"}\n' + line.replace('""', '"' + "x" * (size - len(line)) + '"'))
    if allowed:
        assert read_corpus(str(path), limit_bytes=None).text.startswith("first")
    else:
        with pytest.raises(DataError, match=r"x\.jsonl:2: a line of more than 1000 bytes"):
            read_corpus(str(path), limit_bytes=None)


@pytest.mark.parametrize(("size", "allowed"), around(500))
def test_the_header_of_packed_data(size, allowed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pnode.data.packed, "PACKED_HEADER_BYTES", 500)
    data = MAGIC + size.to_bytes(8, "little") + b"{}" + b" " * (size - 2)
    with pytest.raises(DataError, match="bad header" if allowed else "at most 500"):
        open_packed(data)


def test_a_claim_of_a_terabyte_makes_nothing_large():
    with pytest.raises(DataError, match="at most"):
        open_packed(MAGIC + (1 << 40).to_bytes(8, "little") + b"{}")
