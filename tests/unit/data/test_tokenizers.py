"""Tokenizers: nothing is lost on the way there and back, also in a new process; special tokens stay one id."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers

from pnode.data import DataError, StreamDecoder, Tokenizer, tokenizer_from_bytes
from pnode.data.tokenizers import BYTE_OF, BpeTokenizer, BytesTokenizer, CharTokenizer, digest_of_tokenizer
from tests.unit.data.conftest import TEXT

SPECIAL = ("<SEP>", "<|endoftext|>")
BPE = BpeTokenizer.train([TEXT], 400, SPECIAL)
ALL: list[Tokenizer] = [CharTokenizer.of(TEXT + " \n", SPECIAL), BytesTokenizer(SPECIAL), BPE]


def thousand_lines() -> list[str]:
    """Emoji with modifiers, leading spaces, empty lines, tabs, special tokens, other scripts."""
    shapes = [
        "", " ", "   leading {n}", "\tтабуляция {n}", "emoji 👩\u200d👩\u200d👧 🏳️\u200d🌈 {n} 😀", "a<SEP>b{n}<SEP>",
        "<SEP>", "<|endoftext|> <SEP> ", "日本語 {n} \u05e2\u05d1", "trailing {n}  ", "\u0301combining\u200b {n}",
        "\x00\x1b[31m{n}", "don't  stop\r\n{n}", "{n}" * 5,
    ]  # fmt: skip
    return [shapes[n % len(shapes)].replace("{n}", str(n)) for n in range(1000)]


@pytest.mark.parametrize("tokenizer", ALL[1:], ids=["bytes", "bpe"])
def test_a_thousand_lines_in_a_new_process(tokenizer: Tokenizer) -> None:
    """Trained here, saved, loaded there: the same ids and the same bytes."""
    lines = thousand_lines()
    ids = [tokenizer.encode(line) for line in lines]
    program = (
        "import json, sys; from pnode.data import tokenizer_from_bytes\n"
        "given = json.loads(sys.stdin.read()); t = tokenizer_from_bytes(given['tokenizer'].encode())\n"
        "ids = [t.encode(line) for line in given['lines']]\n"
        "print(json.dumps([ids, [t.decode_bytes(i).hex() for i in ids], t.to_bytes().decode()]))"
    )
    given_ = json.dumps({"tokenizer": tokenizer.to_bytes().decode(), "lines": lines})
    done = subprocess.run([sys.executable, "-c", program], input=given_, capture_output=True, text=True, check=True)
    there, decoded, again = json.loads(done.stdout)
    assert there == ids
    assert decoded == [line.encode().hex() for line in lines]
    assert again.encode() == tokenizer.to_bytes()


@pytest.mark.parametrize("tokenizer", ALL, ids=["char", "bytes", "bpe"])
def test_special_tokens_are_one_id_before_and_after_saving(tokenizer: Tokenizer) -> None:
    loaded = tokenizer_from_bytes(tokenizer.to_bytes())
    for one in (tokenizer, loaded):
        assert one.special_tokens == SPECIAL
        separator, end = (one.encode(token) for token in SPECIAL)
        assert len(separator) == len(end) == 1
        assert one.encode("fox<SEP>fox") == [*one.encode("fox"), *separator, *one.encode("fox")]
        assert one.decode([*separator, *end]) == "<SEP><|endoftext|>"
        assert max(*separator, *end) < one.vocab
    assert loaded.to_bytes() == tokenizer.to_bytes()
    assert loaded.vocab == tokenizer.vocab


@pytest.mark.parametrize("tokenizer", ALL, ids=["char", "bytes", "bpe"])
def test_long_texts_come_back(tokenizer: Tokenizer) -> None:
    text = TEXT * 40
    ids = tokenizer.encode_array(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.max() < tokenizer.vocab


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in ALL[1:]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, BPE.vocab - 1), max_size=30))
@settings(max_examples=100, deadline=None)
def test_streaming_gives_what_decoding_at_once_gives(ids: list[int]) -> None:
    stream = StreamDecoder(BPE)
    assert "".join(stream.feed([number]) for number in ids) + stream.finish() == BPE.decode(ids)


def test_half_a_character_is_held_back() -> None:
    tokenizer = BytesTokenizer()
    stream = StreamDecoder(tokenizer)
    assert [stream.feed([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.feed([0xF0]) == ""
    assert stream.finish() == "\ufffd"


def test_training_is_repeatable() -> None:
    again = BpeTokenizer.train([TEXT], 400, SPECIAL)
    assert again.to_bytes() == BPE.to_bytes()
    assert digest_of_tokenizer(again.to_bytes()) == hashlib.sha256(BPE.to_bytes()).hexdigest()


def test_ids_equal_those_of_hugging_face_itself() -> None:
    """An own Hugging Face tokenizer of the same vocabulary gives the same ids and text."""
    stored = json.loads(BPE.to_bytes())
    theirs = HuggingFace(
        models.BPE(
            vocab={token: index for index, token in enumerate(stored["vocab"])},
            merges=[tuple(merge) for merge in stored["merges"]],
        )
    )
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens(list(SPECIAL))
    for line in thousand_lines():
        assert BPE.encode(line) == theirs.encode(line, add_special_tokens=False).ids
    ids = BPE.encode(TEXT)
    assert theirs.decode(ids, skip_special_tokens=False) == BPE.decode(ids)


def test_byte_letters_are_those_of_hugging_face() -> None:
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(DataError, match="'☃'"):
        CharTokenizer.of("abc").encode("ab☃")
    with pytest.raises(DataError, match="'a'"):
        CharTokenizer.of("").encode("a")
    with pytest.raises(DataError, match="surrogate"):
        BPE.encode("\ud800")
    assert CharTokenizer.of("cab").encode("abc") == [0, 1, 2]


def test_an_id_outside_is_refused() -> None:
    for tokenizer in ALL:
        for bad in (-1, tokenizer.vocab, 10**9):
            with pytest.raises(DataError, match="outside"):
                tokenizer.decode([bad])


BAD = [
    b"", b"{}", b"[]", b"\x80\x04.", b'{"type":"char"}', b'{"type":"nope","special_tokens":[]}',
    b'{"type":"char","chars":"ba","special_tokens":[]}', b'{"type":"char","chars":"aa","special_tokens":[]}',
    b'{"type":"char","chars":"a","special_tokens":["x","x"]}', b'{"type":"char","chars":"a","special_tokens":[""]}',
    b'{"type":"bpe","vocab":["a"],"special_tokens":[]}', b'{"type":"bytes","special_tokens":[],"version":2}',
    b'{"type":"bytes","special_tokens":[],"pre_tokenizer":{}}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_bytes_that_are_no_tokenizer(data: bytes) -> None:
    with pytest.raises(DataError):
        tokenizer_from_bytes(data)


def test_a_tampered_bpe_is_refused() -> None:
    stored = json.loads(BPE.to_bytes())
    for change in (
        {"merges": [["zz", "qq"], *stored["merges"]]},
        {"vocab": stored["vocab"][:-1]},
        {"vocab": [*stored["vocab"], stored["vocab"][5]]},
        {"vocab": [*stored["vocab"], "日"]},
        {"special_tokens": ["<OTHER>"]},
    ):
        with pytest.raises(DataError):
            tokenizer_from_bytes(json.dumps(stored | change).encode())
