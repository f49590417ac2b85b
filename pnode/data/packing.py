"""Packing: once, on the client, a text or data set becomes one blob of tokens or samples, and a tokenizer.

The same inputs and recipe give the same bytes, so what was packed before is found in the cache by the digest of both.
A text is split into its first share for training and the rest for validation (by characters, before tokenizing, so
that no token spans the border); the vocabulary of `char` is that of the whole text, `bpe` learns from the training
share only. `random` or `shuffle` then draw from it (see samplers).
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pnode.data.corpus import DataError, read_corpus
from pnode.data.digits import CLASSES, digits_arrays
from pnode.data.packed import Array, encode_packed, token_dtype
from pnode.data.tokenizers import (
    BpeTokenizer,
    BytesTokenizer,
    CharTokenizer,
    Tokenizer,
    chunks_of,
    digest_of_tokenizer,
)
from storage.store import digest_of

if TYPE_CHECKING:
    from networks.recipe import DataRecipe

FORMAT = 1
"""Grows when the same inputs would be packed into other bytes; part of the cache's key."""

Progress = Callable[[str, int, int], None]
"""What is being done ("read", "learn", "encode", "write"), how much is done, of how much."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed data set in the cache. `vocab`: of its tokens; None for a data set of samples."""

    path: Path
    digest: str
    size_bytes: int
    tokenizer_bytes: bytes | None
    tokenizer_digest: str
    vocab: int | None
    info: str


class _Index(msgspec.Struct, frozen=True):
    """What the cache knows about one set of inputs."""

    digest: str
    size_bytes: int
    tokenizer_digest: str
    vocab: int | None
    info: str


def pack(recipe: DataRecipe, *, cache_dir: Path, progress: Progress | None = None) -> Packed:
    """Read, tokenize and pack the data of a recipe, or find them packed. Blocks: seconds for a few megabytes.

    Raises DataError naming the file and place of what can't be used.
    """
    tell = progress or (lambda what, done, of: None)
    tell("read", 0, 1)
    if recipe.dataset is not None:
        return _pack_digits(recipe, cache_dir)
    assert recipe.text is not None
    if Path(recipe.text).suffix == ".bin":
        return _pack_bin(recipe, Path(recipe.text).expanduser(), cache_dir)
    corpus = read_corpus(recipe.text, limit_bytes=recipe.limit_bytes, special_tokens=tuple(recipe.special_tokens))
    tell("read", 1, 1)
    kind = recipe.tokenizer or "char"
    fields: list[object] = [kind, recipe.vocab_size, list(recipe.special_tokens), recipe.split]
    key = _key(corpus.digest, fields)
    found = _cached(cache_dir, key, corpus.info)
    if found:
        return found
    cut = int(len(corpus.text) * recipe.split)
    parts = {"train": corpus.text[:cut], "val": corpus.text[cut:]}
    tokenizer = _make_tokenizer(recipe, kind, corpus.text, parts["train"], tell)
    tokenizer_bytes = tokenizer.to_bytes()
    arrays: dict[str, Array] = {}
    for split, text in parts.items():
        before = 0 if split == "train" else cut

        def report(done: int, of: int, before: int = before) -> None:
            tell("encode", before + done, len(corpus.text))

        ids = tokenizer.encode_array(text, report)
        arrays[f"{split}.tokens"] = ids.astype(token_dtype(tokenizer.vocab))
    counts = (
        f"{len(arrays['train.tokens']):,} + {len(arrays['val.tokens']):,} tokens, {kind}, vocabulary {tokenizer.vocab}"
    )
    pieces = encode_packed("tokens", tokenizer.vocab, arrays, tokenizer_digest=digest_of_tokenizer(tokenizer_bytes))
    return _keep(cache_dir, key, pieces, tokenizer_bytes, tokenizer.vocab, f"{corpus.info}; {counts}")


