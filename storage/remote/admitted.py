"""Whom a storage service lets in, where there are keys: those on the cluster's allow-list, which its store holds.

The list is looked at every `LOOK_S`: so soon a revocation is in force here. While the store is away the last list
holds; before there is one nobody is let in.
"""

from __future__ import annotations

import asyncio

import structlog

from storage.members import read_members
from storage.store import Store
from wire.admission import Admission
from wire.errors import DCNRError

LOOK_S = 2.0
LIMIT_S = 30.0


async def look(store: Store, admission: Admission) -> bool:
    """Take the list as it is now; whether it's another one. Raises DCNRError, and the last one holds."""
    async with asyncio.timeout(LIMIT_S):
        found = await read_members(store)
    return admission.replace(found.list_version, found.shared())


async def follow(
    store: Store, admission: Admission, log: structlog.typing.FilteringBoundLogger, every_s: float = LOOK_S
) -> None:
    """Look again and again, until it's cancelled."""
    away = False
    while True:
        try:
            if await look(store, admission):
                log.info("members", version=admission.version, count=len(admission.entries()))
            away = False
        except (DCNRError, TimeoutError) as error:
            if not away:
                log.warning("the allow-list can't be read, the last one holds", error=str(error))
            away = True
        await asyncio.sleep(every_s)
