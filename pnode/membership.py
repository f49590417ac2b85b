"""This PNode as a member of a cluster: it registers, reports, and finds its orchestrator again when that has moved.

While no orchestrator answers it asks ever more rarely, each time after a pause of random length, so that a cluster's
PNodes don't come all at once. After `Standing.silent_s` without one it also reads the term record in the store, and
asks at the addresses of a higher term. After each registration the sessions tell anew what no orchestrator can know.

Store, term and addresses are remembered in the home folder (`remembered`): after a restart they are used as if the
process had never ended. Only at the address that it was told by an option may a PNode come into another cluster.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

import structlog

from pnode.hub import Hub
from pnode.limits import lease_problem
from pnode.remembered import Remembered, memory_file, recall, remember
from pnode.standing import Admission, Standing
from storage.store import Store
from storage.terms import read_term
from wire.directory import check_address
from wire.errors import DCNRError, UnreachableError
from wire.ids import new_request_id
from wire.messages import Admitted, Goodbye, Heartbeat, HeartbeatAck, PeerRef, Profile, Refused, Register, Registered
from wire.requests import RefusedError
from wire.roles import ORCHESTRATOR

REGISTER_S = 5.0
BACK_OFF_S, MAX_BACK_OFF_S = 0.25, 10.0
READ_TERM_S = 10.0
MAX_TOLD = 8
"""Different reasons why no orchestrator takes this PNode that are logged, until one does."""
FINAL = frozenset({"held", "identity", "full", "odd-answer"})
"""Refusals after which it makes no sense to ask again."""


class Member(Protocol):
    """What membership needs to know of the rest of the daemon."""

    def beat(self, incarnation: int, term: int) -> Heartbeat:
        """The report of now."""

    def admitted(self, *, moved: bool) -> None:
        """Registered (again); `moved`: with another cluster than before."""


class Membership:
    """See the module. `store`: fixed by an option, "" for the orchestrator's."""

    def __init__(
        self, hub: Hub, member: Member, store: str, open_store: Callable[[str], Store],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:  # fmt: skip
        self.standing = Standing(hub.clock())
        self.registered = asyncio.Event()
        self._hub = hub
        self._member = member
        self._store = store
        self._open_store = open_store
        self._log = log
        self._away = asyncio.Event()
        self._away.set()
        self._told = hub.orchestrator  # by an option or a token
        self._candidates = [self._told]
        self._file = memory_file(hub.home, hub.name)
        self._remembered: Remembered | None = None

    # ------------------------------------------------------------------------------------ registering

    async def register(self, profile: Profile) -> None:
        """Register whenever there is no orchestrator that knows us. Raises RefusedError if there is one that won't."""
        if self._store:
            await self._use(self._store)
        await self._recall()
        while True:
            await self._away.wait()
            told, back_off = set[str](), BACK_OFF_S
            while self._away.is_set():
                problem = await self._try(self._candidates[0], profile)
                if not problem:
                    break
                if problem not in told and len(told) < MAX_TOLD:
                    self._log.warning("not registered, trying again", problem=problem)
                    told.add(problem)
                if self._hub.bus.queued_bytes(self._candidates[0]):
                    self._hub.bus.forget(self._candidates[0])  # it took nothing: no pile of questions for whoever comes
                self._candidates.append(self._candidates.pop(0))
                await asyncio.sleep(back_off * random.uniform(0.5, 1.0))
                back_off = min(2 * back_off, MAX_BACK_OFF_S)
                restarted = self._remembered is not None and not self.registered.is_set()
                if restarted or self.standing.silent(self._hub.clock()):
                    await self._look_into_store()

    async def _try(self, orchestrator: PeerRef, profile: Profile) -> str:
        """Ask one orchestrator; "" if it took this PNode, else why not."""
        hub = self._hub
        request = Register(str(new_request_id()), hub.name, hub.bus.me, profile, self.standing.incarnation)
        try:
            answer, _ = await hub.bus.ask(orchestrator, request, timeout_s=REGISTER_S)
        except UnreachableError as error:
            return str(error)
        except RefusedError as error:
            if error.code in FINAL:
                raise
            return str(error)
        if not isinstance(answer, Registered):
            raise RefusedError("odd-answer", f"the orchestrator answered {type(answer).__name__} to Register")
        if orchestrator is not self._told and self.standing.cluster not in ("", answer.cluster):
            self._leave(orchestrator, answer.incarnation)
            return f"{orchestrator.addresses} is of the cluster {answer.cluster}, {self.standing.cluster} is looked for"
        admission = self.standing.registered(answer, hub.clock())
        if admission is Admission.OVER:
            hub.counters["refused_term"] += 1
            since = "" if self.registered.is_set() else f", from {self._file}"
            return (
                f"{orchestrator.addresses} answers in term {answer.term}, which is over: {self.standing.term} is known"
                f"{since}"
            )
        if problem := lease_problem(hub.bounds, answer.lease_s):
            self._log.warning(problem)
        hub.orchestrator = orchestrator
        await self._use(self._store or answer.store)
        self._away.clear()
        self.registered.set()
        self._log.info(
            "registered", incarnation=answer.incarnation, term=answer.term, cluster=answer.cluster,
            store=hub.store.url if hub.store is not None else "", at=orchestrator.addresses,
        )  # fmt: skip
        self._member.admitted(moved=admission is Admission.MOVED)
        await self._remember(orchestrator)
        return ""

    async def _recall(self) -> None:
        """Begin with what an earlier process of this PNode knew."""
        found, problem = await asyncio.to_thread(recall, self._file, self._told.addresses[0])
        try:
            if found is not None and not self._store:
                await self._use(found.store)
        except DCNRError as error:
            found, problem = None, str(error)
        if problem:
            self._log.warning("what was remembered does not count", file=str(self._file), problem=problem)
        if found is None:
            return
        self._remembered = found
        self.standing.recall(found.cluster, found.term)
        moved = (found.addresses, found.key) != (self._told.addresses, self._told.key)
        if moved and self._trusts(found.key):
            self._candidates = [self._told, PeerRef("", 0, found.addresses, found.key)]
        self._log.info("remembered", cluster=found.cluster, term=found.term, addresses=found.addresses)

    async def _remember(self, orchestrator: PeerRef) -> None:
        """For the next process of this PNode."""
        standing = self.standing
        known = Remembered(
            self._told.addresses[0], standing.cluster, standing.term, orchestrator.addresses, self._hub.store_url,
            key=orchestrator.key,
        )  # fmt: skip
        if known == self._remembered:
            return
        try:
            await asyncio.to_thread(remember, self._file, known)
        except OSError as error:
            self._log.warning("can't be remembered", file=str(self._file), error=str(error))
        else:
            self._remembered = known

    async def _use(self, url: str) -> None:
        """Use this store from now on."""
        hub = self._hub
        if url and url != hub.store_url:
            old, hub.store, hub.store_url = hub.store, self._open_store(url), url
            if old is not None:
                await old.close()

    async def _look_into_store(self) -> None:
        """Is there an orchestrator of a higher term, and where?"""
        store = self._hub.store
        if store is None:
            return
        try:
            async with asyncio.timeout(READ_TERM_S):
                record = await read_term(store)
            if record is None or not self.standing.follows(record):
                return
            for address in record.addresses:
                check_address(address)
        except (DCNRError, TimeoutError) as error:
            self._log.info("no term to be read", error=str(error))
            return
        if not self._trusts(record.key):
            return
        found = PeerRef("", 0, record.addresses, record.key)
        if found not in self._candidates:
            self._log.warning("the store names another orchestrator", term=record.term, addresses=record.addresses)
            self._candidates = [found, self._told]

    def _trusts(self, key: str) -> bool:
        """Whether an orchestrator of this key may be talked to, as far as keys go; it is let in then."""
        admission = self._hub.admission
        if admission is None:
            return True
        if key:
            admission.pin(Admitted(key, ORCHESTRATOR, ORCHESTRATOR))
        return bool(key)

    # ------------------------------------------------------------------------------------ reporting

    async def report(self) -> None:
        """Report for ever, and notice when nobody answers."""
        while True:
            await self.registered.wait()
            if not self._away.is_set():
                self.report_now()
                if silent := self.standing.silent(self._hub.clock()):
                    self._log.warning("orchestrator is silent, registering again", seconds=round(silent, 1))
                    self._away.set()
            await asyncio.sleep(self.standing.report_every_s)

    def report_now(self) -> None:
        """Report once."""
        standing = self.standing
        if not standing.incarnation:
            return
        try:
            self._hub.bus.send(self._hub.orchestrator, self._member.beat(standing.incarnation, standing.term))
        except DCNRError as error:
            self._log.debug("no heartbeat", error=str(error))

    def acknowledged(self, sender: PeerRef, ack: HeartbeatAck) -> None:
        """A report was answered."""
        if self.standing.acknowledged(ack, sender.boot, self._hub.clock()):
            self._away.set()

    def lost(self, peer: PeerRef, reason: str) -> bool:
        """The bus gave a process up. True if it was the orchestrator."""
        mine = bool(set(peer.addresses) & set(self._hub.orchestrator.addresses))
        if mine and self.registered.is_set():
            self._log.warning("orchestrator lost", reason=reason)
            self._away.set()
        return mine

    def say_goodbye(self) -> None:
        """This PNode ends in good order."""
        if self.standing.incarnation:
            self._leave(self._hub.orchestrator, self.standing.incarnation)

    def _leave(self, orchestrator: PeerRef, incarnation: int) -> None:
        try:
            self._hub.bus.send(orchestrator, Goodbye(self._hub.name, incarnation))
        except DCNRError as error:
            self._log.debug("no goodbye", error=str(error))

    # ------------------------------------------------------------------------------------ fencing

    def fenced(self, sender: PeerRef, request_id: str, term: int) -> bool:
        """Whether an orchestrator that was replaced is commanding; then it is told so."""
        if self.standing.obeys(sender.boot, term):
            return False
        known = self.standing.term
        self._refused(f"term {term} from {sender.id}, known is {known}")
        text = f"term {term} is over, term {known} is known here"
        self._hub.bus.send(sender, Refused(request_id, "stale-term", text, "stop this orchestrator"))
        return True

    def outdated(self, sender: PeerRef) -> bool:
        """Whether a message without a term comes from an orchestrator that was replaced."""
        if self.standing.outdated(sender.boot):
            self._refused(f"an orchestrator of a term that is over: {sender.id}, boot {sender.boot}")
            return True
        return False

    def _refused(self, text: str) -> None:
        self._hub.counters["refused_term"] += 1
        self._log.debug("refused", code="term", text=text)
