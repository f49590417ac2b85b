"""How many bytes a tensor has under the codec of an edge. Pure arithmetic: coding itself is the PNodes' business.

int8 has a float32 scale for each block of at most `BLOCK` neighbours along the last dimension, then the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BF16, INT8 = "bf16", "int8"
CODECS = (BF16, INT8)
BLOCK = 256
SCALE_BYTES = 4


def blocks_of(shape: Sequence[int]) -> int:
    """How many int8 blocks a tensor of that shape has."""
    if not shape:
        return 1
    return math.prod(shape[:-1]) * -(-shape[-1] // BLOCK)


def coded_bytes(codec: str, shape: Sequence[int], item_bytes: int = 4) -> int:
    """Bytes of a tensor of that shape under a codec; "" is none, with `item_bytes` each. Raises KeyError."""
    count = math.prod(shape)
    if codec == BF16:
        return 2 * count
    if codec == INT8:
        return count + SCALE_BYTES * blocks_of(shape)
    if codec in ("", "none"):
        return item_bytes * count
    raise KeyError(codec)
