"""Garbage collection: deletes what no record and no head's ancestry names.

Sessions that are deployed are left alone, for parts of a cut under way look like garbage; so are young blobs, and
what belongs to a session with a damaged head, manifest or record, of which nobody can say what is needed. Folders of
sessions that the registry does not know are leftovers of a removal that was cut short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.blobs import Blobs
from storage.keys import network_prefix
from storage.retention import collect
from storage.store import CorruptError, Entry, Store
from wire.messages import GarbageInfo

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.service import Service

SHOWN = 1000


async def sweep(service: Service, network: str, *, dry_run: bool) -> GarbageInfo:
    """Delete, or with `dry_run` only list, the garbage of one network, or of the whole store ("")."""
    found: list[Entry] = []
    for driver in list(service.sessions.values()):
        session = driver.session
        if network not in ("", session.record.network) or session.in_use:
            continue
        async with driver.cutting.committer.lock:
            try:
                found += await collect(service.store, driver.cutting.committer.prefix, dry_run=dry_run)
            except CorruptError as error:
                driver.note("warning", f"no garbage was collected: {error.message}")
    known = service.sessions.keys() | service.damage.sessions
    found += await leftovers(service.store, network, known, dry_run=dry_run)
    if not network and not service.damage.left_out:
        keep = {record.digest for record in service.networks.values()}
        for driver in service.sessions.values():
            record = driver.session.record
            keep |= {record.network_digest, record.data_digest, record.tokenizer_digest} - {""}
        found += await Blobs(service.store).collect(keep, now_s=service.wall(), dry_run=dry_run)
    keys = [entry.key for entry in found]
    return GarbageInfo(len(keys), sum(entry.size_bytes for entry in found), keys[:SHOWN], dry_run)


async def leftovers(store: Store, network: str, known: Collection[str], *, dry_run: bool) -> list[Entry]:
    """Delete, or only list, what is below the folders of sessions that are not `known`."""
    found: list[Entry] = []
    async for entry in store.list(network_prefix(network) if network else "networks/"):
        parts = entry.key.split("/")
        if len(parts) > 4 and parts[2] == "sessions" and parts[3] not in known:
            found.append(entry)
    if not dry_run:
        for entry in found:
            await store.delete(entry.key)
    return found
