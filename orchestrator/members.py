"""The driver of membership: carries out what `membership` decides, and tells the sessions who came and who is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator import events, membership
from orchestrator.lifecycle import Stage
from orchestrator.records import INCARNATIONS_KEY, IncarnationRecord
from orchestrator.truth import OvertakenError, SupersededError
from storage.sealed import unseal
from wire.errors import DCNRError, UnreachableError
from wire.messages import Heartbeat, InspectRun, Registered, Release, ReportNow, SessionBeat
from wire.requests import RefusedError

if TYPE_CHECKING:
    from orchestrator.service import Service

STRAY_S = 5.0
MAX_RELEASED = 10_000


class Members:
    """Carries out commands of a service's membership."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._granting = asyncio.Lock()
        self._released: dict[tuple[str, str, int], float] = {}
        self.changed = asyncio.Event()
        """Set, and replaced by another, whenever a member's state may have changed."""

    def carry(self, commands: Sequence[membership.Command]) -> None:
        """Carry out what membership asks for, in order."""
        service = self._service
        if commands:
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()
        for command in commands:
            match command:
                case membership.Grant():
                    service.spawn(self._grant(command), f"registration of {command.pnode}")
                case membership.Refuse(peer=peer, request_id=request_id, code=code, text=text, hint=hint):
                    service.logger.warning("refused", peer=peer.id, text=text)
                    service.answer_refused(peer, request_id, code, text, hint)
                case membership.Probe():
                    service.spawn(self._probe(command), f"probe of {command.pnode}")
                case membership.AskReports(pnodes=pnodes):
                    for pnode in pnodes:
                        service.tell(pnode, ReportNow(), limit_s=0)
                case membership.Joined(pnode=pnode, incarnation=incarnation):
                    service.logger.info("joined", pnode=pnode, incarnation=incarnation)
                case membership.Lost(pnode=pnode, incarnation=incarnation, peer=peer, reason=reason):
                    service.logger.warning("lost", pnode=pnode, reason=reason)
                    self._index(pnode)
                    service.bus.forget(peer)
                    for driver in list(service.sessions.values()):
                        driver.feed(events.MemberLost(pnode, incarnation, reason))
                case membership.Note(text=text):
                    service.logger.warning(text)

    def report(self, message: Heartbeat, member: membership.Member) -> None:
        """Hand a member's report to the sessions that it concerns, and have it release what is over."""
        service = self._service
        said = {beat.session: beat for beat in message.sessions}
        for name, driver in list(service.sessions.items()):
            if driver.session.listens_to(member.id):
                driver.feed(events.Beat(member.id, member.incarnation, said.get(name)))
        for beat in message.sessions:
            if not self._is_over(beat):
                continue
            key, now = (member.id, beat.session, beat.epoch), service.now()
            if self._released.get(key, -STRAY_S) < now - STRAY_S:
                if len(self._released) >= MAX_RELEASED:
                    self._released.clear()
                self._released[key] = now
                release = Release(service.new_id(), beat.session, beat.epoch, service.term)
                service.tell(member.id, release, limit_s=STRAY_S)

    def _is_over(self, beat: SessionBeat) -> bool:
        """Whether nobody will go on from what that PNode holds; never while a session is being placed or adopted."""
        driver = self._service.sessions.get(beat.session)
        if driver is None:
            return True
        session = driver.session
        if session.stage is Stage.UP:
            return beat.epoch < session.record.epoch
        return session.stage is Stage.DOWN

    async def _grant(self, command: membership.Grant) -> None:
        """Make the incarnation durable, then let the PNode know it, then the sessions.

        While the store is away nothing is answered: the PNode asks again, and the next try is that question's.
        """
        service = self._service
        async with self._granting:
            member = service.membership.find(command.pnode)
            fresh = member is not None and member.incarnation == command.incarnation and not member.granted
            if fresh and not await self._made_durable():
                return
        lease_s = service.membership.lease_s
        report_s = min(membership.REPORT_EVERY_S, lease_s / 5)
        url, cluster = service.store_url, service.truth.term.cluster
        answer = Registered(command.request_id, command.incarnation, service.term, lease_s, report_s, url, cluster)
        if service.guests is not None:
            service.guests.tell(command.peer)
        service.send(command.peer, answer)
        if fresh:
            self._index(command.pnode)
            service.membership.confirmed(command.pnode, command.incarnation)
            for driver in list(service.sessions.values()):
                driver.feed(events.MemberJoined(command.pnode, command.incarnation))

    async def _made_durable(self) -> bool:
        service = self._service
        try:
            await service.truth.put_incarnations(service.membership.granted)
        except SupersededError as error:
            service.superseded(error)
        except OvertakenError as error:
            found = unseal(error.data, IncarnationRecord, key=INCARNATIONS_KEY)
            service.membership.merge(found.granted)
        except DCNRError as error:
            service.logger.warning("incarnations not stored", error=str(error))
        else:
            return True
        return False

    def _index(self, pnode: str) -> None:
        member = self._service.membership.find(pnode)
        if member is not None:
            self._service.registry.put_pnode(
                pnode, member.incarnation, member.peer, member.state.value, self._service.wall()
            )

    async def _probe(self, command: membership.Probe) -> None:
        """Any answer counts; a PNode refuses to inspect a session that does not exist.

        It takes `limit_s` to say that there is none, also where the bus knows that at once: what is decided then may be
        to probe again.
        """
        service = self._service
        over = service.now() + command.limit_s
        question = InspectRun(service.new_id(), "probe", 0)
        try:
            await service.bus.ask(command.peer, question, timeout_s=command.limit_s)
        except RefusedError:
            pass
        except UnreachableError:
            await asyncio.sleep(max(0.0, over - service.now()))
            silent = service.membership.silent(command.pnode, command.peer, service.now(), service.wall())
            self.carry(silent)
            return
        self.carry(service.membership.answered(command.pnode, command.peer, service.now(), service.wall()))
