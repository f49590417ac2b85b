"""Membership: leases, incarnations, and one holder per id; without a clock."""

from __future__ import annotations

import random

import pytest

from orchestrator import membership
from orchestrator.membership import AskReports, Grant, Joined, Lost, Membership, Note, Probe, Refuse, State
from wire.messages import Goodbye, Heartbeat, PeerRef, Profile, Register, SessionBeat

PROFILE = Profile("box", "cpu", 1, 1e9, 1 << 30, 1e9, 1e-4, "torch", "cpu", "0")


def peer(pnode: str, boot: int) -> PeerRef:
    return PeerRef(pnode, boot, [f"tcp://127.0.0.1:{7000 + boot}"])


def register(
    members: Membership, pnode: str, boot: int, now: float, *, held: int = 0, request: str = ""
) -> list[membership.Command]:
    message = Register(request or f"r{boot}", pnode, peer(pnode, boot), PROFILE, held)
    return members.register(message, peer(pnode, boot), now, 1000.0 + now)


def beat(
    members: Membership, pnode: str, boot: int, incarnation: int, now: float, sessions: tuple[SessionBeat, ...] = ()
) -> tuple[bool, list[membership.Command]]:
    message = Heartbeat(pnode, incarnation, 1, list(sessions), 5, 0.1, "busy", 0.2)
    return members.beat(message, peer(pnode, boot), now)


def test_a_new_pnode_is_granted_incarnation_1() -> None:
    members = Membership()
    commands = register(members, "p1", 1, 0.0)
    assert [type(command) for command in commands] == [Grant, Joined]
    assert isinstance(commands[0], Grant)
    assert (commands[0].incarnation, commands[0].fresh, commands[0].request_id) == (1, True, "r1")
    assert [member.id for member in members.living()] == ["p1"]


def test_incarnations_only_grow_over_restarts_of_both_sides() -> None:
    members = Membership(granted={"p1": 7})
    register(members, "p1", 1, 0.0)
    assert members.members["p1"].incarnation == 8
    members.lost_peer(peer("p1", 1), "closed", 1.0, 1.0)
    register(members, "p1", 2, 2.0)
    assert members.members["p1"].incarnation == 9
    wiped = Membership()
    register(wiped, "p1", 2, 0.0, held=9)
    assert wiped.members["p1"].incarnation == 9, "the same process goes on under its number"
    assert wiped.granted == {"p1": 9}


def test_a_process_that_held_an_older_number_gets_a_new_one() -> None:
    members = Membership(granted={"p1": 5})
    register(members, "p1", 1, 0.0, held=3)
    assert members.members["p1"].incarnation == 6


def test_registering_again_from_the_same_process_keeps_the_incarnation() -> None:
    members = Membership()
    register(members, "p1", 1, 0.0)
    commands = register(members, "p1", 1, 1.0, held=1, request="again")
    assert isinstance(commands[0], Grant)
    assert (commands[0].incarnation, commands[0].fresh) == (1, False)


def test_lease_suspect_and_lost() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    assert members.tick(9.9, 0.0) == []
    assert members.next_deadline() == 10.0
    commands = members.tick(10.0, 0.0)
    assert [type(command) for command in commands] == [Note, Probe]
    assert commands[1] == Probe("p1", peer("p1", 1), 2.0), "a fifth of the lease"
    assert members.living() == []
    assert members.find("p1") is not None
    assert members.members["p1"].state is State.SUSPECT
    assert members.tick(11.9, 0.0) == []
    (lost,) = members.silent("p1", peer("p1", 1), 12.0, 0.0)
    assert isinstance(lost, Lost)
    assert (lost.pnode, lost.incarnation, lost.peer) == ("p1", 1, peer("p1", 1))
    assert lost.reason.startswith("no sign of life for 12 s, nor an answer to a probe within 2 s")
    assert members.tick(100.0, 0.0) == []


@pytest.mark.parametrize("broken", [False, True])
def test_times_below_a_second_are_not_rounded_away(broken: bool) -> None:
    members = Membership(lease_s=0.6)
    register(members, "p1", 1, 0.0)
    if broken:
        members.broke(peer("p1", 1), 0.7)
    else:
        members.tick(0.7, 0.0)
    (lost,) = members.silent("p1", peer("p1", 1), 1.1, 0.0)
    assert isinstance(lost, Lost)
    assert "a probe within 0.4 s" in lost.reason
    assert "its last report was 1 s ago" in lost.reason


def test_a_probe_of_a_suspect_that_nobody_reports_on_ends_by_itself() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    members.tick(10.0, 0.0)
    assert members.next_deadline() == 14.0
    assert members.tick(13.9, 0.0) == []
    assert [type(command) for command in members.tick(14.0, 0.0)] == [Lost]


