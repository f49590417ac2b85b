"""The driver of one session: carries out what its core asks for, and tells the core what came of it.

It decides nothing. Store writes of one session happen one after another, so that what is stored never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, assert_never

import msgspec

from orchestrator import events
from orchestrator.commits import BadPartsError, Committer, CutCollector, environment_note, manifest_of
from orchestrator.eventlog import EventLog
from orchestrator.events import Command, Event, Log, Record, Send, Tell
from orchestrator.lifecycle import Stage
from orchestrator.placement import Plan, hand_placed, plan
from orchestrator.sessions import Session
from orchestrator.truth import SupersededError, sealed_session
from storage.retention import delete_all, newest_complete
from storage.store import StoreUnavailableError
from wire.errors import DCNRError
from wire.messages import Deployment, Message, PartsSaved, PeerRef, Prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.catalog import Listed
    from orchestrator.service import Service
    from storage.checkpoints import Resume
    from wire.messages import Part

RELEASE_S = 20.0
WRITE_TRIES, WRITE_PAUSE_S = 10, 1.0
RUNNING = ("running", "pausing", "stopping")


class SessionDriver:
    """One session with its log, its committer and its tasks."""

    def __init__(self, service: Service, session: Session, log: EventLog) -> None:
        self.service = service
        self.session = session
        self.log = log
        self.changed = asyncio.Event()
        self.gone = asyncio.Event()
        self._removed: asyncio.Future[None] | None = None
        self.peers: dict[str, PeerRef] = {}
        self.memory_bytes: dict[str, int] = {}
        self.committer = Committer(service.store, session.record.network, session.id)
        self._cuts: CutCollector | None = None
        self._ready: dict[int, tuple[list[Part], list[str]]] = {}
        self._listed: Listed | None = None
        self._resume: Resume | None = None
        self._placing: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._latest = b""

    # ------------------------------------------------------------ in

    def feed(self, event: Event) -> None:
        """Tell the core, and carry out what it asks for. Raises `ActionRefusedError`."""
        for command in self.session.handle(event, self.service.now()):
            self._carry(command)

    def parts_saved(self, message: PartsSaved, parts: Sequence[Part]) -> None:
        """A PNode's parts of a cut are in the store."""
        if self._cuts is None or message.epoch != self._cuts.epoch:
            return
        try:
            cut = self._cuts.add(message.pnode, message.step, parts, message.environment)
        except BadPartsError as error:
            self.note("warning", str(error))
            return
        if cut is not None:
            self._ready[message.step] = (self._cuts.ordered(cut), sorted(cut.environments))
            self.feed(events.PartsArrived(message.epoch, message.step))

    def note(self, kind: str, text: str) -> None:
        """A line for the log that changes nothing."""
        self._carry(Log(kind, text, self.session.record.step))

    def awaited_parts(self) -> list[str]:
        """Whose parts are awaited, as sentences."""
        if self._cuts is None:
            return []
        return [f"{', '.join(names)}: parts of step {step}" for step, names in self._cuts.awaited().items() if names]

    async def removed(self) -> None:
        """Wait until the removal that was asked for is done. Raises `DCNRError` if the session had to stay."""
        if self._removed is not None:
            await asyncio.shield(self._removed)

    async def create(self) -> None:
        """Store the new session. Raises `DCNRError`."""
        record = self.session.record
        async with self._writing:
            await self._write_bytes(sealed_session(record))
        self.service.registry.put_session(record)
        self.note("state", "created")

    def restored(self) -> None:
        """The session was found interrupted at the start."""
        record = self.session.record
        self._carry(Log("error", f"{record.error} ({record.hint})", record.step))
        self._carry(Record())

    # ------------------------------------------------------------ out

    def _carry(self, command: Command) -> None:
        service, record = self.service, self.session.record
        match command:
            case Log(kind=kind, text=text, step=step, steps=steps):
                self.log.append(kind, text, step, service.wall(), steps)
                if kind != "progress":
                    service.logger.info(kind, session=record.session, step=step, text=text)
                self._stir()
            case Record(epoch=epoch):
                service.registry.put_session(record)
                self._latest = sealed_session(record)
                service.spawn(self._write(epoch), f"record of {record.session}", durable=True)
                self._stir()
            case events.Place(pnodes=pnodes, placement=placement):
                if self._placing is not None:
                    self._placing.cancel()
                self._placing = service.spawn(self._place(pnodes, placement), f"placement of {record.session}")
            case Send():
                service.spawn(self._ask(command), f"{command.key} of {record.session}")
            case Tell(pnodes=pnodes, message=message, sure=sure):
                for pnode in pnodes:
                    service.tell(pnode, message, limit_s=RELEASE_S if sure else 0.0)
            case events.Commit(step=step):
                service.spawn(self._commit(record.epoch, step), f"commit of {record.session}")
            case events.Delete():
                self._removed = asyncio.get_running_loop().create_future()
                service.spawn(self._delete(), f"removal of {record.session}", durable=True)
            case _:
                assert_never(command)

    def _stir(self) -> None:
        """Wake whoever watches this session."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _write(self, epoch: int) -> None:
        """Store the newest record, unless a later write did already."""
        async with self._writing:
            data, self._latest = self._latest, b""
            if self.gone.is_set():
                return
            try:
                if data:
                    await self._write_bytes(data)
            except DCNRError as error:
                if isinstance(error, SupersededError):
                    self.service.superseded(error)
                if epoch:
                    self.feed(events.NotRecorded(f"epoch {epoch} could not be stored: {error.message}", error.hint))
                else:
                    self.service.logger.warning("not stored", session=self.session.id, error=str(error))
                    self._latest = self._latest or data
                return
        if epoch:
            self.feed(events.Recorded(epoch))

    async def _write_bytes(self, data: bytes) -> None:
        for attempt in range(WRITE_TRIES):
            try:
                await self.service.truth.put_session(self.session.id, data)
                return
            except StoreUnavailableError:
                if attempt + 1 == WRITE_TRIES:
                    raise
                await asyncio.sleep(WRITE_PAUSE_S)

    # ------------------------------------------------------------ placing

    async def _place(self, pnodes: int, wanted: dict[str, str]) -> None:
        session, record, service = self.session, self.session.record, self.service
        try:
            async with self.committer.lock:
                resume = await newest_complete(service.store, self.committer.prefix)
                self.committer.head = resume.head
                self.committer.environment = list(resume.manifest.environment) if resume.manifest else []
            step = resume.manifest.step if resume.manifest is not None else 0
            problems = list(resume.problems)
            if step < record.committed:
                problems.append(f"step {record.committed} was committed, but the newest complete checkpoint is {step}")
            listed = await service.catalog.get(record.network_digest)
            if record.data_digest and listed.graph.loss is None:
                raise DCNRError(f"{record.network} has no loss, so it can't be trained", hint="dcnr net show")
            machines, cores = service.machines(but=session.id)
            result: Plan = (
                await asyncio.to_thread(hand_placed, listed.work, machines, wanted, cores=cores)
                if wanted
                else await asyncio.to_thread(plan, listed.work, machines, pnodes=pnodes, cores=cores)
            )
        except asyncio.CancelledError:
            raise
        except DCNRError as error:
            self.feed(events.NotPlaced(error.message, error.hint))
            return
        except Exception as error:
            self.feed(events.NotPlaced(*_defect(error)))
            raise
        if session.stage is not Stage.PLACING:
            return
        self._listed, self._resume = listed, resume
        placement = {str(node): pnode for node, pnode in result.placement.items()}
        members = {pnode: service.membership.find(pnode) for pnode in dict.fromkeys(placement.values())}
        lost = [pnode for pnode, member in members.items() if member is None]
        if lost:
            self.feed(events.NotPlaced(f"{', '.join(lost)} left while VNodes were being placed", "try again"))
            return
        self.peers = {pnode: member.peer for pnode, member in members.items() if member is not None}
        self.memory_bytes = dict(result.forecast.memory_bytes)
        incarnations = {pnode: member.incarnation for pnode, member in members.items() if member is not None}
        loss = placement[str(listed.graph.loss)] if listed.graph.loss is not None else ""
        self._cuts = CutCollector(record.epoch + 1, placement, listed.stateful)
        self._ready.clear()
        service.registry.put_placement(session.id, record.epoch + 1, placement)
        step_s = result.forecast.step_s
        self.feed(events.Placed(placement, incarnations, loss, step, result.reasons, tuple(problems), step_s))

    def _prepare(self) -> tuple[Message, list[bytes]]:
        """The message and body that deploy this epoch on any of its PNodes."""
        record, deployment, resume = self.session.record, self.session.deployment, self._resume
        assert deployment is not None
        assert resume is not None
        head = resume if resume.manifest is not None else None
        body = Deployment(
            session=record.session,
            network=record.network,
            network_digest=record.network_digest,
            placement=deployment.placement,
            peers=self.peers,
            incarnations=deployment.incarnations,
            orchestrator=self.service.bus.me,
            data_digest=record.data_digest,
            tokenizer_digest=record.tokenizer_digest,
            steps=record.steps,
            seed=record.seed,
            start_step=deployment.start_step,
            manifest_digest=head.manifest_digest if head is not None else "",
            manifest_key=head.manifest_key if head is not None else "",
            store_prefix=self.committer.prefix,
            checkpoint_every=record.checkpoint_every,
            trace=record.trace,
        )
        message = Prepare(self.service.new_id(), record.session, deployment.epoch, 0, self.service.term)
        return message, [msgspec.msgpack.encode(body)]

    async def _ask(self, command: Send) -> None:
        peer = self.peers.get(command.pnode)
        message, frames = (command.message, []) if command.message is not None else self._prepare()
        if peer is None:
            self.feed(events.Denied(command.key, command.pnode, "it is not part of the deployment"))
            return
        try:
            await self.service.bus.ask(peer, message, frames, timeout_s=command.limit_s)
        except DCNRError as error:
            self.feed(events.Denied(command.key, command.pnode, error.message, error.hint))
        else:
            self.feed(events.Answered(command.key))

    # ------------------------------------------------------------ commits

    async def _commit(self, epoch: int, step: int) -> None:
        record, service = self.session.record, self.service
        async with self.committer.lock:
            if self.session.removing:
                return
            ready = self._ready.pop(step, None)
            cuts, listed = self._cuts, self._listed
            if ready is None or cuts is None or listed is None or cuts.epoch != epoch or record.epoch != epoch:
                return
            parts, environment = ready
            before = self.committer.environment
            data = listed.recipe.data
            manifest = manifest_of(
                record,
                parts,
                step=step,
                head=self.committer.head,
                term=service.term,
                batch=listed.recipe.batch,
                sampler=data.sampler if data is not None else "",
                environment=environment,
                created_s=service.wall(),
            )
            cuts.done(step)
            under_way = cuts.under_way() | {part.digest for later, _ in self._ready.values() for part in later}
            try:
                head = await self.committer.commit(manifest)
            except DCNRError as error:
                self.feed(events.CommitFailed(step, error.message, error.hint))
                return
            except Exception as error:
                self.feed(events.CommitFailed(step, *_defect(error)))
                raise
            if problem := await self.committer.prune(record.keep, under_way):
                self.note("warning", problem)
        note = environment_note(before, environment)
        self.feed(events.Committed(epoch, step, head.hash, note))

    async def _delete(self) -> None:
        """Forget the session: first the record, so that nothing half-deleted comes back, then what it stored.

        Its name stays taken until all is deleted, for what is below its prefix would be a namesake's.
        """
        name, left, problem = self.session.id, "", None
        try:
            async with self._writing, self.committer.lock:
                await self.service.forget_session(self)
                self.gone.set()
                try:
                    await delete_all(self.service.store, self.committer.prefix)
                except DCNRError as error:
                    left = error.message
        except DCNRError as error:
            problem = error
        except Exception as error:
            text, hint = _defect(error)
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

    async def close(self) -> None:
        """Store what is not stored yet."""
        if self._latest:
            with contextlib.suppress(DCNRError):
                await self._write(0)


def _defect(error: Exception) -> tuple[str, str]:
    """Text and hint of what nobody foresaw: whoever waits has to hear of it now, not at a deadline."""
    return f"{type(error).__name__}: {error}", "this is a defect of DCNR: please report it, with the orchestrator's log"