def _make_tokenizer(recipe: DataRecipe, kind: str, text: str, train: str, tell: Progress) -> Tokenizer:
    special = tuple(recipe.special_tokens)
    match kind:
        case "char":
            return CharTokenizer.of(text, special)
        case "bytes":
            return BytesTokenizer(special)
        case "bpe":
            size = recipe.vocab_size or 1024
            return BpeTokenizer.train(chunks_of(train), size, special, lambda done, of: tell("learn", done, of))
    raise DataError(f"there is no tokenizer {kind!r}", hint="char, bytes, bpe")


def _pack_bin(recipe: DataRecipe, path: Path, cache_dir: Path) -> Packed:
    """nanoGPT's form: uint16 ids, one after another, little-endian."""
    if recipe.tokenizer or recipe.special_tokens:
        raise DataError(f"{path} holds tokens already", hint="leave out tokenizer and special_tokens")
    try:
        size = path.stat().st_size
        if not path.is_file() or size % 2 or not size:
            raise DataError(f"{path} has {size} bytes", hint="a .bin file holds uint16 tokens, two bytes each")
        ids: Array = np.memmap(path, "<u2", mode="r")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    if recipe.limit_bytes:
        ids = ids[: max(recipe.limit_bytes // 2, 1)]
    digest = digest_of(np.ascontiguousarray(ids).tobytes())
    info = f"{path}, {len(ids):,} tokens, sha256 {digest[:12]}"
    key = _key(digest, ["bin", recipe.split])
    found = _cached(cache_dir, key, info)
    if found:
        return found
    vocab, cut = int(ids.max()) + 1, int(len(ids) * recipe.split)
    arrays = {"train.tokens": ids[:cut], "val.tokens": ids[cut:]}
    counts = f"{cut:,} + {len(ids) - cut:,} tokens, vocabulary {vocab}"
    return _keep(cache_dir, key, encode_packed("tokens", vocab, arrays), None, vocab, f"{info}; {counts}")


def _pack_digits(recipe: DataRecipe, cache_dir: Path) -> Packed:
    arrays, info = digits_arrays(recipe.split)
    digest = digest_of(b"".join(array.tobytes() for array in arrays.values()))
    key = _key(digest, ["digits", recipe.split])
    return _cached(cache_dir, key, info) or _keep(
        cache_dir, key, encode_packed("samples", CLASSES, arrays), None, None, info
    )


def _key(digest: str, fields: list[object]) -> str:
    return digest_of(json.dumps([FORMAT, digest, *fields]).encode())


def _cached(cache_dir: Path, key: str, info: str) -> Packed | None:
    """What was packed before, if it is still whole."""
    try:
        index = msgspec.json.decode((cache_dir / f"{key}.json").read_bytes(), type=_Index)
        path = cache_dir / f"{index.digest}.data"
        with open(path, "rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == index.digest
        tokenizer = (cache_dir / f"{index.tokenizer_digest}.tokenizer").read_bytes() if index.tokenizer_digest else None
    except (OSError, msgspec.MsgspecError):
        return None
    if not whole or (tokenizer is not None and digest_of_tokenizer(tokenizer) != index.tokenizer_digest):
        return None
    counts = index.info.partition("; ")[2]
    shown = f"{info.partition('; ')[0]}; {counts}"
    return Packed(path, index.digest, index.size_bytes, tokenizer, index.tokenizer_digest, index.vocab, shown)


def _keep(
    cache_dir: Path, key: str, pieces: Sequence[bytes], tokenizer: bytes | None, vocab: int | None, info: str
) -> Packed:
    """Write to the cache, the index last, each file whole or not at all."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    name = digest.hexdigest()
    tokenizer_digest = digest_of_tokenizer(tokenizer) if tokenizer is not None else ""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _write(cache_dir / f"{name}.data", pieces)
        if tokenizer is not None:
            _write(cache_dir / f"{tokenizer_digest}.tokenizer", [tokenizer])
        index = _Index(name, size, tokenizer_digest, vocab, info)
        _write(cache_dir / f"{key}.json", [msgspec.json.encode(index)])
    except OSError as error:
        raise DataError(f"{cache_dir}: {error.strerror or error}", hint="make room, or choose another home") from error
    return Packed(cache_dir / f"{name}.data", name, size, tokenizer, tokenizer_digest, vocab, info)


def _write(path: Path, pieces: Sequence[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
