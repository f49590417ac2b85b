"""Where things are kept: objects by key (local disk, S3), blobs by digest, checkpoints of sessions.

`open_store(url)` gives a store; `storage.checkpoints` writes and reads cuts; `storage.retention` decides what is kept.
"""

from storage.blobs import Blobs
from storage.open import open_store
from storage.store import (
    ConflictError,
    CorruptError,
    Entry,
    NotFoundError,
    PrefixStore,
    Store,
    Stored,
    StoreError,
    StoreUnavailableError,
)

__all__ = [
    "Blobs",
    "ConflictError",
    "CorruptError",
    "Entry",
    "NotFoundError",
    "PrefixStore",
    "Store",
    "StoreError",
    "StoreUnavailableError",
    "Stored",
    "open_store",
]
