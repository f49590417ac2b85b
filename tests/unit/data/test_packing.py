"""Packing: order, digests, cache, and bad inputs, each named."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from networks.recipe import DataRecipe
from pnode.data import DataError, Packed, pack, tokenizer_from_bytes
from pnode.data.corpus import read_corpus
from pnode.data.packed import encode_packed, open_packed
from tests.unit.data.conftest import TEXT
from wire.errors import BadFileError


def tokens_of(packed: Packed, split: str) -> list[int]:
    return open_packed(packed.path).arrays[f"{split}.tokens"].tolist()


def test_a_text_is_split_by_characters_and_comes_back(text_file: Path, tmp_path: Path) -> None:
    packed = pack(DataRecipe(text=str(text_file), split=0.9), cache_dir=tmp_path / "cache")
    assert packed.vocab == len(set(TEXT))
    assert packed.tokenizer_bytes
    tokenizer = tokenizer_from_bytes(packed.tokenizer_bytes)
    cut = int(len(TEXT) * 0.9)
    assert tokenizer.decode(tokens_of(packed, "train")) == TEXT[:cut]
    assert tokenizer.decode(tokens_of(packed, "val")) == TEXT[cut:]
    assert len(tokens_of(packed, "train")) == cut
    assert packed.size_bytes == packed.path.stat().st_size
    header = open_packed(packed.path).header
    assert (header.kind, header.vocab, header.tokenizer_digest) == ("tokens", packed.vocab, packed.tokenizer_digest)


@pytest.mark.parametrize("kind", ["char", "bytes", "bpe"])
def test_the_cache_gives_the_same_without_packing(
    text_file: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = DataRecipe.model_validate(
        {"text": str(text_file), "tokenizer": kind, "special_tokens": ("<SEP>",)}
        | ({"vocab_size": 300} if kind == "bpe" else {})
    )
    seen: list[tuple[str, int, int]] = []
    first = pack(recipe, cache_dir=tmp_path / "a", progress=lambda *step: seen.append(step))
    assert {what for what, _, _ in seen} >= {"read", "encode"}
    assert all(0 <= done <= of for _, done, of in seen)
    other = pack(recipe, cache_dir=tmp_path / "b")
    assert (other.digest, other.tokenizer_bytes) == (first.digest, first.tokenizer_bytes)
    first.path.write_bytes(b"damaged")
    assert pack(recipe, cache_dir=tmp_path / "a") == first
    monkeypatch.setattr("pnode.data.packing.encode_packed", None)
    assert pack(recipe, cache_dir=tmp_path / "a") == first
    monkeypatch.undo()
    text_file.write_text(TEXT + "more", newline="")
    assert pack(recipe, cache_dir=tmp_path / "a").digest != first.digest


def test_the_standard_library_is_packed_in_order_and_repeatably(tmp_path: Path) -> None:
    first = read_corpus("python-stdlib", limit_bytes=None)
    assert first == read_corpus("python-stdlib", limit_bytes=None)
    assert 900_000 < len(first.text) <= 1_000_000
    assert first.text.isascii()
    assert first.text.endswith("\n")
    assert "1,000,000 bytes" in first.info or "bytes (limited)" in first.info
    assert first.digest[:12] in first.info
    import __future__ as begins

    assert first.text.startswith(Path(str(begins.__file__)).read_text())
    longer = read_corpus("python-stdlib", limit_bytes=3_000_000)
    assert longer.text.startswith(first.text)
    assert "lib2to3" not in longer.info
    packed = pack(DataRecipe(text="python-stdlib", limit_bytes=20_000), cache_dir=tmp_path)
    assert packed.vocab
    assert packed.vocab <= 100


def test_a_folder_in_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, data in {
        "b.txt": b"b", "a/z.txt": b"az\n", "a.txt": b"a", ".hidden": b"h", ".git/x": b"g", "bin": b"\xff\xfe",
        "nul": b"\0",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "link.txt").symlink_to(folder / "b.txt")
    os.mkfifo(folder / "pipe.txt")
    corpus = read_corpus(str(folder), limit_bytes=None)
    assert corpus.text == "a\naz\nb"
    assert "3 files" in corpus.info


def test_jsonl_and_separators(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    assert read_corpus(str(path), limit_bytes=None).text == "one\ntwo"
    special = ("<|endoftext|>",)
    assert read_corpus(str(path), limit_bytes=None, special_tokens=special).text == "one<|endoftext|>two"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "string 'text'"),
        ('{"text": 1}', "string"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=["cut", "list", "number", "surrogate", "deep"],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"x.jsonl:2: .*{says}"):
        read_corpus(str(path), limit_bytes=None)


def test_limits_cut_at_line_ends_and_never_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("aé\nbcd\nefg\n")
    assert read_corpus(str(path), limit_bytes=9).text == "aé\nbcd\n"
    path.write_text("é" * 10)
    assert read_corpus(str(path), limit_bytes=7).text == "ééé"
    assert read_corpus(str(path), limit_bytes=100).text == "é" * 10


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    ids = (np.arange(1000) % 50257).astype("<u2")
    path.write_bytes(ids.tobytes())
    packed = pack(DataRecipe(text=str(path), split=0.75), cache_dir=tmp_path / "c")
    assert (packed.vocab, packed.tokenizer_bytes, packed.tokenizer_digest) == (1000, None, "")
    assert tokens_of(packed, "train") == list(range(750))
    assert tokens_of(packed, "val") == list(range(750, 1000))
    assert pack(DataRecipe(text=str(path), split=0.75), cache_dir=tmp_path / "c") == packed
    with pytest.raises(DataError, match="tokens already"):
        pack(DataRecipe(text=str(path), tokenizer="char"), cache_dir=tmp_path / "c")
    path.write_bytes(b"odd")
    with pytest.raises(DataError, match="3 bytes"):
        pack(DataRecipe(text=str(path)), cache_dir=tmp_path / "c")


def test_texts_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, says in {
        "latin.txt": "byte 3 is not UTF-8", "empty.txt": "no text", "folder": "no text", "pipe": "neither a file",
        "absent": "python-stdlib", "nul\0": "null byte",
    }.items():  # fmt: skip
        with pytest.raises(BadFileError, match=says) as caught:
            pack(DataRecipe(text=str(tmp_path / name)), cache_dir=tmp_path / "c")
        assert caught.value.exit_code == 65
    with pytest.raises(DataError, match="absent"):
        pack(DataRecipe(text=str(tmp_path / "absent.bin")), cache_dir=tmp_path / "c")


def test_digits(tmp_path: Path) -> None:
    packed = pack(DataRecipe(dataset="digits", split=0.8), cache_dir=tmp_path)
    again = pack(DataRecipe(dataset="digits", split=0.8), cache_dir=tmp_path)
    assert packed == again
    assert packed.vocab is None
    arrays = open_packed(packed.path).arrays
    train, held_out = arrays["train.ids"], arrays["val.ids"]
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(1797))
    assert arrays["train.features"].shape == (len(train), 64)
    assert (arrays["train.features"].min(), arrays["train.features"].max()) == (0.0, 1.0)
    shares = np.bincount(arrays["train.targets"]) / np.bincount(
        np.concatenate([arrays["train.targets"], arrays["val.targets"]])
    )
    assert np.all((shares > 0.79) & (shares <= 0.8))
    assert "stratified" in packed.info
    from sklearn.datasets import load_digits

    features, targets = load_digits(return_X_y=True)
    assert np.array_equal(arrays["val.features"] * 16, features[held_out])
    assert np.array_equal(arrays["val.targets"], targets[held_out])


def test_digits_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'dcnr\[digits\]'"):
        pack(DataRecipe(dataset="digits"), cache_dir=tmp_path)


def good() -> bytes:
    tokens = np.arange(100, dtype=np.uint16)
    return b"".join(encode_packed("tokens", 100, {"train.tokens": tokens[:90], "val.tokens": tokens[90:]}))


def with_header(change: dict[str, object], *, whole: bytes | None = None) -> bytes:
    data = whole or good()
    length = struct.unpack("<Q", data[8:16])[0]
    header = json.loads(data[16 : 16 + length])
    body = data[-(-(16 + length) // 64) * 64 :]
    for name, value in change.items():
        place = header
        *path, last = name.split("/")
        for part in path:
            place = place[part]
        place[last] = value
    raw = json.dumps(header).encode()
    return b"DCNRDATA" + struct.pack("<Q", len(raw)) + raw + bytes(-(16 + len(raw)) % 64) + body


BAD = {
    "empty": b"",
    "short": b"DCNRDATA",
    "pickle": b"\x80\x04." * 30,
    "other magic": b"DCNRDATX" + good()[8:],
    "huge header": b"DCNRDATA" + struct.pack("<Q", 1 << 60) + b"{}",
    "cut": good()[:-1],
    "more": good() + b"x",
    "no JSON": b"DCNRDATA" + struct.pack("<Q", 4) + b"nope" + bytes(48),
    "version": with_header({"version": 2}),
    "unknown field": with_header({"code": "x"}),
    "kind": with_header({"kind": "images"}),
    "dtype": with_header({"arrays/val.tokens/dtype": "object"}),
    "float tokens": with_header({"arrays/val.tokens/dtype": "float32", "arrays/val.tokens/shape": [5]}),
    "negative": with_header({"arrays/val.tokens/shape": [-10]}),
    "beyond": with_header({"arrays/val.tokens/shape": [1 << 40]}),
    "overlap": with_header({"arrays/val.tokens/offset": 0}),
    "two dimensions": with_header({"arrays/val.tokens/shape": [2, 5]}),
    "outside the vocabulary": with_header({"vocab": 99}),
    "missing split": b"".join(encode_packed("tokens", 9, {"train.tokens": np.zeros(3, np.uint16)})),
    "targets do not match": b"".join(
        encode_packed(
            "samples", 9,
            {f"{split}.{name}": np.zeros(3 if name != "ids" else 2, np.float32 if name == "features" else np.int64)
             for split in ("train", "val") for name in ("features", "targets", "ids")},
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_packed_data_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        open_packed(BAD[case])
    path = tmp_path / "bad.data"
    path.write_bytes(BAD[case])
    with pytest.raises(DataError, match=r"bad\.data"):
        open_packed(path)


def test_the_unchanged_header_is_read(tmp_path: Path) -> None:
    assert open_packed(with_header({})).header == open_packed(good()).header
    with pytest.raises(DataError, match="absent"):
        open_packed(tmp_path / "absent")
