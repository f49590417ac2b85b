"""This PNode as a member of a cluster: it registers, reports, and finds its orchestrator again when that has moved.

While no orchestrator answers it asks ever more rarely, each time after a pause of random length, so that a cluster's
PNodes don't come all at once. After `Standing.silent_s` without one it also reads the term record in the store, and
asks at the addresses of a higher term. After each registration the sessions tell anew what no orchestrator can know.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

import structlog

from pnode.hub import Hub
from pnode.limits import lease_problem
from pnode.standing import Admission, Standing
from storage.store import Store
from storage.terms import read_term
from wire.directory import check_address
from wire.errors import DCNRError, UnreachableError
from wire.ids import new_request_id
from wire.messages import Goodbye, Heartbeat, HeartbeatAck, PeerRef, Profile, Refused, Register, Registered
from wire.requests import RefusedError

REGISTER_S = 5.0
BACK_OFF_S, MAX_BACK_OFF_S = 0.25, 10.0
READ_TERM_S = 10.0
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
        self, hub: Hub, member: Member, address: str, store: str, open_store: Callable[[str], Store],
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
        self._told = PeerRef("", 0, [address])  # by an option
        self._candidates = [self._told]

    # ------------------------------------------------------------------------------------ registering

    async def register(self, profile: Profile) -> None:
        """Register whenever there is no orchestrator that knows us. Raises RefusedError if there is one that won't."""
        if self._store:
            await self._use(self._store)
        while True:
            await self._away.wait()
            told, back_off = False, BACK_OFF_S
            while self._away.is_set():
                problem = await self._try(self._candidates[0], profile)
                if not problem:
                    break
                if not told:
                    self._log.warning("not registered, trying again", problem=problem)
                    told = True
                if self._hub.bus.queued_bytes(self._candidates[0]):
                    self._hub.bus.forget(self._candidates[0])  # it took nothing: no pile of questions for whoever comes
                self._candidates.append(self._candidates.pop(0))
                await asyncio.sleep(back_off * random.uniform(0.5, 1.0))
                back_off = min(2 * back_off, MAX_BACK_OFF_S)
                if self.standing.silent(self._hub.clock()):
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
        admission = self.standing.registered(answer, hub.clock())
        if admission is Admission.OVER:
            hub.counters["refused_term"] += 1
            return (
                f"{orchestrator.addresses} answers in term {answer.term}, which is over: {self.standing.term} is known"
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
        return ""

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
        found = PeerRef("", 0, record.addresses)
        if found not in self._candidates:
            self._log.warning("the store names another orchestrator", term=record.term, addresses=record.addresses)
            self._candidates = [found, self._told]

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
            try:
                self._hub.bus.send(self._hub.orchestrator, Goodbye(self._hub.name, self.standing.incarnation))
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
