"""The allow-list at work: read from the store, changed there first, then in force here, then sent to the PNodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from orchestrator.allowlist import AdmissionRefusedError, MembersRecord, shown
from orchestrator.membership import LIVING
from orchestrator.truth import OvertakenError
from storage.sealed import unseal
from wire.admission import Admission
from wire.joining import guest_id
from wire.keys import KeyPair
from wire.messages import Admitted, InviteInfo, Join, Joined, MemberInfo, Members, PeerRef
from wire.roles import JOIN
from wire.tokens import Token

if TYPE_CHECKING:
    from orchestrator.service import Service

T = TypeVar("T")

TRIES = 5
MAX_LIFETIME_S = 366 * 86_400.0


class Guests:
    """The allow-list of one orchestrator; only where there are keys."""

    def __init__(self, service: Service, admission: Admission, keys: KeyPair, clients: list[Admitted]) -> None:
        self._service = service
        self._admission = admission
        self._keys = keys
        self._clients = clients
        self._record = MembersRecord()
        self._changing = asyncio.Lock()

    async def open(self, name: str) -> None:
        """Read the list, before anybody is let in; with this orchestrator's own key in it."""
        self._record = await self._service.truth.members()
        own = self._record.own(self._keys.public, name, self._service.wall(), clients=self._clients)
        self._force(own)

    async def store(self, name: str) -> None:
        """Make this orchestrator's own key durable, once it has its term."""
        await self._change(
            lambda record: (record.own(self._keys.public, name, self._service.wall(), clients=self._clients), None)
        )

    def _force(self, record: MembersRecord) -> None:
        self._record = record
        self._admission.replace(max(record.list_version, self._admission.version + 1), record.entries)

    async def _change(self, how: Callable[[MembersRecord], tuple[MembersRecord, T]]) -> T:
        """Change the list: in the store, here, at the PNodes. Raises `DCNRError`; then nothing has changed."""
        service = self._service
        async with self._changing:
            base = await service.truth.members()
            for _ in range(TRIES):
                record, result = how(base)
                if record == base:
                    self._force(record)
                    return result
                record = msgspec.structs.replace(record, term=service.term)
                try:
                    await service.truth.put_members(record)
                except OvertakenError as error:
                    base = unseal(error.data, MembersRecord, key="members")
                    continue
                self._force(record)
                for member in list(service.membership.members.values()):
                    if member.state in LIVING:
                        self.tell(member.peer)
                return result
        raise AdmissionRefusedError("busy", "the allow-list is changed by others all the time", "try again")

    def tell(self, peer: PeerRef) -> None:
        """Send a PNode the list."""
        body = msgspec.msgpack.encode(self._record.shared())
        self._service.send(peer, Members(self._record.list_version), [body])

    # ------------------------------------------------------------ requests

    def members(self) -> list[MemberInfo]:
        """Who is let in."""
        now = self._service.wall()
        return [shown(entry) for entry in self._record.entries if not entry.until or entry.until > now]

    async def invite(self, grants: str, uses: int, lifetime_s: float) -> InviteInfo:
        """A token. Raises `DCNRError`."""
        if not 0 <= lifetime_s <= MAX_LIFETIME_S:
            raise AdmissionRefusedError("lifetime", "a token lives for a year at most", "0: for good")
        now, pair = self._service.wall(), KeyPair.new()
        until = now + lifetime_s if lifetime_s else 0.0
        entry = Admitted(pair.public, guest_id(pair.public), JOIN, until, uses, grants)
        await self._change(lambda record: (record.invited(entry, now), None))
        me = self._service.bus.me
        token = Token(tuple(me.addresses), me.id, self._keys.public, pair, until, grants)
        return InviteInfo(token.text(), shown(entry))

    async def revoke(self, member: str) -> MemberInfo:
        """Let somebody in no longer. Raises `DCNRError`."""
        entry = await self._change(lambda record: record.revoked(member, self._service.wall()))
        self._service.logger.warning("revoked", member=entry.id, fingerprint=shown(entry).fingerprint)
        return shown(entry)

    async def join(self, sender: PeerRef, message: Join) -> Joined:
        """Admit who has a token. Raises `DCNRError`."""
        entry = await self._change(
            lambda record: record.joined(sender.key, message.name, message.key, self._service.wall())
        )
        self._service.logger.info("admitted", member=entry.id, role=entry.role, fingerprint=shown(entry).fingerprint)
        return Joined(message.request_id, entry.id, entry.role, self._record.list_version)
