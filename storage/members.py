"""The allow-list as it is stored: who is let in. The orchestrator writes it; a storage service reads it."""

from __future__ import annotations

import msgspec

from storage.limits import RECORD_BYTES
from storage.sealed import read_sealed
from storage.store import NotFoundError, Store
from wire.messages import Admitted
from wire.roles import JOIN

MEMBERS_KEY = "registry/members.json"


class MembersList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is let in."""

    list_version: int = 0
    entries: list[Admitted] = []
    term: int = 0
    """Of the orchestrator that wrote it."""
    version: int = 1

    def shared(self) -> list[Admitted]:
        """What others than the orchestrator go by: everybody but guests, who have no business with them."""
        return [entry for entry in self.entries if entry.role != JOIN]


async def read_members(store: Store) -> MembersList:
    """The list, empty if there is none yet. Raises StoreError."""
    try:
        record, _ = await read_sealed(store, MEMBERS_KEY, MembersList, max_bytes=RECORD_BYTES)
    except NotFoundError:
        return MembersList()
    return record
