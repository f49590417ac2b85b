"""Data: from texts and data sets to batches.

`pack` runs once on the client; `open_source` gives batches on every PNode that needs them; `tokenizer_from_bytes` opens
the tokenizer of a network.
"""

from pnode.data.corpus import DataError
from pnode.data.packing import Packed, pack
from pnode.data.source import IGNORE, BatchSource, open_source
from pnode.data.tokenizers import StreamDecoder, Tokenizer, tokenizer_from_bytes

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
