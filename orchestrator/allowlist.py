"""Decisions about the allow-list: invitations, joins, revocations. Pure: the time (wall clock) is passed in.

The record in the store is the truth. Each change gives it a higher version; entries that have ended are dropped on the
way. An invitation that is used up stays until its end, so that who comes too late is told so.
"""

from __future__ import annotations

import msgspec

from storage.members import MEMBERS_KEY as MEMBERS_KEY
from storage.members import MembersList
from wire.admission import MAX_ENTRIES
from wire.errors import DCNRError
from wire.ids import is_id
from wire.keys import fingerprint, is_key
from wire.messages import Admitted, MemberInfo
from wire.roles import CLIENT, JOIN, ORCHESTRATOR, PNODE

NO_LIMIT = -1
RESERVED = ("orchestrator", "storage")
"""Names of services, which nobody may take."""


class AdmissionRefusedError(DCNRError):
    """Somebody is not admitted, or an invitation can't be made. `code` is for programs."""

    def __init__(self, code: str, text: str, hint: str = "") -> None:
        super().__init__(text, hint=hint)
        self.code = code


class MembersRecord(MembersList, frozen=True, forbid_unknown_fields=True):
    """Who is let in, and how that may change."""

    def with_entries(self, entries: list[Admitted], now: float) -> MembersRecord:
        """The next version. Raises `AdmissionRefusedError`."""
        kept = [entry for entry in entries if not entry.until or entry.until > now]
        if len(kept) > MAX_ENTRIES:
            raise AdmissionRefusedError("full", f"{MAX_ENTRIES} are admitted already", "dcnr node revoke")
        return MembersRecord(self.list_version + 1, kept, self.term)

    def own(self, public: str, name: str, now: float, *, clients: list[Admitted]) -> MembersRecord:
        """With this orchestrator's key, and clients of its own home, in place of former ones; itself if it has them."""
        wanted = [Admitted(public, name, ORCHESTRATOR), *clients]
        if all(entry in self.entries for entry in wanted):
            return self
        keys, ids = {entry.key for entry in wanted}, {entry.id for entry in wanted}
        others = [entry for entry in self.entries if entry.key not in keys and entry.id not in ids]
        return self.with_entries([*wanted, *others], now)

    def invited(self, entry: Admitted, now: float) -> MembersRecord:
        """With an invitation. Raises `AdmissionRefusedError`."""
        if entry.grants not in (PNODE, CLIENT):
            raise AdmissionRefusedError("role", f"one can't be invited as {entry.grants!r}", "pnode or client")
        if entry.uses != NO_LIMIT and not 0 < entry.uses <= MAX_ENTRIES:
            raise AdmissionRefusedError("uses", f"{entry.uses} uses make no sense", f"1 to {MAX_ENTRIES}, or -1")
        return self.with_entries([*self.entries, entry], now)

    def joined(self, guest: str, name: str, public: str, now: float) -> tuple[MembersRecord, Admitted]:
        """With who knocked with the invitation's key `guest`; the same again for the same one again.

        Raises `AdmissionRefusedError`.
        """
        invitation = next((entry for entry in self.entries if entry.key == guest and entry.role == JOIN), None)
        if invitation is None or (invitation.until and now >= invitation.until):
            raise AdmissionRefusedError("ended", "this token has ended or was revoked", "dcnr node invite")
        if (
            not is_id(name)
            or not is_key(public)
            or name in RESERVED
            or name.startswith(("join-", "cli-")) != (invitation.grants == CLIENT)
        ):
            raise AdmissionRefusedError("name", f"{name[:63]!r} can't be the name of a {invitation.grants}")
        fresh = Admitted(public, name, invitation.grants)
        if fresh in self.entries:
            return self, fresh
        for entry in self.entries:
            if entry.id == name:
                text = f"{name} is another one's name here (key {fingerprint(entry.key)})"
                hint = f"choose another --name, or dcnr node revoke {name} if that one is gone"
                raise AdmissionRefusedError("name", text, hint)
            if entry.key == public:
                raise AdmissionRefusedError("key", f"this key is admitted as {entry.id}", f"use --name {entry.id}")
        if invitation.uses == 0:
            raise AdmissionRefusedError("used", "this token was used already", "dcnr node invite makes another")
        left = invitation.uses if invitation.uses == NO_LIMIT else invitation.uses - 1
        others = [entry for entry in self.entries if entry is not invitation]
        rest = msgspec.structs.replace(invitation, uses=left)
        return self.with_entries([*others, rest, fresh], now), fresh

    def revoked(self, member: str, now: float) -> tuple[MembersRecord, Admitted]:
        """Without the one of this id or fingerprint. Raises `AdmissionRefusedError`."""
        found = [entry for entry in self.entries if member in (entry.id, fingerprint(entry.key))]
        if not found:
            raise AdmissionRefusedError("unknown", f"nobody is admitted as {member[:63]!r}", "dcnr node ls")
        if found[0].role == ORCHESTRATOR:
            raise AdmissionRefusedError("orchestrator", "an orchestrator can't be revoked by its own cluster")
        return self.with_entries([entry for entry in self.entries if entry is not found[0]], now), found[0]


def shown(entry: Admitted) -> MemberInfo:
    """An entry for people."""
    return MemberInfo(entry.id, entry.role, fingerprint(entry.key), entry.until, entry.uses, entry.grants)