def test_the_reason_tells_a_stalled_loop_from_a_dead_process() -> None:
    """Field case B18: one that is busy in code that holds the interpreter is named as such."""
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    message = Heartbeat("p1", 1, 1, [], 5, 7.5, "busy", 8.0)
    members.beat(message, peer("p1", 1), 1.0)
    members.tick(11.0, 0.0)
    (lost,) = members.silent("p1", peer("p1", 1), 13.0, 0.0)
    assert isinstance(lost, Lost)
    assert "its last report was 12 s ago, its event loop 7.5 s behind, its compute thread busy for 8 s" in lost.reason
    again = register(members, "p1", 1, 40.0, held=1)
    assert isinstance(again[0], Grant)
    assert again[0].incarnation == 2, "fenced when it comes back"


def test_a_sign_of_life_ends_suspicion() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    members.tick(11.0, 0.0)
    known, commands = beat(members, "p1", 1, 1, 12.0)
    assert known
    assert [type(command) for command in commands] == [Note]
    assert members.members["p1"].state is State.ALIVE
    assert members.tick(21.0, 0.0) == []
    members.tick(22.0, 0.0)
    assert members.members["p1"].state is State.SUSPECT
    members.heard(peer("p1", 1), 23.0)
    assert members.members["p1"].state is State.ALIVE


def test_nobody_is_lost_while_its_bytes_flow() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    register(members, "p2", 2, 0.0)
    for second in range(1, 60):
        message = Heartbeat("p2", 1, 1, [], 5, 0.0, "busy", 0.2, [peer("p1", 1)])
        assert members.beat(message, peer("p2", 2), float(second))[0]
        members.tick(float(second), 0.0)
        if second >= 12:
            probes = members.silent("p1", peer("p1", 1), float(second), 0.0)
            assert [type(command) for command in probes] == [Probe], "it is asked again"
    assert members.members["p1"].state is State.SUSPECT
    assert [type(command) for command in members.silent("p1", peer("p1", 1), 63.9, 0.0)] == [Probe]
    assert [type(command) for command in members.silent("p1", peer("p1", 1), 64.0, 0.0)] == [Lost]


def test_bytes_of_another_boot_are_not_its_bytes() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    members.tick(10.0, 0.0)
    members.flows(peer("p1", 7), 11.0)
    assert [type(command) for command in members.silent("p1", peer("p1", 1), 12.0, 0.0)] == [Lost]


def test_one_that_a_peer_can_not_reach_has_to_answer_at_once() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    assert members.doubt("p1", 9, "p2 can't reach it", 1.0) == [], "another incarnation"
    commands = members.doubt("p1", 1, "p2 can't reach it", 1.0)
    assert [type(command) for command in commands] == [Note, Probe]
    assert members.members["p1"].state is State.SUSPECT
    assert members.doubt("p1", 1, "p3 can't reach it", 1.5) == []
    members.answered("p1", peer("p1", 1), 1.6, 0.0)
    assert members.members["p1"].state is State.ALIVE
    members.doubt("p1", 1, "p2 can't reach it", 4.0)
    assert [type(command) for command in members.silent("p1", peer("p1", 1), 6.0, 0.0)] == [Lost]


def test_a_pnode_that_can_not_compute_gets_no_vnodes() -> None:
    """Field case B26: the daemon answers, but its compute thread is dead."""
    members = Membership()
    register(members, "p1", 1, 0.0)
    assert members.usable() == [], "its incarnation is not durable yet"
    members.confirmed("p1", 1)
    assert [member.id for member in members.usable()] == ["p1"]
    _, commands = members.beat(Heartbeat("p1", 1, 1, [], 5, 0.0, "dead", 3.0), peer("p1", 1), 1.0)
    assert [type(command) for command in commands] == [Note]
    assert members.members["p1"].health == "its compute thread is dead"
    assert members.usable() == []
    assert [member.id for member in members.living()] == ["p1"], "alive all the same"
    assert members.unhealthy(peer("p1", 1), "again") == [], "told once"
    members.lost_peer(peer("p1", 1), "restarted", 2.0, 0.0)
    register(members, "p1", 2, 3.0)
    members.confirmed("p1", 2)
    assert [member.id for member in members.usable()] == ["p1"], "a new incarnation is healthy"


def test_whoever_stood_still_holds_nothing_against_others() -> None:
    members = Membership(lease_s=10)
    register(members, "p1", 1, 0.0)
    members.excuse(500.0)
    assert members.tick(509.0, 0.0) == []
    members.tick(510.0, 0.0)
    assert members.members["p1"].state is State.SUSPECT


def test_what_a_former_orchestrator_granted_is_not_granted_again() -> None:
    members = Membership(granted={"p1": 3})
    members.merge({"p1": 6, "p2": 2})
    register(members, "p1", 1, 0.0)
    assert members.members["p1"].incarnation == 7


