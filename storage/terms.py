"""The term record: whose cluster a store is, and who is its orchestrator at present.

The orchestrator writes it by conditional writes; a PNode that can't find its orchestrator reads it.
"""

from __future__ import annotations

import msgspec

from storage.sealed import read_sealed
from storage.store import NotFoundError, Store

TERM_KEY = "registry/term.json"


class TermRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster's id and its term: who wrote it last is the orchestrator."""

    cluster: str
    term: int
    addresses: list[str] = []
    """Where the orchestrator of this term is, for PNodes that don't find it where it was."""
    boot: int = 0
    """Of its process: no two records are the same, so each of two that write at once knows which of them won."""
    version: int = 1
    key: str = ""
    """The orchestrator's public key, "" where there are no keys."""


async def read_term(store: Store) -> TermRecord | None:
    """The record, None if there is none yet. Raises StoreError."""
    try:
        record, _ = await read_sealed(store, TERM_KEY, TermRecord)
    except NotFoundError:
        return None
    return record
