"""Tokenizers: char, bytes, and byte-level BPE trained by Hugging Face `tokenizers`.

A tokenizer is stored as canonical JSON that holds its vocabulary and nothing else: the machinery around it is built
here anew, so equal bytes mean equal ids in every process, and a stored tokenizer can configure nothing. Special tokens
are one id each, are stored, and are found in a text before anything else.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import tokenizers as hf
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from pnode.data.corpus import DataError
from pnode.data.limits import MERGES, SPECIAL_TOKEN_CHARS, SPECIAL_TOKENS, TOKENIZER_BYTES, VOCAB

CHUNK = 1 << 18

Ids = NDArray[np.uint32]
Step = Callable[[int, int], None]


class Tokenizer(Protocol):
    """Text to ids and back. `decode(encode(text)) == text` for every text it can encode."""

    kind: str
    special_tokens: tuple[str, ...]

    @property
    def vocab(self) -> int:
        """Number of ids: they run from 0 to vocab - 1."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises DataError for a character that it doesn't know."""

    def encode_array(self, text: str, progress: Step | None = None) -> Ids:
        """As `encode`, for a long text; may differ from it only in how it splits at its chunks."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of ids. Raises DataError for an id outside the vocabulary."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""

    def to_bytes(self) -> bytes:
        """The stored form."""


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of every tokenizer. `chars` belongs to char; `vocab` and `merges` to bpe."""

    type: str
    special_tokens: list[str]
    chars: str = ""
    vocab: list[str] = []
    merges: list[tuple[str, str]] = []
    version: int = 1


