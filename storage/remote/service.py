"""The storage service: what it is asked is done with the store it stands on, and answered.

- Each question is a task of its own; of one sender, and of all together, so many run at once, and further ones are told
  to come again. Nothing is read for a sender that does not take what it was sent.
- Who asks is told by the bus, which lets nobody in that it does not know. What may be written: policy.py; how much:
  quota.py.
- Pieces of large objects are gathered (spool.py) and checked against size and digest before the store hears of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, BinaryIO

import structlog

from storage.keys import check_key, check_prefix
from storage.remote import CHUNK_BYTES
from storage.remote.answers import BUSY, CHANGED, FAILED, FORBIDDEN, NO_TRANSFER, QUOTA, Refusal, refusal_of
from storage.remote.policy import write_problem
from storage.remote.quota import Ledger, network_of, prefix_of
from storage.remote.spool import Spool
from storage.store import (
    Buffer,
    ConflictError,
    Entry,
    RangedStore,
    digest_of,
)
from wire.bus import Bus, Frame
from wire.codec import write_body
from wire.errors import DCNRError, MisuseError
from wire.messages import (
    FORWARD,
    Message,
    Ok,
    OpenStore,
    PeerRef,
    ProbeStore,
    Refused,
    ShutDown,
    StoreAppend,
    StoreBegin,
    StoreChunk,
    StoreDelete,
    StoreEntry,
    StoreFinish,
    StoreHead,
    StoreInfo,
    StoreList,
    StorePut,
    StoreRead,
    StoreStaged,
    StoreWritten,
)
from wire.requests import request_id_of
from wire.zmq_bus import is_loopback

ASKED_BY_ONE, ASKED_BY_ALL = 96, 1024
"""Questions that are being answered at once."""
UNTAKEN_BYTES = 16 << 20
"""Sent to one process and not acknowledged: nothing more is read for it."""
MAX_PAGE = 5000
MAX_OBJECT_BYTES = 1 << 40
TRANSFERS_OF_ONE = 64
IDLE_S = 60.0
RECOUNT_S = 5.0
SWEEP_S = 3600.0

_QUESTIONS = (
    OpenStore, ProbeStore, StoreRead, StoreHead, StoreList, StoreDelete, StorePut, StoreBegin, StoreAppend, StoreFinish,
)  # fmt: skip

Answer = tuple[object, Sequence[Buffer]]


class StorageService:
    """See the module. `store`: what it stands on. `truth`: take writes also of what only an orchestrator writes."""

    def __init__(
        self, bus: Bus, store: RangedStore, spool: Spool, log: structlog.typing.FilteringBoundLogger, *,
        quotas: dict[str, int] | None = None, truth: bool = False, version: str = "",
    ) -> None:  # fmt: skip
        self.counters: Counter[str] = Counter()
        self._bus = bus
        self._store = store
        self._spool = spool
        self._log = log
        self._ledger = Ledger(quotas or {})
        self._truth = truth
        self._version = version
        self._asked: Counter[PeerRefKey] = Counter()
        self._transfers: dict[str, _Transfer] = {}
        self._counted_at: dict[str, float] = {}
        self._counting = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of the questions
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End in good order."""
        self._stopping.set()

    async def open(self) -> None:
        """Begin to answer. Raises StoreUnavailableError if spool or store can't be used, BindError."""
        await self._spool.prepare()
        await self._store.probe()
        self._bus.on_message(self._on_message)
        self._bus.on_loss(lambda peer, reason: self._log.debug("lost", peer=peer.id, reason=reason))
        await self._bus.start()

    async def run(self) -> None:
        """Answer until `stop`."""
        try:
            while not self._stopping.is_set():
                try:
                    async with asyncio.timeout(SWEEP_S):
                        await self._stopping.wait()
                except TimeoutError:
                    await self._sweep()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5.0)

    async def _sweep(self) -> None:
        try:
            await self._spool.sweep()
        except DCNRError as error:
            self._log.warning("spool not swept", error=str(error))

    # ------------------------------------------------------------ questions

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[Frame]) -> None:
        request_id = request_id_of(message)
        if isinstance(message, ShutDown):
            if not all(map(is_loopback, self._bus.me.addresses)):
                text = "this storage service can be reached from elsewhere"
                self._refuse(sender, request_id, Refusal("not-local", text, "send it SIGTERM"))
                return
            self._bus.send(sender, Ok(request_id))
            self.stop()
        elif not isinstance(message, _QUESTIONS):
            self.counters["refused_unexpected"] += 1
            if request_id and not isinstance(message, Ok | Refused):
                text = f"a storage service does not answer {type(message).__name__}"
                self._bus.send(sender, Refused(request_id, "not-here", text, "ask the orchestrator"))
        else:
            who = sender.id, sender.boot
            untaken = isinstance(message, StoreRead) and self._bus.queued_bytes(sender) > UNTAKEN_BYTES
            if self._asked[who] >= ASKED_BY_ONE or self._asked.total() >= ASKED_BY_ALL or untaken:
                self.counters["refused_busy"] += 1
                self._refuse(sender, request_id, Refusal(BUSY, "too much is asked for at once", "ask again, later"))
                return
            self._asked[who] += 1
            self._spawn(self._answer(who, sender, message, frames))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _answer(self, who: PeerRefKey, sender: PeerRef, message: Message, frames: Sequence[Frame]) -> None:
        request_id = request_id_of(message)
        try:
            body, data = await self._do(sender.id, message, frames)
        except DCNRError as error:
            refusal = refusal_of(error)
            self.counters[f"refused_{refusal.code}"] += 1
            self._log.debug("refused", peer=sender.id, code=refusal.code, text=str(error))
            self._refuse(sender, request_id, refusal)
        except Exception as error:
            self._log.exception("a question failed", peer=sender.id, question=type(message).__name__)
            self._refuse(sender, request_id, Refusal(FAILED, f"{type(error).__name__}: {error}", "see its log"))
        else:
            if isinstance(body, StoreChunk):
                self.counters["bytes_read"] += len(data[0])
                self._send(sender, body, data, lane=FORWARD)
            else:
                self._send(sender, Ok(request_id), [write_body(body)] if body is not None else [])
        finally:
            self._asked[who] -= 1
            if not self._asked[who]:
                del self._asked[who]

    def _refuse(self, to: PeerRef, request_id: str, refusal: Refusal) -> None:
        self._send(to, Refused(request_id, refusal.code, refusal.message[:2000], refusal.hint[:500]), ())

    def _send(self, to: PeerRef, message: Message, frames: Sequence[Buffer], lane: int | None = None) -> None:
        try:
            self._bus.send(to, message, frames, lane=lane)
        except DCNRError as error:  # it is gone, or takes nothing: it will ask again
            self._log.debug("unsent", peer=to.id, error=str(error))

    async def _do(self, sender: str, message: Message, frames: Sequence[Frame]) -> Answer:
        match message:
            case OpenStore():
                return StoreInfo(self._bus.me.boot, CHUNK_BYTES, self._version), ()
            case ProbeStore():
                await self._store.probe()
                return None, ()
            case StoreRead():
                return await self._read(message)
            case StoreHead():
                return _entry(await self._store.head(check_key(message.key))), ()
            case StoreList():
                return await self._list(message), ()
            case StoreDelete():
                self._may_write(message.key)
                await self._store.delete(message.key)
                return None, ()
            case StorePut():
                return StoreWritten(await self._put(message, _only(frames))), ()
            case StoreBegin():
                return StoreStaged(await self._begin(sender, message)), ()
            case StoreAppend():
                return StoreStaged(await self._append(sender, message, _only(frames))), ()
            case StoreFinish():
                return StoreWritten(await self._finish(sender, message)), ()
        raise MisuseError(f"no answer to {type(message).__name__}")

    # ------------------------------------------------------------ reading

    async def _read(self, message: StoreRead) -> Answer:
        key, size = check_key(message.key), message.size_bytes
        if not 0 <= message.offset <= MAX_OBJECT_BYTES or not 0 < size <= CHUNK_BYTES:
            raise MisuseError(f"{size} bytes from {message.offset} on", hint=f"1 to {CHUNK_BYTES} bytes at once")
        try:
            piece = await self._store.get_range(key, message.offset, size, etag=message.etag)
        except ConflictError as error:
            raise Refusal(CHANGED, error.message, error.hint) from error
        return StoreChunk(message.request_id, message.offset, piece.size_bytes, piece.etag, piece.sha256), [piece.data]

    async def _list(self, message: StoreList) -> list[StoreEntry]:
        prefix, limit = check_prefix(message.prefix), min(message.limit, MAX_PAGE)
        if limit < 1:
            raise MisuseError(f"a list of at most {limit}")
        found: list[StoreEntry] = []
        async for entry in self._store.list(prefix):
            if entry.key > message.after:
                found.append(_entry(entry))
                if len(found) >= limit:
                    break
        return found

    # ------------------------------------------------------------ writing

    def _may_write(self, key: str) -> None:
        if problem := write_problem(check_key(key), truth=self._truth):
            raise Refusal(
                FORBIDDEN, problem, "dcnr storage --truth lifts that, for an orchestrator without another way"
            )

    async def _put(self, message: StorePut, data: Frame) -> str:
        self._may_write(message.key)
        if len(data) > CHUNK_BYTES:
            raise MisuseError(f"{len(data)} bytes in one message", hint=f"at most {CHUNK_BYTES}")
        _check(message.key, len(data), digest_of(data), len(data), message.sha256)
        network = network_of(message.key)
        await self._admit(network, len(data))
        etag = await self._install(message.key, message.how, message.etag, data)
        self._ledger.written(network, len(data))
        self.counters["bytes_written"] += len(data)
        return etag

    async def _install(self, key: str, how: str, etag: str, data: Buffer) -> str:
        match how:
            case "put":
                return await self._store.put(key, data)
            case "absent":
                return await self._store.put_if_absent(key, data)
            case "match":
                return await self._store.put_if_match(key, data, etag)
        raise MisuseError(f"there is no way to write called {how[:20]!r}", hint="put, absent, match")

    async def _begin(self, sender: str, message: StoreBegin) -> int:
        self._may_write(message.key)
        if len(message.transfer) != 32 or message.transfer.strip("0123456789abcdef"):
            raise MisuseError("a transfer is called by 32 hex digits")
        if not 0 < message.size_bytes <= MAX_OBJECT_BYTES:
            raise MisuseError(f"an object of {message.size_bytes} bytes", hint=f"1 to {MAX_OBJECT_BYTES}")
        name, network = self._spool.name(sender, message.transfer), network_of(message.key)
        transfer = self._transfers.get(name)
        if transfer is None:
            self._forget_idle(sender)
            await self._admit(network, message.size_bytes, name)
            transfer = self._transfers.setdefault(name, _Transfer(sender, message.size_bytes))
            self._ledger.reserve(name, network, message.size_bytes)
        async with transfer.lock:
            transfer.touched_at = asyncio.get_running_loop().time()
            staged = await self._spool.begin(name)
            if staged > message.size_bytes:
                await self._spool.remove(name)
                staged = await self._spool.begin(name)
            return staged

    def _forget_idle(self, sender: str) -> None:
        """Room for one more transfer of this sender. What is forgotten stays in the spool, and can be begun again."""
        mine = [(name, transfer) for name, transfer in self._transfers.items() if transfer.sender == sender]
        if len(mine) < TRANSFERS_OF_ONE:
            return
        idle_since = asyncio.get_running_loop().time() - IDLE_S
        for name, transfer in mine:
            if transfer.touched_at < idle_since and not transfer.lock.locked():
                self._ledger.release(name)
                del self._transfers[name]
                return
        raise Refusal(BUSY, f"{TRANSFERS_OF_ONE} transfers are under way", "ask again, later")

    async def _append(self, sender: str, message: StoreAppend, data: Frame) -> int:
        name = self._spool.name(sender, message.transfer)
        transfer = self._transfers.get(name)
        if transfer is None:
            raise Refusal(NO_TRANSFER, "nothing has come of this transfer yet", "begin it")
        if message.offset < 0 or not 0 < len(data) <= CHUNK_BYTES or message.offset + len(data) > transfer.size_bytes:
            raise MisuseError(f"{len(data)} bytes from {message.offset} on of {transfer.size_bytes}")
        async with transfer.lock:
            transfer.touched_at = asyncio.get_running_loop().time()
            self.counters["bytes_staged"] += len(data)
            return await self._spool.append(name, message.offset, data)

    async def _finish(self, sender: str, message: StoreFinish) -> str:
        self._may_write(message.key)
        name, network = self._spool.name(sender, message.transfer), network_of(message.key)
        transfer = self._transfers.get(name)
        if transfer is None:
            raise Refusal(NO_TRANSFER, "nothing has come of this transfer yet", "begin it")
        async with transfer.lock:
            file = await self._spool.open(name)
            with file:
                size, digest = await asyncio.to_thread(_look, file)
                if (size, digest) != (message.size_bytes, message.sha256):
                    await self._drop(name)
                    text = f"{size} bytes with SHA-256 {digest[:16]}… have come of {message.key}"
                    raise Refusal(NO_TRANSFER, f"{text}, expected {message.size_bytes} with {message.sha256[:16]}…")
                if message.how == "put":
                    etag = await self._store.put_file(message.key, self._spool.path(name))
                else:
                    view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                    try:
                        etag = await self._install(message.key, message.how, message.etag, view)
                    except ConflictError:
                        await self._drop(name)
                        raise
            self._ledger.written(network, size)
            self.counters["bytes_written"] += size
            await self._drop(name)
            return etag

    async def _drop(self, name: str) -> None:
        await self._spool.remove(name)
        self._ledger.release(name)
        self._transfers.pop(name, None)

    # ------------------------------------------------------------ quotas

    async def _admit(self, network: str, size_bytes: int, transfer: str = "") -> None:
        """Raises Refusal if the network's quota does not allow it, which is counted anew before."""
        async with self._counting:
            if self._ledger.unknown(network):
                await self._count(network)
            problem = self._ledger.problem(network, size_bytes, transfer)
            now = asyncio.get_running_loop().time()
            if problem and now - self._counted_at.get(network, 0.0) >= RECOUNT_S:
                await self._count(network)
                problem = self._ledger.problem(network, size_bytes, transfer)
            if problem:
                self._log.warning("quota", problem=problem)
                raise Refusal(QUOTA, problem, "dcnr gc, dcnr rm SESSION, or a higher --quota of the storage service")

    async def _count(self, network: str) -> None:
        size = 0
        async for entry in self._store.list(prefix_of(network)):
            size += entry.size_bytes
        self._ledger.counted(network, size)
        self._counted_at[network] = asyncio.get_running_loop().time()


PeerRefKey = tuple[str, int]


class _Transfer:
    """A large object that is coming."""

    def __init__(self, sender: str, size_bytes: int) -> None:
        self.sender = sender
        self.size_bytes = size_bytes
        self.lock = asyncio.Lock()
        self.touched_at = asyncio.get_running_loop().time()


def _entry(entry: Entry) -> StoreEntry:
    return StoreEntry(entry.key, entry.size_bytes, entry.etag, entry.modified_s)


def _only(frames: Sequence[Frame]) -> Frame:
    if len(frames) != 1:
        raise MisuseError(f"{len(frames)} frames came, one was expected")
    return frames[0]


def _check(key: str, size: int, digest: str, expected_size: int, expected: str) -> None:
    if size != expected_size or digest != expected:
        raise MisuseError(f"{size} bytes with SHA-256 {digest[:16]}… came for {key}, expected {expected[:16]}…")


def _look(file: BinaryIO) -> tuple[int, str]:
    """Size and digest of what has come."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    return file.tell(), digest
