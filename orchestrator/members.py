"""The driver of membership: carries out what `membership` decides, and tells the sessions who is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator import events, membership
from orchestrator.lifecycle import Stage
from orchestrator.truth import SupersededError
from wire.errors import DCNRError, UnreachableError
from wire.messages import Heartbeat, InspectRun, Registered, Release
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

    def carry(self, commands: Sequence[membership.Command]) -> None:
        """Carry out what membership asks for, in order."""
        service = self._service
        for command in commands:
            match command:
                case membership.Grant():
                    service.spawn(self._grant(command), f"registration of {command.pnode}")
                case membership.Refuse(peer=peer, request_id=request_id, code=code, text=text, hint=hint):
                    service.logger.warning("refused", peer=peer.id, text=text)
                    service.answer_refused(peer, request_id, code, text, hint)
                case membership.Probe():
                    service.spawn(self._probe(command), f"probe of {command.pnode}")
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

    def release_strays(self, message: Heartbeat) -> None:
        """Tell a PNode that still holds a deployment which is over. (A take-over of its run would begin here.)"""
        service = self._service
        for beat in message.sessions:
            driver = service.sessions.get(beat.session)
            session = driver.session if driver is not None else None
            if session is not None and session.stage is not Stage.DOWN and beat.epoch >= session.record.epoch:
                continue
            key, now = (message.pnode, beat.session, beat.epoch), service.now()
            if self._released.get(key, -STRAY_S) < now - STRAY_S:
                if len(self._released) >= MAX_RELEASED:
                    self._released.clear()
                self._released[key] = now
                release = Release(service.new_id(), beat.session, beat.epoch, service.term)
                service.tell(message.pnode, release, limit_s=STRAY_S)

    async def _grant(self, command: membership.Grant) -> None:
        """Make the incarnation durable, then let the PNode know it."""
        service = self._service
        if command.fresh:
            async with self._granting:
                try:
                    await service.truth.put_incarnations(service.membership.granted)
                except SupersededError as error:
                    service.superseded(error)
                    return
                except DCNRError as error:
                    service.answer_refused(command.peer, command.request_id, "store", error.message, error.hint)
                    return
            self._index(command.pnode)
        lease_s = service.membership.lease_s
        report_s = min(membership.REPORT_EVERY_S, lease_s / 5)
        url, cluster = service.store.url, service.truth.term.cluster
        answer = Registered(command.request_id, command.incarnation, service.term, lease_s, report_s, url, cluster)
        service.send(command.peer, answer)

    def _index(self, pnode: str) -> None:
        member = self._service.membership.find(pnode)
        if member is not None:
            self._service.registry.put_pnode(
                pnode, member.incarnation, member.peer, member.state.value, self._service.wall()
            )

    async def _probe(self, command: membership.Probe) -> None:
        """Any answer counts; a PNode refuses to inspect a session that does not exist."""
        service = self._service
        question = InspectRun(service.new_id(), "probe", 0)
        try:
            await service.bus.ask(command.peer, question, timeout_s=membership.PROBE_S)
        except RefusedError:
            pass
        except UnreachableError:
            silent = service.membership.silent(command.pnode, command.peer, service.now(), service.wall())
            self.carry(silent)
            return
        self.carry(service.membership.answered(command.pnode, command.peer, service.now(), service.wall()))
