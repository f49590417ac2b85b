"""The driver of one session: carries out what its core asks for, and tells the core what came of it.

It decides nothing. Store writes of one session happen one after another, so that what is stored never goes back. Where
its VNodes go is found out by `placing`, its commits are made by `cutting`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, assert_never

from orchestrator import events
from orchestrator.cutting import Cutting, defect
from orchestrator.eventlog import EventLog
from orchestrator.events import Command, Event, Log, Record, Send, Tell
from orchestrator.placing import Placing
from orchestrator.records import SessionRecord, session_key
from orchestrator.sessions import Session
from orchestrator.truth import OvertakenError, SupersededError, sealed_session
from orchestrator.waits import said_by
from storage.retention import delete_all
from storage.sealed import unseal
from storage.store import StoreUnavailableError
from wire.errors import DCNRError
from wire.messages import PeerRef
from wire.refusals import STALE_TERM, UNHEALTHY
from wire.requests import RefusedError

if TYPE_CHECKING:
    from orchestrator.service import Service

RELEASE_S = 20.0
WRITE_PAUSE_S = 1.0
DURABLE_S = 8.0
"""How long somebody who asked for something waits for it to be stored."""
CLOSE_S = 1.0


class SessionDriver:
    """One session with its log and its tasks."""

    def __init__(self, service: Service, session: Session, log: EventLog) -> None:
        self.service = service
        self.session = session
        self.log = log
        self.changed = asyncio.Event()
        self.gone = asyncio.Event()
        self.cutting = Cutting(self)
        self.placing = Placing(self)
        self._removed: asyncio.Future[None] | None = None
        self._asks: dict[str, asyncio.Task[None]] = {}
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._latest = b""
        self._raised, self._runs = 0, False
        self._changes = 0
        self._stored = 0
        """How often the record was to be stored, and up to which of these it is."""
        self._trouble = ""
        self._written = asyncio.Event()

    @property
    def peers(self) -> dict[str, PeerRef]:
        """Where the PNodes of the present deployment are, as far as they live."""
        deployment = self.session.deployment
        found: dict[str, PeerRef] = {}
        for pnode, incarnation in deployment.incarnations.items() if deployment is not None else ():
            member = self.service.membership.find(pnode)
            if member is not None and member.incarnation == incarnation:
                found[pnode] = member.peer
        return found

    # ------------------------------------------------------------ in

    def feed(self, event: Event) -> None:
        """Tell the core, and carry out what it asks for. Raises `ActionRefusedError`."""
        if self.service.over:
            return
        if not self.service.vigil.awake():
            self.service.vigil.hold_back(lambda: self.feed(event))
            return
        for command in self.session.handle(event, self.service.now()):
            self._carry(command)
        for key in [key for key in self._asks if key not in self.session.waits]:
            self._asks.pop(key).cancel()

    def note(self, kind: str, text: str) -> None:
        """A line for the log that changes nothing."""
        self._carry(Log(kind, text, self.session.record.step))

    async def removed(self) -> None:
        """Wait until the removal that was asked for is done. Raises `DCNRError` if the session had to stay."""
        if self._removed is not None:
            await asyncio.shield(self._removed)

    async def act(self, event: Event) -> None:
        """Do what somebody asks for; it is durable then, so that no crash takes back what was answered.

        Raises `ActionRefusedError`; StoreUnavailableError if it can't be stored soon. Then it is done all the same, but
        no run begins before that is stored.
        """
        await self.service.vigil.sure()
        self.feed(event)
        await self._durable()

    async def _durable(self) -> None:
        changes = self._changes
        try:
            async with asyncio.timeout(DURABLE_S):
                while self._stored < changes and not self.gone.is_set():
                    self.service.check_term()
                    await self._written.wait()
        except TimeoutError:
            name, text = self.session.id, f"that could not be stored within {DURABLE_S:g} s"
            text += f": {self._trouble}" if self._trouble else ""
            if "run" in self.session.waits:
                raise StoreUnavailableError(
                    f"{name} is not started yet, since {text}",
                    hint=f"it starts once the store answers, if this orchestrator lives so long; or: dcnr pause {name}",
                ) from None
            raise StoreUnavailableError(
                f"{name} is {self.session.state.value}, but {text}",
                hint="it is stored as soon as the store answers, if this orchestrator lives so long; ask again then",
            ) from None
        self.service.check_term()

    def wake(self) -> None:
        """Whoever waits for something to be durable looks again."""
        written, self._written = self._written, asyncio.Event()
        written.set()

    async def create(self) -> None:
        """Store the new session. Raises `DCNRError`."""
        record = self.session.record
        record.term = self.service.term
        deadline = self.service.now() + DURABLE_S
        async with self._writing:
            while True:
                try:
                    await self.service.truth.put_session(record.session, sealed_session(record))
                    break
                except StoreUnavailableError:
                    if self.service.now() > deadline:
                        raise
                except OvertakenError as error:  # by a former one, and nobody was told of that
                    if self.service.now() > deadline:
                        raise
                    found = unseal(error.data, SessionRecord, key=session_key(record.session))
                    record.epoch = max(record.epoch, found.epoch)
                    continue
                await asyncio.sleep(WRITE_PAUSE_S)
        self.service.registry.put_session(record)
        self.note("state", "created")

    # ------------------------------------------------------------ out

    def _carry(self, command: Command) -> None:
        service, record = self.service, self.session.record
        match command:
            case Log(kind=kind, text=text, step=step, steps=steps):
                self.log.append(kind, text, step, service.wall(), steps)
                if kind != "progress":
                    service.logger.info(kind, session=record.session, step=step, text=text)
                self._stir()
            case Record(epoch=epoch, run=run):
                if epoch:
                    self.placing.raised(epoch)
                service.registry.put_session(record)
                self._store(epoch, run)
                self._stir()
            case events.Place():
                self.placing.begin(command)
            case events.Survey():
                self.placing.survey()
            case Send(key=key):
                self._asks[key] = service.spawn(self._ask(command), f"{key} of {record.session}")
            case Tell(pnodes=pnodes, message=message, sure=sure):
                for pnode in pnodes:
                    service.tell(pnode, message, limit_s=RELEASE_S if sure else 0.0)
            case events.Commit(step=step):
                service.spawn(self.cutting.commit(record.epoch, step), f"commit of {record.session}")
            case events.Delete():
                self._removed = asyncio.get_running_loop().create_future()
                service.spawn(self._delete(), f"removal of {record.session}", durable=True)
            case _:
                assert_never(command)

    def _stir(self) -> None:
        """Wake whoever watches this session."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _ask(self, command: Send) -> None:
        if self.service.over:
            return
        peer = self.peers.get(command.pnode)
        if peer is None:
            self.feed(events.Denied(command.key, command.pnode, "it is not part of the deployment"))
            return
        message, frames = (command.message, []) if command.message is not None else self.placing.prepare()
        try:
            await self.service.bus.ask(peer, message, frames, timeout_s=command.limit_s)
        except DCNRError as error:
            code = str(error.code) if isinstance(error, RefusedError) else ""
            if code == STALE_TERM:
                self.service.vigil.doubt()
            if code == UNHEALTHY:
                self.service.members.carry(self.service.membership.unhealthy(peer, error.message))
            if command.message is None and code:
                self.placing.refused(code)
            text = said_by(command.pnode, error.message) if code else error.message
            self.feed(events.Denied(command.key, command.pnode, text, error.hint, code))
        else:
            self.feed(events.Answered(command.key))

    # ------------------------------------------------------------ the record

    def _store(self, epoch: int, run: bool) -> None:
        """Have the record as it is now stored; a write under way is followed by it."""
        self.session.record.term = self.service.term
        self._latest, self._raised = sealed_session(self.session.record), max(self._raised, epoch)
        self._runs = self._runs or run
        self._changes += 1
        if self._writer is None or self._writer.done():
            self._writer = self.service.spawn(self._write(), f"record of {self.session.id}", durable=True)

    async def _write(self) -> None:
        """Store the newest record, for as long as it takes."""
        async with self._writing:
            while self._latest and not self.gone.is_set():
                data, epoch, run = self._latest, self._raised, self._runs
                self._latest, self._raised, self._runs = b"", 0, False
                changes = self._changes
                try:
                    await self.service.truth.put_session(self.session.id, data)
                except StoreUnavailableError as error:
                    self._trouble = said_by("the orchestrator", error.message)
                    self.service.logger.warning("not stored yet", session=self.session.id, error=str(error))
                    for key in ("raise", "run"):
                        self.feed(events.Troubled(key, self._trouble))
                    self._again(data, epoch, run)
                    await asyncio.sleep(WRITE_PAUSE_S)
                except OvertakenError as error:
                    found = unseal(error.data, SessionRecord, key=session_key(self.session.id))
                    self.session.saw_epoch(found.epoch)
                    late = found.term == self.service.term  # a write of our own, whose answer did not come
                    if epoch and found.epoch >= epoch and not late and self.session.record.placement:
                        self.feed(events.NotRecorded(error.message, error.hint, found.epoch))
                    else:
                        self._again(data, epoch, run)
                except DCNRError as error:
                    if isinstance(error, SupersededError):
                        self.service.superseded(error)
                        return
                    self._trouble = error.message
                    self.service.logger.warning("not stored", session=self.session.id, error=str(error))
                    if epoch or run:
                        what = f"epoch {epoch}" if epoch else "that it is to run"
                        self.feed(events.NotRecorded(f"{what} could not be stored: {error.message}", error.hint))
                else:
                    self._stored, self._trouble = changes, ""
                    self.wake()
                    if run:
                        self.feed(events.RunRecorded())
                    if epoch:
                        self.feed(events.Recorded(epoch))

    def _again(self, data: bytes, epoch: int, run: bool) -> None:
        """What was not stored is tried again, unless there is something newer."""
        self._latest, self._raised, self._runs = self._latest or data, max(self._raised, epoch), self._runs or run

    async def _delete(self) -> None:
        """Forget the session: first the record, so that nothing half-deleted comes back, then what it stored.

        Its name stays taken until all is deleted, for what is below its prefix would be a namesake's.
        """
        name, left, problem = self.session.id, "", None
        try:
            async with self._writing, self.cutting.committer.lock:
                await self.service.forget_session(self)
                self.gone.set()
                try:
                    await delete_all(self.service.store, self.cutting.committer.prefix)
                except DCNRError as error:
                    left = error.message
        except DCNRError as error:
            problem = error
        except Exception as error:
            text, hint = defect(error)
            problem = DCNRError(text, hint=hint)
            raise
        finally:
            if self.gone.is_set():
                self.service.release_name(self)
            else:
                text = problem.message if problem is not None else "this orchestrator is ending"
                self.feed(events.NotDeleted(f"{name} could not be removed: {text}", problem.hint if problem else ""))
            if left:
                self.service.logger.warning("removed, but not all that it stored", session=name, error=left)
            if self._removed is not None and not self._removed.done():
                if problem is not None:
                    self._removed.set_exception(problem)
                    self._removed.exception()  # nobody has to be waiting for it
                else:
                    self._removed.set_result(None)
            self._stir()
            self.wake()

    async def close(self) -> None:
        """Store what is not stored yet, if that can be done soon."""
        if self._latest:
            with contextlib.suppress(DCNRError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._write()
