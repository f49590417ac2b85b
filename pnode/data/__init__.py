"""Data: from texts and data sets to batches.

`pack` runs once on the client; `open_source` gives batches on every PNode that needs them; `tokenizer_from_bytes` opens
the tokenizer of a network. What needs torch is imported when it is first asked for: a client that only wants a
tokenizer does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pnode.data.corpus import DataError
from pnode.data.packing import Packed, pack
from pnode.data.tokenizers import StreamDecoder, Tokenizer, tokenizer_from_bytes

if TYPE_CHECKING:
    from pnode.data.source import IGNORE, BatchSource, open_source

__all__ = [
    "IGNORE",
    "BatchSource",
    "DataError",
    "Packed",
    "StreamDecoder",
    "Tokenizer",
    "open_source",
    "pack",
    "tokenizer_from_bytes",
]


def __getattr__(name: str) -> Any:
    if name in ("IGNORE", "BatchSource", "open_source"):
        from pnode.data import source

        return getattr(source, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
