"""Every limit of data sets and tokenizers, in one place, each with its reason."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

TEXT_BYTES = 2 * GIB
"""A text that is packed in memory; larger data come as a .bin of tokens."""

LINE_BYTES = 64 * MIB
"""One line of a .jsonl: one document."""

PACKED_HEADER_BYTES = MIB
"""A packed data set has at most six arrays."""

TOKENIZER_BYTES = 64 * MIB
VOCAB = 1_000_000
"""Tokens of a stored tokenizer; the largest in use have 256,000."""

MERGES = VOCAB
"""A merge makes a token, so there are never more of them."""

SPECIAL_TOKENS = 1024
SPECIAL_TOKEN_CHARS = 256
"""Each is looked for at every place of a text."""
