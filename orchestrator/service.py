"""The running orchestrator: bus, store, registry, membership and sessions joined; decisions are made elsewhere.

Everything happens in one event loop. A task that fails unexpectedly is logged and ends alone. `run` ends in good order
after `stop`, and PNodes go on without it; the next one takes their runs over.

Whether it still is the orchestrator is `vigil`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from orchestrator import events, membership
from orchestrator.catalog import Catalog
from orchestrator.damage import Damage
from orchestrator.driver import SessionDriver
from orchestrator.eventlog import EventLog
from orchestrator.guests import Guests
from orchestrator.handlers import Handlers
from orchestrator.lifecycle import ACTIVE, RECOVER_S, Limits, State
from orchestrator.members import Members
from orchestrator.membership import Membership
from orchestrator.records import NetworkRecord, SessionRecord
from orchestrator.registry import Registry, cluster_of
from orchestrator.sessions import Session
from orchestrator.truth import SupersededError, Truth
from orchestrator.vigil import Vigil
from orchestrator.waits import said_by
from storage.checkpoints import read_head
from storage.keys import BadKeyError, session_prefix
from storage.parallel import in_parallel
from storage.store import CorruptError, Store, StoreError, StoreUnavailableError
from wire.bus import Bus, Frame
from wire.codec import MessageError, read_body
from wire.errors import DCNRError
from wire.ids import new_request_id
from wire.messages import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Message,
    Ok,
    Part,
    PartsSaved,
    PeerRef,
    Progress,
    Refused,
    Register,
    RunFailed,
    RunHeld,
)

NAME = "orchestrator"
TICK_S = 0.25
FLUSH_S = 1.0
DURABLE_STOP_S, TASKS_STOP_S = 4.0, 0.5
"""Of the end: for writes of the truth under way, and for what was cancelled; each session then has `CLOSE_S` to store
what it has not stored, and the rest of `END_S` closes bus and store."""
AT_ONCE = 16
ADOPT_S = 5.0
"""Beyond two leases: for PNodes to find a new orchestrator and report to it."""


class Service:
    """See the module's docstring."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        home: Path,
        logger: structlog.typing.FilteringBoundLogger,
        *,
        lease_s: float = membership.LEASE_S,
        recover_s: float = RECOVER_S,
        version: str = "",
        store_url: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.bus = bus
        self.store = store
        self.store_url = store_url or store.url
        """Where PNodes and commands reach the store."""
        self.logger = logger
        self.version = version
        self.now = clock
        """The clock of all deadlines."""
        self.wall = wall
        """The clock of people."""
        self.started = wall()
        self.truth = Truth(store)
        self.damage = Damage()
        self.catalog = Catalog(store)
        self.networks: dict[str, NetworkRecord] = {}
        self.sessions: dict[str, SessionDriver] = {}
        self.membership = Membership(lease_s=lease_s)
        self.limits = Limits(2 * lease_s + ADOPT_S, recover_s)
        self.registry: Registry
        self.last_epochs: dict[str, int] = {}
        self._home = home
        self._tasks: set[asyncio.Task[Any]] = set()
        self._durable: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._error: DCNRError | None = None
        self.vigil = Vigil(self, gap_s=max(2 * TICK_S, min(2.0, lease_s / 5)))
        self.members = Members(self)
        self._handlers = Handlers(self)
        self.guests: Guests | None = None
        """The allow-list, where there are keys."""

    # ------------------------------------------------------------ small things for everybody

    @property
    def term(self) -> int:
        """This orchestrator's term."""
        return self.truth.term.term

    def new_id(self) -> str:
        """A request id that nobody else makes."""
        return str(new_request_id())

    def spawn(self, work: Coroutine[Any, Any, None], name: str, *, durable: bool = False) -> asyncio.Task[None]:
        """Run something beside the loop's other work; a failure is logged.

        `durable`: it writes the truth, so the end waits for it. (A write that is only cancelled here may still be
        carried out, and the next one would take it for another orchestrator's.)
        """
        task = asyncio.ensure_future(self._guard(work, name))
        if durable:
            self._durable.add(task)
            task.add_done_callback(self._durable.discard)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it would never be awaited
        return task

    async def _guard(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as error:
            self.logger.exception("task failed", task=name, error=str(error))

    @property
    def ending(self) -> bool:
        """It was told to stop, or was superseded."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End in good order."""
        self._stopping.set()

    def superseded(self, error: SupersededError) -> None:
        """Another orchestrator has the store: this one says not another word, but that."""
        if not self.over:
            self._error = error
            self.logger.error("superseded", error=str(error))
            for driver in self.sessions.values():
                driver.wake()
        self.stop()

    @property
    def over(self) -> bool:
        """It was superseded: what it knows counts no more."""
        return isinstance(self._error, SupersededError)

    def check_term(self) -> None:
        """Raises `SupersededError` if it is known by now."""
        if isinstance(self._error, SupersededError):
            raise self._error

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Take over the store and what is in it. Raises `DCNRError` (store, address).

        The bus is started first, for the term names its addresses; what arrives meanwhile is held back.
        """
        try:
            await self.store.probe()
        except StoreError as error:
            raise StoreUnavailableError(f"the store can't be used: {error.message}", hint=error.hint) from error
        self.bus.on_message(self._on_message)
        self.bus.on_loss(self._on_loss)
        self.bus.on_break(self._on_break)
        if self.guests is not None:
            await self.guests.open(NAME)
        await self.bus.start()
        path = self._home / "registry.sqlite"
        term = await self.truth.raise_term(self.bus.me, cluster=cluster_of(path))
        if self.guests is not None:
            await self.guests.store(NAME)
        granted = await self.truth.incarnations()
        self.last_epochs = await self.truth.epochs()
        self.registry = Registry(path, term.cluster)
        for pnode, incarnation in self.registry.incarnations().items():
            granted[pnode] = max(incarnation, granted.get(pnode, 0))
        self.membership = Membership(lease_s=self.membership.lease_s, granted=granted)
        networks, sessions = await self.truth.networks(), await self.truth.sessions()
        await self.truth.still_mine()  # after the reads: nothing of it is then a later orchestrator's
        networks, sessions = await self.damage.mend(self.store, self.truth, self.registry, networks, sessions)
        sessions = await in_parallel(self._take_over, sessions, AT_ONCE)
        for text in self.damage.told:
            self.logger.warning("damaged record", text=text)
        if self.registry.damaged:
            self.logger.warning("registry rebuilt from the store", damaged=self.registry.damaged)
        elif self.registry.fresh and networks:
            self.logger.info("registry made anew from the store", networks=len(networks), sessions=len(sessions))
        self.registry.rebuild(networks, sessions)
        self.networks = {record.network: record for record in networks}
        for record in sessions:
            session = Session(record, term=self.term, new_id=self.new_id, limits=self.limits)
            log = EventLog(self.registry.events(record.session))
            self.sessions[record.session] = SessionDriver(self, session, log)
        self.vigil.go_on()
        for driver in list(self.sessions.values()):
            driver.feed(events.TakenOver(driver.log.last_step()))
        self.logger.info(
            "ready", address=self.bus.me.addresses, term=self.term, cluster=term.cluster, networks=len(networks),
            sessions=len(sessions),
        )  # fmt: skip

    async def _take_over(self, record: SessionRecord) -> SessionRecord:
        """A session's record, claimed, with what its head says of it: it may have moved after the last record."""
        record = await self.truth.claim(record)
        if record.placement or State(record.state) in ACTIVE:
            with contextlib.suppress(CorruptError, BadKeyError):  # the survey finds out what can be used
                head = await read_head(self.store, session_prefix(record.network, record.session))
                if head is not None and head.step > record.committed:
                    record.committed, record.final_hash = head.step, head.hash
        return record

    async def run(self) -> None:
        """Live until `stop`. Raises `SupersededError` if another orchestrator took over."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part) for part in (self._tick(), self._flush(), self.vigil.watch())]
                await self._stopping.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await self._close()
        if self._error is not None:
            raise self._error

    async def _close(self) -> None:
        if self._durable and self._error is None:
            await asyncio.wait(list(self._durable), timeout=DURABLE_STOP_S)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=TASKS_STOP_S)
        if self._error is None:
            await asyncio.gather(*(driver.close() for driver in self.sessions.values()))
        self._save_events()
        self.registry.close()
        await self.bus.close()
        await self.store.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self.vigil.awake():
                continue
            now = self.vigil.stirred = self.now()
            if now >= self.membership.next_deadline():
                self.members.carry(self.membership.tick(now, self.wall()))
            for driver in list(self.sessions.values()):
                if now >= driver.session.next_deadline():
                    try:
                        driver.feed(events.Ticked())
                    except Exception as error:
                        self.logger.exception("session failed to tick", session=driver.session.id, error=str(error))

    async def _flush(self) -> None:
        """Write events to the registry, many at a time."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self._save_events()

    def _save_events(self) -> None:
        for name, driver in self.sessions.items():
            rewrite, fresh = driver.log.unsaved()
            if rewrite or fresh:
                self.registry.put_events(name, fresh, rewrite=rewrite)
        self.registry.commit()
        if self.registry.problem:
            self.logger.warning("registry not written", problem=self.registry.problem, failed=self.registry.failed)
            self.registry.problem = ""

    # ------------------------------------------------------------ messages

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[Frame]) -> None:
        if self.over:
            self._handlers.refuse(sender, message)
            return
        if not self.vigil.awake():
            self.vigil.hold_back(lambda: self._on_message(sender, message, frames))
            return
        now = self.now()
        match message:
            case Register():
                self.members.carry(self.membership.register(message, sender, now, self.wall()))
            case Heartbeat():
                self._beat(sender, message, now)
            case Goodbye():
                self.members.carry(self.membership.left(message, sender, now, self.wall()))
            case Progress() | PartsSaved() | RunHeld() | RunFailed():
                self.members.carry(self.membership.heard(sender, now))
                self._report(sender, message, frames)
            case _:
                self._handlers.take(sender, message, frames)

    def _beat(self, sender: PeerRef, message: Heartbeat, now: float) -> None:
        if message.term > self.term:
            self.logger.warning("a PNode knows a higher term", pnode=message.pnode, term=message.term)
            self.vigil.doubt()
            return
        known, commands = self.membership.beat(message, sender, now)
        self.members.carry(commands)
        self.send(sender, HeartbeatAck(message.incarnation, self.term, known))
        member = self.membership.by_peer(sender)
        if known and member is not None:
            self.members.report(message, member)

    def _report(
        self, sender: PeerRef, message: Progress | PartsSaved | RunHeld | RunFailed, frames: Sequence[Frame]
    ) -> None:
        """What a PNode says about a run; from a member, and one that runs this epoch."""
        driver = self.sessions.get(message.session)
        member = self.membership.current(message.pnode, sender)
        if driver is None or member is None or message.epoch != driver.session.record.epoch:
            return
        match message:
            case Progress():
                driver.feed(events.Reported(message.epoch, tuple(message.steps)))
            case RunHeld():
                driver.feed(events.Held(message.pnode, message.epoch, message.step))
            case RunFailed():
                self._run_failed(driver, sender, message)
            case PartsSaved():
                try:
                    parts = read_body(frames[0], list[Part]) if frames else []
                except MessageError as error:
                    driver.note("warning", f"{message.pnode} told unreadable parts of step {message.step}: {error}")
                    return
                driver.cutting.parts_saved(message, parts)

    def _run_failed(self, driver: SessionDriver, sender: PeerRef, message: RunFailed) -> None:
        """A run broke; first what it says about PNodes, so that the placement that follows knows of it."""
        if message.cause == "compute":
            self.members.carry(self.membership.unhealthy(sender, message.text))
        deployment = driver.session.deployment
        if message.peer and deployment is not None:
            why = f"{message.pnode} can't reach it"
            incarnation = deployment.incarnations.get(message.peer, 0)
            self.members.carry(self.membership.doubt(message.peer, incarnation, why, self.now()))
        text, hint = said_by(message.pnode, message.text), message.hint
        driver.feed(events.RunBroke(message.pnode, message.epoch, message.vnode, text, hint, message.cause))

    def _on_loss(self, peer: PeerRef, reason: str) -> None:
        if self.over:
            return
        if not self.vigil.awake():
            self.vigil.hold_back(lambda: self._on_loss(peer, reason))
            return
        self.members.carry(self.membership.lost_peer(peer, reason, self.now(), self.wall()))

    def _on_break(self, peer: PeerRef) -> None:
        if not self.vigil.awake():
            self.vigil.hold_back(lambda: self._on_break(peer))
            return
        self.members.carry(self.membership.broke(peer, self.now()))

    def send(self, to: PeerRef, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send; a peer that went away meanwhile is no error."""
        if self.over and not isinstance(message, Refused):
            return
        try:
            self.bus.send(to, message, frames)
        except DCNRError as error:
            self.logger.debug("unsent", to=to.id, kind=type(message).__name__, error=str(error))

    def answer_ok(self, to: PeerRef, request_id: str, body: object = None) -> None:
        """Answer a client's request."""
        self.send(to, Ok(request_id), [msgspec.msgpack.encode(body)] if body is not None else [])

    def answer_refused(self, to: PeerRef, request_id: str, code: str, text: str, hint: str = "") -> None:
        """Refuse a client's request."""
        self.send(to, Refused(request_id, code, text[:4000], hint[:1000]))

    # ------------------------------------------------------------ what sessions ask for

    def tell(self, pnode: str, message: Message, *, limit_s: float) -> None:
        """Send to a living PNode; with a limit, ask again until it answers or the time is over."""
        member = self.membership.find(pnode)
        if self.over or member is None or member.state not in membership.LIVING:
            return
        if limit_s:
            own = msgspec.structs.replace(message, request_id=self.new_id())
            self.spawn(self._insist(member.peer, own, limit_s), f"{type(message).__name__} to {pnode}")
        else:
            self.send(member.peer, message)

    async def _insist(self, peer: PeerRef, message: Message, limit_s: float) -> None:
        try:
            await self.bus.ask(peer, message, timeout_s=limit_s)
        except DCNRError as error:
            self.logger.info("not answered", to=peer.id, kind=type(message).__name__, error=str(error))

    async def create_session(self, record: SessionRecord) -> SessionDriver:
        """A new session. Raises `DCNRError` if it can't be stored."""
        record.epoch = self.last_epochs.get(record.session, 0)
        record.created = self._after_all(record.created)
        session = Session(record, term=self.term, new_id=self.new_id, limits=self.limits)
        driver = SessionDriver(self, session, EventLog())
        self.sessions[record.session] = driver
        try:
            await driver.create()
        except DCNRError:
            del self.sessions[record.session]
            raise
        return driver

    def _after_all(self, created: float) -> float:
        """That time, or one just after the newest session's: lists go by it, and a clock may have been set back."""
        newest = max((driver.session.record.created for driver in self.sessions.values()), default=-math.inf)
        return max(created, math.nextafter(newest, math.inf))

    async def forget_session(self, driver: SessionDriver) -> None:
        """Delete a session's record, so that it does not come back. Its name stays taken until `release_name`."""
        name = driver.session.id
        self.last_epochs.pop(name, None)
        self.last_epochs[name] = driver.session.record.epoch
        await self.truth.put_epochs(self.last_epochs)
        await self.truth.drop_session(name)

    def release_name(self, driver: SessionDriver) -> None:
        """Nothing is left of a session: another one may have its name."""
        self.registry.drop_session(driver.session.id)
        self.sessions.pop(driver.session.id, None)
