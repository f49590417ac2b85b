"""Reading and writing the records in the store, which are the truth. Every write of a record is conditional.

A lost conditional write means that another orchestrator wrote. If the term is no longer ours it has the store:
`SupersededError`, and this one has to end. Else it was a former one, with a write that it began before its end:
`OvertakenError`, and whoever wrote decides anew about what it finds. To leave a former one no chance, `claim` writes
each session's record anew, under the new term, before anything is decided about it.

A write that succeeded proves nothing about the term, for whoever takes over raises that first and reads the records
then. So the term is read again after each write, and only if it is still ours is the write done: then whoever takes
over later will find it. What is told after that is true.

A record at rest that is damaged stops nothing but itself: it is in `damaged`, and the next write replaces it. Only the
term has to be known: the next one is far above all that sound records tell of.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

import msgspec

from orchestrator.allowlist import MEMBERS_KEY, MembersRecord
from orchestrator.records import (
    EPOCHS_KEY,
    INCARNATIONS_KEY,
    NETWORKS_PREFIX,
    SESSIONS_PREFIX,
    EpochsRecord,
    IncarnationRecord,
    NetworkRecord,
    SessionRecord,
    network_key,
    session_key,
)
from storage.limits import RECORD_BYTES
from storage.sealed import read_sealed, seal, unseal
from storage.store import ConflictError, CorruptError, NotFoundError, Store, Stored, StoreUnavailableError
from storage.terms import TERM_KEY, TermRecord
from wire.errors import DCNRError
from wire.ids import new_boot
from wire.messages import PeerRef

R = TypeVar("R")

TRIES = 20
MAX_EPOCHS = 10_000
TERM_GAP = 1000
"""Beyond the highest term that is known, where the record of the newest is damaged."""


class SupersededError(DCNRError):
    """Another orchestrator took over the store."""


class OvertakenError(DCNRError):
    """A former orchestrator wrote in between. `data`: what it wrote; the next write replaces it."""

    def __init__(self, key: str, data: bytes) -> None:
        super().__init__(f"{key} was changed by a former orchestrator", hint="it is tried again")
        self.data = data


class Truth:
    """The records of one store, and the etags under which they were read or written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._etags: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self.term = TermRecord("", 0)
        self.damaged: dict[str, str] = {}
        """What is wrong with the records that could not be read, by key."""

    async def raise_term(self, me: PeerRef | None = None, *, cluster: str = "") -> TermRecord:
        """Make this process the orchestrator: a term that nobody had before. `cluster`: its id, should it be lost."""
        boot, addresses, key = (me.boot, me.addresses, me.key) if me is not None else (new_boot(), [], "")
        for _ in range(TRIES):
            found = await self._sound(TERM_KEY, TermRecord)
            if TERM_KEY in self.damaged:
                found = TermRecord(cluster or f"{new_boot():x}"[-12:], await self._highest_term() + TERM_GAP)
            elif found is None:
                found = TermRecord(f"{new_boot():x}"[-12:], 0)
            fresh = TermRecord(found.cluster, found.term + 1, addresses, boot, key=key)
            try:
                self._etags[TERM_KEY] = await self._put(TERM_KEY, seal(fresh))
            except ConflictError:
                continue
            self.term = fresh
            return fresh
        raise SupersededError(
            "other orchestrators keep taking over this store", hint="only one may use it; end the others"
        )

    async def still_mine(self) -> None:
        """Raises `SupersededError` if another orchestrator raised the term."""
        try:
            peeked = await self._peek(TERM_KEY, TermRecord)
        except CorruptError as error:
            hint = "start the orchestrator anew: it writes another"
            raise StoreUnavailableError(f"whose term it is can't be read: {error.message}", hint=hint) from error
        if peeked is None:
            raise SupersededError(f"{TERM_KEY} is gone: the store was emptied or exchanged", hint="start it again")
        found, _ = peeked
        if found != self.term:
            at = f" at {', '.join(found.addresses)}" if found.addresses else ""
            raise SupersededError(
                f"superseded by term {found.term}{at} (this one has term {self.term.term})",
                hint="only one orchestrator may use a store",
            )

    async def incarnations(self) -> dict[str, int]:
        """The highest incarnations granted."""
        found = await self._sound(INCARNATIONS_KEY, IncarnationRecord)
        return dict(found.granted) if found is not None else {}

    async def put_incarnations(self, granted: dict[str, int]) -> None:
        """Make them durable. Raises `OvertakenError` as `put_session` does."""
        async with self._lock:
            await self._write(INCARNATIONS_KEY, IncarnationRecord(granted, self.term.term))

    async def epochs(self) -> dict[str, int]:
        """The last epochs of deleted sessions."""
        found = await self._sound(EPOCHS_KEY, EpochsRecord)
        return dict(found.last) if found is not None else {}

    async def put_epochs(self, last: dict[str, int]) -> None:
        """Make them durable; beyond `MAX_EPOCHS` the oldest entries are forgotten."""
        async with self._lock:
            for _ in range(TRIES):
                try:
                    await self._write(EPOCHS_KEY, EpochsRecord(dict(list(last.items())[-MAX_EPOCHS:])))
                    return
                except OvertakenError as error:
                    found = unseal(error.data, EpochsRecord, key=EPOCHS_KEY).last
                    last = {**found, **{session: max(epoch, found.get(session, 0)) for session, epoch in last.items()}}

    async def any_networks(self) -> bool:
        """Whether there is a record of a network, sound or not."""
        return bool(await self._keys(NETWORKS_PREFIX))

    async def members(self) -> MembersRecord:
        """The allow-list."""
        return await self._read(MEMBERS_KEY, MembersRecord) or MembersRecord()

    async def put_members(self, record: MembersRecord) -> None:
        """Write it. Raises `SupersededError`, `OvertakenError`."""
        async with self._lock:
            await self._write(MEMBERS_KEY, record)

    async def networks(self) -> list[NetworkRecord]:
        """All networks whose records are sound."""
        keys = await self._keys(NETWORKS_PREFIX)
        return [record for key in keys if (record := await self._sound(key, NetworkRecord))]

    async def sessions(self) -> list[SessionRecord]:
        """All sessions whose records are sound."""
        keys = await self._keys(SESSIONS_PREFIX)
        return [record for key in keys if (record := await self._sound(key, SessionRecord))]

    async def claim(self, record: SessionRecord) -> SessionRecord:
        """Write a session's record under our term; the record as it is, should a former orchestrator have been last."""
        for _ in range(TRIES):
            record.term = self.term.term
            try:
                await self.put_session(record.session, seal(record))
            except OvertakenError as error:
                record = unseal(error.data, SessionRecord, key=session_key(record.session))
                continue
            return record
        raise SupersededError(
            f"the record of {record.session} is written by others all the time", hint="end the other orchestrators"
        )

    async def put_network(self, record: NetworkRecord) -> None:
        """Write a network's record."""
        try:
            await self._write(network_key(record.network), record)
        except OvertakenError:
            await self._write(network_key(record.network), record)

    async def put_session(self, session: str, data: bytes) -> None:
        """Write a session's record, sealed by `sealed_session`. Raises `SupersededError`, `OvertakenError`."""
        await self._write_bytes(session_key(session), data)

    async def drop_network(self, network: str) -> None:
        """Delete a network's record. Raises `SupersededError`."""
        await self._drop(network_key(network))

    async def drop_session(self, session: str) -> None:
        """Delete a session's record. Raises `SupersededError`."""
        await self._drop(session_key(session))

    # ------------------------------------------------------------ inside

    async def _keys(self, prefix: str) -> list[str]:
        return [entry.key async for entry in self._store.list(prefix) if entry.key.endswith(".json")]

    async def _peek(self, key: str, kind: type[R]) -> tuple[R, Stored] | None:
        try:
            return await read_sealed(self._store, key, kind, max_bytes=RECORD_BYTES)
        except NotFoundError:
            return None

    async def _read(self, key: str, kind: type[R]) -> R | None:
        found = await self._peek(key, kind)
        if found is None:
            self._etags.pop(key, None)
            return None
        record, stored = found
        self._etags[key] = stored.etag
        return record

    async def _sound(self, key: str, kind: type[R]) -> R | None:
        """A record; None if there is none, or if it is damaged."""
        try:
            found = await self._read(key, kind)
        except CorruptError as error:
            try:
                self._etags[key] = (await self._store.head(key)).etag
            except NotFoundError:
                return None
            self.damaged[key] = error.message
            return None
        self.damaged.pop(key, None)
        return found

    async def _highest_term(self) -> int:
        """The highest that any sound record tells of."""
        granted = await self._sound(INCARNATIONS_KEY, IncarnationRecord)
        return max([record.term for record in await self.sessions()] + [granted.term if granted else 0])

    async def _raw(self, key: str) -> Stored | None:
        """The stored form of a record, verified."""
        found = await self._peek(key, msgspec.Raw)
        return found[1] if found is not None else None

    async def _write(self, key: str, record: msgspec.Struct) -> None:
        await self._write_bytes(key, seal(record))

    async def _write_bytes(self, key: str, data: bytes) -> None:
        try:
            self._etags[key] = await self._put(key, data)
        except ConflictError:
            try:
                stored = await self._raw(key)
            except CorruptError:  # what is damaged is nobody's
                etag = (await self._store.head(key)).etag
                await self.still_mine()
                self._etags[key] = await self._store.put_if_match(key, data, etag)
                await self.still_mine()
                return
            await self.still_mine()  # after the read: what was read is then no later orchestrator's
            if stored is None:  # a former one deleted it
                self._etags[key] = await self._store.put_if_absent(key, data)
            else:
                self._etags[key] = stored.etag
                if stored.data != data:
                    raise OvertakenError(key, stored.data) from None
        await self.still_mine()

    async def _put(self, key: str, data: bytes) -> str:
        """The new etag. A write whose answer was lost looks like a conflict with oneself, but is none."""
        etag = self._etags.get(key)
        try:
            if etag is None:
                return await self._store.put_if_absent(key, data)
            return await self._store.put_if_match(key, data, etag)
        except ConflictError:
            with contextlib.suppress(CorruptError):
                stored = await self._raw(key)
                if stored is not None and stored.data == data:
                    return stored.etag
            raise

    async def _drop(self, key: str) -> None:
        await self.still_mine()
        await self._store.delete(key)
        self._etags.pop(key, None)
        await self.still_mine()


def sealed_session(record: SessionRecord) -> bytes:
    """The stored form of a session's record as it is now."""
    return seal(record)