class _Base:
    kind = ""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self.special_tokens = tuple(special_tokens)
        if len(set(self.special_tokens)) != len(self.special_tokens) or "" in self.special_tokens:
            raise DataError(f"special tokens {list(special_tokens)[:8]} are empty or given twice")
        longest = max(map(len, self.special_tokens), default=0)
        if len(self.special_tokens) > SPECIAL_TOKENS or longest > SPECIAL_TOKEN_CHARS:
            raise DataError(
                f"{len(self.special_tokens)} special tokens of up to {longest} characters; at most {SPECIAL_TOKENS} of "
                f"{SPECIAL_TOKEN_CHARS} are allowed"
            )
        in_order = sorted(self.special_tokens, key=len, reverse=True)
        self._splitter = re.compile("|".join(f"({re.escape(token)})" for token in in_order)) if in_order else None
        self._special_ids: dict[str, int] = {}

    def _pieces(self, text: str) -> Iterable[tuple[str, int | None]]:
        """(ordinary text, None) and (special token, its id), in order."""
        start = 0
        for match in self._splitter.finditer(text) if self._splitter else ():
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], self._special_ids[match[0]]
            start = match.end()
        if start < len(text):
            yield text[start:], None

    def _plain(self, text: str) -> Ids:
        raise NotImplementedError

    def encode_array(self, text: str, progress: Step | None = None) -> Ids:
        """See Tokenizer."""
        parts = [
            self._plain(piece) if special is None else np.array([special], np.uint32)
            for piece, special in self._pieces(text)
        ]
        if progress:
            progress(len(text), len(text))
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return [int(number) for number in self.encode_array(text)]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """See Tokenizer."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _stored(self) -> Stored:
        return Stored(self.kind, list(self.special_tokens))

    def to_bytes(self) -> bytes:
        """See Tokenizer."""
        return json.dumps(
            msgspec.to_builtins(self._stored()), sort_keys=True, ensure_ascii=False, separators=(",", ":")
        ).encode()


def _look_up(table: Sequence[bytes], ids: Sequence[int]) -> bytes:
    for number in ids:
        if not 0 <= number < len(table):
            raise DataError(f"id {number} is outside the vocabulary of {len(table)}")
    return b"".join(table[number] for number in ids)


class CharTokenizer(_Base):
    """One id per character, in order of code points; then the special tokens."""

    kind = "char"

    def __init__(self, chars: str, special_tokens: Sequence[str] = ()) -> None:
        super().__init__(special_tokens)
        if list(chars) != sorted(set(chars)):
            raise DataError("the characters of a char tokenizer are not distinct and ascending")
        self._chars = chars
        self._special_ids = {token: len(chars) + index for index, token in enumerate(self.special_tokens)}
        self._table = [char.encode() for char in chars] + [token.encode() for token in self.special_tokens]
        self._codes = np.array([ord(char) for char in chars], np.uint32)

    @classmethod
    def of(cls, text: str, special_tokens: Sequence[str] = ()) -> CharTokenizer:
        """The tokenizer of all characters of `text`."""
        for token in special_tokens:
            text = text.replace(token, "")
        return cls("".join(sorted(set(text))), special_tokens)

    @property
    def vocab(self) -> int:
        """See Tokenizer."""
        return len(self._table)

    def _plain(self, text: str) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        if not len(self._codes):
            raise DataError(f"the character {text[0]!r} is not in the vocabulary, which has none")
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1).astype(np.uint32)
        unknown = np.nonzero(self._codes[places] != codes)[0]
        if len(unknown):
            char = text[int(unknown[0])]
            raise DataError(
                f"the character {char!r} (position {int(unknown[0])}) is not among the {len(self._chars)} that the "
                "network knows",
                hint="char tokenizers know what was in their text; bytes and bpe know every character",
            )
        return places

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """See Tokenizer."""
        return _look_up(self._table, ids)

    def _stored(self) -> Stored:
        return Stored(self.kind, list(self.special_tokens), chars=self._chars)


class BytesTokenizer(_Base):
    """One id per byte of UTF-8; then the special tokens."""

    kind = "bytes"

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        super().__init__(special_tokens)
        self._special_ids = {token: 256 + index for index, token in enumerate(self.special_tokens)}
        self._table = [bytes([byte]) for byte in range(256)] + [token.encode() for token in self.special_tokens]

    @property
    def vocab(self) -> int:
        """See Tokenizer."""
        return len(self._table)

    def _plain(self, text: str) -> Ids:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """See Tokenizer."""
        return _look_up(self._table, ids)


class BpeTokenizer(_Base):
    """Byte-level BPE with GPT-2's pre-tokenizer. Special tokens have the first ids."""

    kind = "bpe"

    def __init__(self, vocab: Sequence[str], merges: Sequence[tuple[str, str]], special_tokens: Sequence[str]) -> None:
        super().__init__(special_tokens)
        self._vocab, self._merges = list(vocab), [(left, right) for left, right in merges]
        ids = {token: index for index, token in enumerate(self._vocab)}
        if len(ids) != len(self._vocab):
            raise DataError("a token is twice in the vocabulary")
        if list(self.special_tokens) != self._vocab[: len(self.special_tokens)]:
            raise DataError("the special tokens are not the first of the vocabulary")
        self._special_ids = {token: ids[token] for token in self.special_tokens}
        self._table = [token.encode() for token in self.special_tokens]
        for token in self._vocab[len(self.special_tokens) :]:
            if not token or not all(char in BYTE_OF for char in token):
                raise DataError(f"token {token[:40]!r} is not made of byte letters")
            self._table.append(bytes(BYTE_OF[char] for char in token))
        known = set(self._vocab)
        for left, right in self._merges:
            if not {left, right, left + right} <= known:
                raise DataError(f"merge {left[:20]!r} + {right[:20]!r} is not in the vocabulary")
        if not known >= set(BYTE_OF):
            raise DataError("a byte is missing from the vocabulary")
        self._hf = hf.Tokenizer(models.BPE(vocab=ids, merges=self._merges))
        _dress(self._hf)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), progress: Step | None = None
    ) -> BpeTokenizer:
        """Learn the merges from texts, in which special tokens do not count."""
        if vocab_size < 256 + len(special_tokens):
            raise DataError(f"vocab_size {vocab_size} is below 256 bytes + {len(special_tokens)} special tokens")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(special_tokens), show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )  # fmt: skip
        split = _Base(special_tokens)
        split._special_ids = dict.fromkeys(special_tokens, 0)
        fresh = hf.Tokenizer(models.BPE())
        _dress(fresh)
        chunks = [piece for text in texts for piece, special in split._pieces(text) if special is None]

        def feed() -> Iterable[str]:
            for index, chunk in enumerate(chunks):
                if progress:
                    progress(index, len(chunks))
                yield chunk

        fresh.train_from_iterator(feed(), trainer)
        model = json.loads(fresh.to_str())["model"]
        vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return cls(vocab, [_pair(merge) for merge in model["merges"]], special_tokens)

    @property
    def vocab(self) -> int:
        """See Tokenizer."""
        return len(self._vocab)

    def _plain(self, text: str) -> Ids:
        _utf8(text)
        found = [np.array(encoding.ids, np.uint32) for encoding in self._hf.encode_batch_fast(list(chunks_of(text)))]
        return np.concatenate(found) if found else np.zeros(0, np.uint32)

    def encode_array(self, text: str, progress: Step | None = None) -> Ids:
        """See Tokenizer."""
        parts: list[Ids] = []
        done = 0
        for piece, special in self._pieces(text):
            for chunk in chunks_of(piece) if special is None else (piece,):
                parts.append(self._plain(chunk) if special is None else np.array([special], np.uint32))
                done += len(chunk)
                if progress:
                    progress(done, len(text))
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """See Tokenizer."""
        return _look_up(self._table, ids)

    def _stored(self) -> Stored:
        return Stored(self.kind, list(self.special_tokens), vocab=self._vocab, merges=self._merges)


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _dress(tokenizer: hf.Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text holds half of a surrogate pair at character {error.start}") from error


def chunks_of(text: str) -> Iterable[str]:
    """`text` in pieces of about CHUNK characters, cut after line ends where there are any."""
    start = 0
    while start < len(text):
        end = min(start + CHUNK, len(text))
        if end < len(text):
            line = text.rfind("\n", start, end) + 1
            end = line if line > start else end
        yield text[start:end]
        start = end


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one letter (Radford et al. 2019, GPT-2): itself if printable, else 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_letters()


def tokenizer_from_bytes(data: bytes) -> Tokenizer:
    """The tokenizer of its stored form. Raises DataError for anything else."""
    if len(data) > TOKENIZER_BYTES:
        raise DataError(f"a stored tokenizer has {len(data)} bytes, at most {TOKENIZER_BYTES} are allowed")
    try:
        stored = msgspec.json.decode(data, type=Stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"these bytes are no tokenizer: {error}") from error
    if stored.version != 1:
        raise DataError(f"a tokenizer of version {stored.version} can't be read; this program reads version 1")
    if len(stored.vocab) + len(stored.chars) > VOCAB or len(stored.merges) > MERGES:
        raise DataError(
            f"a tokenizer of {len(stored.vocab) + len(stored.chars)} tokens and {len(stored.merges)} merges; at most "
            f"{VOCAB} and {MERGES} are allowed"
        )
    match stored.type:
        case "char":
            return CharTokenizer(stored.chars, stored.special_tokens)
        case "bytes":
            return BytesTokenizer(stored.special_tokens)
        case "bpe":
            return BpeTokenizer(stored.vocab, stored.merges, stored.special_tokens)
        case kind:
            raise DataError(f"there is no tokenizer of the kind {kind[:40]!r}")


def digest_of_tokenizer(data: bytes) -> str:
    """The digest that names a stored tokenizer."""
    return hashlib.sha256(data).hexdigest()


class StreamDecoder:
    """Text from ids that come one by one; bytes of a character that isn't whole yet are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)