def test_heartbeats_carry_what_a_pnode_does() -> None:
    members = Membership()
    register(members, "p1", 1, 0.0)
    line = SessionBeat("s-1", 1, 5, "running", "p2: F3", 2.0)
    beat(members, "p1", 1, 1, 1.0, (line,))
    assert membership.beats_of(members.members.values(), "s-1") == [(members.members["p1"], line)]
    assert membership.beats_of(members.members.values(), "other") == []
    assert (members.members["p1"].rss_bytes, members.members["p1"].compute) == (5, "busy")


@pytest.mark.parametrize(("boot", "incarnation"), [(2, 1), (1, 2), (1, 0)])
def test_heartbeats_of_another_boot_or_incarnation_are_not_known(boot: int, incarnation: int) -> None:
    members = Membership()
    register(members, "p1", 1, 0.0)
    assert beat(members, "p1", boot, incarnation, 1.0) == (False, [])
    assert beat(members, "p9", 1, 1, 1.0) == (False, [])
    assert members.members["p1"].seen == 0.0


class TestSecondClaim:
    """Field case B03: a second process under a held id."""

    def members(self) -> Membership:
        members = Membership()
        register(members, "p1", 1, 0.0)
        return members

    def test_the_holder_is_probed(self) -> None:
        members = self.members()
        assert register(members, "p1", 2, 5.0) == [Probe("p1", peer("p1", 1))]
        assert members.members["p1"].peer.boot == 1, "undisturbed meanwhile"

    def test_an_answer_refuses_the_newcomer_with_address_and_time(self) -> None:
        members = self.members()
        register(members, "p1", 2, 5.0)
        (refusal,) = members.answered("p1", peer("p1", 1), 5.3, 1005.3)
        assert isinstance(refusal, Refuse)
        assert refusal.code == "held"
        assert refusal.peer == peer("p1", 2)
        assert refusal.text == "id p1 is already held by tcp://127.0.0.1:7001, since 1970-01-01 00:16:40 UTC"
        assert "--name" in refusal.hint
        assert members.members["p1"].incarnation == 1
        assert members.members["p1"].seen == 5.3

    def test_silence_hands_the_id_over(self) -> None:
        members = self.members()
        register(members, "p1", 2, 5.0)
        commands = members.silent("p1", peer("p1", 1), 6.0, 1006.0)
        assert [type(command) for command in commands] == [Lost, Grant, Joined]
        assert members.members["p1"].peer.boot == 2
        assert members.members["p1"].incarnation == 2
        assert not beat(members, "p1", 1, 1, 7.0)[0], "the replaced one is not heard any more"

    def test_a_probe_that_is_never_reported_ends_by_itself(self) -> None:
        members = self.members()
        register(members, "p1", 2, 5.0)
        commands = members.tick(5.0 + 2 * membership.PROBE_S, 0.0)
        assert [type(command) for command in commands] == [Lost, Grant, Joined]

    def test_asking_again_does_not_probe_again_or_move_the_deadline(self) -> None:
        members = self.members()
        register(members, "p1", 2, 5.0)
        assert register(members, "p1", 2, 5.5) == []
        assert members.next_deadline() == 7.0

    def test_a_third_claim_is_refused_at_once(self) -> None:
        members = self.members()
        register(members, "p1", 2, 5.0)
        (refusal,) = register(members, "p1", 3, 5.1)
        assert isinstance(refusal, Refuse)
        assert "already claimed by" in refusal.text

    def test_the_bus_reports_the_holder_lost_meanwhile(self) -> None:
        members = self.members()
        register(members, "p1", 2, 5.0)
        commands = members.lost_peer(peer("p1", 1), "restarted", 5.1, 0.0)
        assert [type(command) for command in commands] == [Lost, Grant, Joined]
        assert members.silent("p1", peer("p1", 1), 6.0, 0.0) == [], "a late outcome of the probe changes nothing"
        assert members.members["p1"].peer.boot == 2

    def test_silence_of_one_that_is_no_suspect_costs_nothing(self) -> None:
        members = self.members()
        assert members.silent("p1", peer("p1", 1), 5.0, 0.0) == []
        assert members.members["p1"].state is State.ALIVE


def test_goodbye_is_final() -> None:
    members = Membership()
    register(members, "p1", 1, 0.0)
    assert members.left(Goodbye("p1", 9), peer("p1", 1), 1.0, 0.0) == []
    (lost,) = members.left(Goodbye("p1", 1), peer("p1", 1), 1.0, 0.0)
    assert isinstance(lost, Lost)
    assert members.members["p1"].state is State.GONE
    assert members.lost_peer(peer("p1", 1), "closed", 1.1, 0.0) == []
    register(members, "p1", 1, 2.0, held=1)
    assert members.members["p1"].incarnation == 2, "a final incarnation never comes back"


