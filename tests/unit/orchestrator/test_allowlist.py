"""Invitations, joins and revocations, decided without a store."""

from __future__ import annotations

import pytest

from orchestrator.allowlist import NO_LIMIT, AdmissionRefusedError, MembersRecord, shown
from wire.admission import Admission
from wire.keys import KeyPair, fingerprint
from wire.messages import Admitted
from wire.roles import CLIENT, JOIN, ORCHESTRATOR, PNODE

CHIEF, GUEST, A, B = (KeyPair.new().public for _ in range(4))
NOW = 1000.0


def listed(*entries: Admitted, uses: int = 1, until: float = 2000.0, grants: str = PNODE) -> MembersRecord:
    invitation = Admitted(GUEST, "join-1", JOIN, until, uses, grants)
    record = MembersRecord(7, [Admitted(CHIEF, "orchestrator", ORCHESTRATOR), *entries])
    return record.invited(invitation, NOW)


def refused(how, *arguments) -> str:
    with pytest.raises(AdmissionRefusedError) as caught:
        how(*arguments)
    return caught.value.code


def test_one_joins_once_and_a_repetition_changes_nothing():
    record, entry = listed().joined(GUEST, "p1", A, NOW)
    assert entry == Admitted(A, "p1", PNODE)
    assert record.list_version == 9
    assert record.joined(GUEST, "p1", A, NOW) == (record, entry)
    assert refused(record.joined, GUEST, "p2", B, NOW) == "used"
    assert Admission(record.entries, 1).find(A, NOW) == entry


@pytest.mark.parametrize("uses", [2, NO_LIMIT])
def test_a_token_for_several(uses):
    record, _ = listed(uses=uses).joined(GUEST, "p1", A, NOW)
    record, _ = record.joined(GUEST, "p2", B, NOW)
    assert {entry.id for entry in record.entries if entry.role == PNODE} == {"p1", "p2"}
    third = KeyPair.new().public
    if uses == NO_LIMIT:
        record.joined(GUEST, "p3", third, NOW)
    else:
        assert refused(record.joined, GUEST, "p3", third, NOW) == "used"


def test_who_may_not_join():
    record = listed(Admitted(B, "p2", PNODE), uses=NO_LIMIT)
    assert refused(record.joined, A, "p1", A, NOW) == "ended", "not with a key that is no invitation"
    assert refused(record.joined, B, "p1", A, NOW) == "ended", "nor with a member's"
    assert refused(record.joined, GUEST, "p1", A, 2000.0) == "ended"
    assert refused(record.joined, GUEST, "p2", A, NOW) == "name"
    assert refused(record.joined, GUEST, "orchestrator", A, NOW) == "name"
    assert refused(record.joined, GUEST, "join-2", A, NOW) == "name"
    assert refused(record.joined, GUEST, "cli-1", A, NOW) == "name"
    assert refused(record.joined, GUEST, "../p", A, NOW) == "name"
    assert refused(record.joined, GUEST, "p1", "no key", NOW) == "name"
    assert refused(record.joined, GUEST, "p3", B, NOW) == "key"
    client = listed(grants=CLIENT)
    assert refused(client.joined, GUEST, "p1", A, NOW) == "name"
    assert client.joined(GUEST, "cli-1", A, NOW)[1].role == CLIENT


def test_the_revoked_are_off_by_id_or_fingerprint_and_may_be_asked_again():
    record = listed(Admitted(A, "p1", PNODE), Admitted(B, "p2", PNODE), uses=NO_LIMIT)
    first, gone = record.revoked("p1", NOW)
    assert gone.key == A
    second, gone = first.revoked(fingerprint(B), NOW)
    assert gone.id == "p2"
    assert second.list_version == record.list_version + 2
    assert {entry.role for entry in second.entries} == {ORCHESTRATOR, JOIN}
    assert refused(second.revoked, "p1", NOW) == "unknown"
    assert refused(second.revoked, "orchestrator", NOW) == "orchestrator"
    assert second.joined(GUEST, "p1", KeyPair.new().public, NOW)[1].id == "p1"
    third, _ = second.revoked("join-1", NOW)
    assert refused(third.joined, GUEST, "p1", A, NOW) == "ended"


def test_what_has_ended_is_dropped_with_the_next_change():
    record, _ = listed(Admitted(A, "p1", PNODE, until=1500.0)).revoked("join-1", 1500.0)
    assert [entry.id for entry in record.entries] == ["orchestrator"]


def test_a_new_orchestrators_key_takes_the_place_of_the_former_ones():
    client = Admitted(B, "cli-1", CLIENT)
    record = listed().own(A, "orchestrator", NOW, clients=[client])
    assert [entry.key for entry in record.entries if entry.role == ORCHESTRATOR] == [A]
    assert client in record.entries
    assert record.own(A, "orchestrator", NOW, clients=[client]) is record
    Admission(record.entries, 1)


def test_pnodes_are_told_of_everybody_but_guests():
    assert {entry.role for entry in listed(Admitted(A, "cli-1", CLIENT)).shared()} == {ORCHESTRATOR, CLIENT}


@pytest.mark.parametrize("uses", [0, -2, 10**6])
def test_invitations_that_make_no_sense(uses):
    assert refused(lambda: listed(uses=uses)) == "uses"
    assert refused(lambda: listed(grants=ORCHESTRATOR)) == "role"
    assert refused(lambda: listed(grants=JOIN)) == "role"


def test_what_people_are_shown_has_no_key():
    info = shown(Admitted(A, "p1", PNODE))
    assert info.fingerprint == fingerprint(A)
    assert A not in repr(info)