def test_nobody_registers_somebody_else() -> None:
    members = Membership()
    message = Register("r", "p1", peer("p1", 1), PROFILE, 0)
    (refusal,) = members.register(message, peer("p2", 1), 0.0, 0.0)
    assert isinstance(refusal, Refuse)
    assert members.members == {}


def test_the_number_of_pnodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PNODES", 2)
    members = Membership()
    for boot in (1, 2):
        register(members, f"p{boot}", boot, 0.0)
    (refusal,) = register(members, "p3", 3, 0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.code == "full"


@pytest.mark.parametrize("seed", range(30))
def test_any_story_keeps_incarnations_growing_and_one_holder(seed: int) -> None:
    source = random.Random(seed)
    members = Membership(lease_s=5)
    now, boots, granted = 0.0, 0, dict.fromkeys(("p1", "p2"), 0)
    for _ in range(300):
        now += source.random() * 2
        pnode = source.choice(["p1", "p2"])
        holder = members.members.get(pnode)
        match source.randrange(7):
            case 0:
                boots += 1
                commands = register(members, pnode, boots, now)
            case 1 if holder is not None:
                commands = register(members, pnode, holder.peer.boot, now, held=holder.incarnation)
            case 2 if holder is not None:
                commands = beat(members, pnode, holder.peer.boot, holder.incarnation, now)[1]
            case 3 if holder is not None:
                commands = members.lost_peer(holder.peer, "x", now, now)
            case 4 if holder is not None:
                commands = members.answered(pnode, holder.peer, now, now)
            case 5 if holder is not None:
                commands = members.silent(pnode, holder.peer, now, now)
            case _:
                commands = members.tick(now, now)
        for command in commands:
            if isinstance(command, Grant) and command.fresh:
                assert command.incarnation > granted[command.pnode]
                granted[command.pnode] = command.incarnation


RUN = SessionBeat("run", 1, 5, "running", "", 0.0)


def three(lease_s: float = 10.0) -> Membership:
    """p1 and p2 share a run, p3 has none."""
    members = Membership(lease_s=lease_s)
    for boot, pnode in enumerate(("p1", "p2", "p3"), 1):
        register(members, pnode, boot, 0.0)
        beat(members, pnode, boot, 1, 1.0, (RUN,) if boot < 3 else ())
    return members


def test_a_closed_connection_and_silence_for_one_second_is_the_end() -> None:
    members = three()
    commands = members.broke(peer("p1", 1), 2.0)
    assert isinstance(commands[0], Note)
    assert commands[1:] == [Probe("p1", peer("p1", 1), 1.0), AskReports(("p2",))]
    assert members.members["p1"].state is State.SUSPECT
    assert members.broke(peer("p1", 1), 2.1) == [], "it is known"
    beat(members, "p2", 2, 1, 2.2, (RUN,))
    (lost,) = members.silent("p1", peer("p1", 1), 3.0, 3.0)
    assert isinstance(lost, Lost)
    assert "connection closed" in lost.reason


def test_a_closed_connection_of_a_member_that_answers_is_forgotten() -> None:
    members = three()
    members.broke(peer("p1", 1), 2.0)
    members.answered("p1", peer("p1", 1), 2.1, 2.1)
    assert members.members["p1"].state is State.ALIVE
    assert members.silent("p1", peer("p1", 1), 9.0, 9.0) == [], "the lease counts from now on"


def test_a_closed_connection_is_no_end_while_bytes_flow_elsewhere() -> None:
    members = three()
    members.flows(peer("p1", 1), 1.9)
    members.broke(peer("p1", 1), 2.0)
    beat(members, "p2", 2, 1, 2.2, (RUN,))
    again = [Probe("p1", peer("p1", 1), 1.0), AskReports(("p2",))]
    for now in range(3, 9):
        members.flows(peer("p1", 1), now - 0.9)
        assert members.silent("p1", peer("p1", 1), now, now) == again
    assert [type(command) for command in members.silent("p1", peer("p1", 1), 9.0, 9.0)] == [Lost], "nothing for 1.9 s"


def test_who_shares_a_run_is_awaited_before_a_silent_one_is_lost_but_not_for_ever() -> None:
    members = three()
    members.broke(peer("p1", 1), 2.0)
    for now in (3.0, 4.0, 5.0):
        again = [Probe("p1", peer("p1", 1), 1.0), AskReports(("p2",))]
        assert members.silent("p1", peer("p1", 1), now, now) == again, "p2 has not reported"
    assert [type(command) for command in members.silent("p1", peer("p1", 1), 6.0, 6.0)] == [Lost]


def test_a_closed_connection_of_somebody_unknown_or_replaced_counts_for_nothing() -> None:
    members = three()
    assert members.broke(peer("p9", 9), 2.0) == []
    assert members.broke(peer("p1", 7), 2.0) == []
    assert members.members["p1"].state is State.ALIVE
