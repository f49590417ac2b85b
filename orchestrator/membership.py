"""Which PNodes are members, under which incarnation, and whether they live. Pure: time is passed in.

States of a member:

    alive    registered, and a sign of life within the lease
    suspect  no sign for a lease, or a peer can't reach it; a probe is out, nothing is taken from it yet
    lost     it did not answer the probe, its process was replaced, or the bus gave it up: final
    gone     it said goodbye: final

Rules:

- An incarnation is granted once and never again: it is larger than any granted or held before, and persisted before
  the PNode hears of it. The same process (boot) that registers again keeps its incarnation.
- One id, one holder. A second claim to a held id has the holder probed: an answer within `PROBE_S`, and the newcomer
  is refused; silence, and the newcomer takes over.
- While bytes flow from a member (`flows`), as other PNodes report or the bus sees, it is not lost: a loop that is busy
  sending is not dead. It's probed again and again.
- A connection of a member that closes (`broke`) is how the end of its process shows long before its lease is over: it
  has `PROBE_S` to answer, and the others of its sessions are asked for a report. If it is silent, it's lost; but if
  bytes came from it within `FLOW_S`, or one of the others has not reported (for up to `BROKEN_S`), it's probed again.
- A member whose compute thread died or hangs is alive but not healthy: it gets no VNodes. A new incarnation is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from wire.messages import Goodbye, Heartbeat, PeerRef, Profile, Register, SessionBeat

LEASE_S = 10.0
PROBE_S = 1.0
"""For an answer of a holder whose id is claimed; a suspect has a fifth of the lease, if that is more."""
REPORT_EVERY_S = 2.0
BROKEN_S = REPORT_EVERY_S + 2 * PROBE_S
"""After a connection closed, the longest wait for reports of the others."""
FLOW_S = 1.5 * PROBE_S
"""After a connection closed, bytes that came longer ago prove nothing. (They may have waited unread for a moment.)"""
MAX_PNODES = 4096
NEVER = float("-inf")


class State(Enum):
    """See the module's docstring."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"
    GONE = "gone"


LIVING = (State.ALIVE, State.SUSPECT)

TRANSITIONS: dict[State, frozenset[State]] = {
    State.ALIVE: frozenset({State.SUSPECT, State.LOST, State.GONE}),
    State.SUSPECT: frozenset({State.ALIVE, State.LOST, State.GONE}),
    State.LOST: frozenset(),
    State.GONE: frozenset(),
}
"""A final member is replaced by a new `Member` with a larger incarnation, never revived."""


@dataclass(slots=True)
class Member:
    """One incarnation of a PNode."""

    id: str
    incarnation: int
    peer: PeerRef
    profile: Profile
    since: float
    """Wall clock of the registration, for people."""
    seen: float
    state: State = State.ALIVE
    sessions: list[SessionBeat] = field(default_factory=list)
    rss_bytes: int = 0
    loop_lag_s: float = 0.0
    compute: str = "idle"
    compute_s: float = 0.0
    flowed: float = NEVER
    """When bytes last arrived from it, at whoever; since its connection closed, if it did."""
    broken: float = NEVER
    """When its connection closed, if nothing came from it since."""
    reported: float = NEVER
    """When its last report came."""
    health: str = ""
    """Why it gets no VNodes, "" if it may."""
    granted: bool = False
    """Its incarnation is durable and it was told."""


# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Grant:
    """Persist the incarnation, then answer `Registered` to this peer."""

    request_id: str
    peer: PeerRef
    pnode: str
    incarnation: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer `Refused`."""

    request_id: str
    peer: PeerRef
    code: str
    text: str
    hint: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask this process for any answer within `limit_s`; then `answered` or `silent` with the same peer."""

    pnode: str
    peer: PeerRef
    limit_s: float = PROBE_S


@dataclass(frozen=True, slots=True)
class AskReports:
    """Have these members report at once: from whom they hear decides whether another one is lost."""

    pnodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """A PNode is a member under a new incarnation."""

    pnode: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """An incarnation is final: lost or gone. The link to it can be forgotten."""

    pnode: str
    incarnation: int
    peer: PeerRef
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str


Command = Grant | Refuse | Probe | AskReports | Joined | Lost | Note


@dataclass(slots=True)
class _Claim:
    """A newcomer that waits for the probe of the holder."""

    message: Register
    peer: PeerRef
    deadline: float


class Membership:
    """All members. Every method takes the time (a monotonic clock) and gives commands to carry out in order."""

    def __init__(self, *, lease_s: float = LEASE_S, granted: Mapping[str, int] | None = None) -> None:
        self.lease_s = lease_s
        self.probe_s = max(PROBE_S, lease_s / 5)
        self.members: dict[str, Member] = {}
        self._granted = dict(granted or {})
        self._claims: dict[str, _Claim] = {}
        self._probing: dict[str, float] = {}

    # ------------------------------------------------------------ questions

    def living(self) -> list[Member]:
        """Members that are alive, by id."""
        return [self.members[name] for name in sorted(self.members) if self.members[name].state is State.ALIVE]

    def usable(self) -> list[Member]:
        """Members that may be given VNodes, by id."""
        return [member for member in self.living() if member.granted and not member.health]

    def find(self, pnode: str) -> Member | None:
        """The newest incarnation of that PNode."""
        return self.members.get(pnode)

    def current(self, pnode: str, peer: PeerRef) -> Member | None:
        """The living member whose process this is, or None: what a replaced process says counts for nothing."""
        member = self.members.get(pnode)
        if member is None or member.state not in LIVING or member.peer.boot != peer.boot:
            return None
        return member

    def by_peer(self, peer: PeerRef) -> Member | None:
        """The living member whose process this is."""
        return self.current(peer.id, peer)

    @property
    def granted(self) -> dict[str, int]:
        """The highest incarnation ever granted, by PNode."""
        return dict(self._granted)

    def next_deadline(self) -> float:
        """When `tick` next has something to do."""
        times = [claim.deadline for claim in self._claims.values()]
        for member in self.members.values():
            if member.state is State.ALIVE:
                times.append(member.seen + self.lease_s)
            elif member.state is State.SUSPECT:
                times.append(self._probing.get(member.id, float("-inf")) + 2 * self.probe_s)
        return min(times, default=float("inf"))

    # ------------------------------------------------------------ events

    def register(self, message: Register, sender: PeerRef, now: float, wall: float) -> list[Command]:
        """A PNode asks to be a member."""
        known = message.peer
        peer = PeerRef(known.id, known.boot or sender.boot, known.addresses or sender.addresses, sender.key)
        if peer.boot != sender.boot or sender.id != message.pnode:
            text = f"{sender.id} (boot {sender.boot}) asked to be registered as {message.pnode} (boot {peer.boot})"
            return [Refuse(message.request_id, sender, "identity", text, "a PNode registers itself")]
        holder = self.members.get(message.pnode)
        if holder is None and len(self.members) >= MAX_PNODES:
            text = f"this orchestrator knows {MAX_PNODES} PNodes already"
            return [Refuse(message.request_id, sender, "full", text, "")]
        if holder is not None and holder.state in LIVING:
            if holder.peer.boot == peer.boot:
                holder.peer, holder.profile = peer, message.profile
                return [*self._sign(holder, now), self._grant(message, peer, fresh=False)]
            return self._claim(message, peer, holder, now)
        return self._admit(message, peer, now, wall)

    def beat(self, message: Heartbeat, sender: PeerRef, now: float) -> tuple[bool, list[Command]]:
        """A report. False: unknown or replaced, it has to register again."""
        member = self.current(message.pnode, sender)
        if member is None or member.incarnation != message.incarnation:
            return False, []
        commands = self._sign(member, now)
        member.sessions, member.reported = list(message.sessions), now
        member.rss_bytes, member.loop_lag_s = message.rss_bytes, message.loop_lag_s
        member.compute, member.compute_s = message.compute, message.compute_s
        for peer in message.heard:
            self.flows(peer, now)
        if message.compute == "dead":
            commands += self.unhealthy(sender, "its compute thread is dead")
        return True, commands

    def heard(self, sender: PeerRef, now: float) -> list[Command]:
        """Any message of a member is a sign of life."""
        member = self.by_peer(sender)
        return self._sign(member, now) if member is not None else []

    def flows(self, peer: PeerRef, now: float) -> None:
        """Bytes arrived from that process, here or at another PNode, though it did not report."""
        if (member := self.current(peer.id, peer)) is not None:
            member.flowed = max(member.flowed, now)

    def unhealthy(self, sender: PeerRef, why: str) -> list[Command]:
        """A member can't compute any more."""
        member = self.by_peer(sender)
        if member is None or member.health:
            return []
        member.health = why
        return [Note(f"{member.id} gets no VNodes until it is restarted: {why}")]

    def doubt(self, pnode: str, incarnation: int, why: str, now: float) -> list[Command]:
        """A peer can't reach that member. It's a suspect, and has to answer."""
        member = self.members.get(pnode)
        if member is None or member.incarnation != incarnation or member.state is not State.ALIVE:
            return []
        _move(member, State.SUSPECT)
        return [Note(f"{pnode} is suspected: {why}"), *self._probe(member, now, self.probe_s)]

    def broke(self, sender: PeerRef, now: float) -> list[Command]:
        """A connection of a member closed and nothing more came over it."""
        member = self.by_peer(sender)
        if member is None or member.broken != NEVER:
            return []
        member.broken, member.flowed = now, NEVER
        commands: list[Command] = []
        if member.state is State.ALIVE:
            _move(member, State.SUSPECT)
            commands.append(Note(f"{member.id} is suspected: its connection closed"))
        return [*commands, *self._probe(member, now, PROBE_S)]

    def excuse(self, now: float) -> None:
        """This process stood still: what was not heard meanwhile is held against nobody."""
        for member in self.members.values():
            if member.state in LIVING:
                member.seen = max(member.seen, now)
        for pnode in self._probing:
            self._probing[pnode] = now

    def confirmed(self, pnode: str, incarnation: int) -> None:
        """That incarnation is durable."""
        member = self.members.get(pnode)
        if member is not None and member.incarnation == incarnation:
            member.granted = True

    def merge(self, granted: Mapping[str, int]) -> None:
        """Another orchestrator granted these before."""
        for pnode, incarnation in granted.items():
            self._granted[pnode] = max(incarnation, self._granted.get(pnode, 0))

    def left(self, message: Goodbye, sender: PeerRef, now: float, wall: float) -> list[Command]:
        """A member ends in good order."""
        member = self.current(message.pnode, sender)
        if member is None or member.incarnation != message.incarnation:
            return []
        return [*self._end(member, State.GONE, "it said goodbye"), *self._decide(member.id, now, wall)]

    def lost_peer(self, peer: PeerRef, reason: str, now: float, wall: float) -> list[Command]:
        """The bus gave that process up for good."""
        member = self.members.get(peer.id)
        if member is None or member.state not in LIVING or member.peer.boot != peer.boot:
            return []
        return [*self._end(member, State.LOST, reason), *self._decide(member.id, now, wall)]

    def answered(self, pnode: str, peer: PeerRef, now: float, wall: float) -> list[Command]:
        """The probed process answered."""
        self._probing.pop(pnode, None)
        member = self.current(pnode, peer)
        if member is None:
            return self._decide(pnode, now, wall)
        commands = self._sign(member, now)
        claim = self._claims.pop(pnode, None)
        if claim is not None:
            text = f"id {pnode} is already held by {_address(member.peer)}, since {_clock(member.since)}"
            hint = f"choose another --name, or end that PNode; it runs on {member.profile.host}"
            commands.append(Refuse(claim.message.request_id, claim.peer, "held", text, hint))
        return commands

    def silent(self, pnode: str, peer: PeerRef, now: float, wall: float) -> list[Command]:
        """The probed process did not answer in time: if its id is claimed or it is a suspect, it's lost."""
        probed = self._probing.pop(pnode, now)
        member = self.current(pnode, peer)
        if member is None:
            return self._decide(pnode, now, wall)
        if pnode in self._claims:
            claims = _address(self._claims[pnode].peer)
            reason = f"it did not answer within {_span(PROBE_S)}, and {claims} claims its id"
        elif member.state is not State.SUSPECT:
            return []
        elif self._may_live(member, now):
            return self._probe(member, now, self.probe_s if member.broken == NEVER else PROBE_S)
        else:
            reason = self._silence(member, now, now - probed)
        return [*self._end(member, State.LOST, reason), *self._decide(pnode, now, wall)]

    def tick(self, now: float, wall: float) -> list[Command]:
        """Time passed."""
        commands: list[Command] = []
        for pnode, claim in list(self._claims.items()):
            if now >= claim.deadline and (member := self.members.get(pnode)) is not None:
                commands += self.silent(pnode, member.peer, now, wall)
        for member in list(self.members.values()):
            quiet = now - member.seen
            if member.state is State.ALIVE and quiet >= self.lease_s:
                _move(member, State.SUSPECT)
                commands.append(Note(f"{member.id} is suspected: no sign of life for {_span(quiet)}"))
                commands += self._probe(member, now, self.probe_s)
            elif member.state is State.SUSPECT:
                probed = self._probing.get(member.id)
                if probed is None:
                    commands += self._probe(member, now, self.probe_s)
                elif now >= probed + 2 * self.probe_s:  # nobody told what came of it
                    commands += self.silent(member.id, member.peer, now, wall)
        return commands

    # ------------------------------------------------------------ inside

    def _claim(self, message: Register, peer: PeerRef, holder: Member, now: float) -> list[Command]:
        waiting = self._claims.get(message.pnode)
        if waiting is not None and waiting.peer.boot != peer.boot:
            text = (
                f"id {message.pnode} is held by {_address(holder.peer)} and already claimed by {_address(waiting.peer)}"
            )
            return [Refuse(message.request_id, peer, "held", text, "choose another --name")]
        deadline = waiting.deadline if waiting is not None else now + 2 * PROBE_S
        self._claims[message.pnode] = _Claim(message, peer, deadline)
        return self._probe(holder, now, PROBE_S)

    def _probe(self, member: Member, now: float, limit_s: float) -> list[Command]:
        if self._probing.get(member.id, float("-inf")) > now - limit_s:
            return []
        self._probing[member.id] = now
        fellows = tuple(fellow.id for fellow in self._fellows(member)) if member.broken != NEVER else ()
        return [Probe(member.id, member.peer, limit_s), *([AskReports(fellows)] if fellows else [])]

    def _may_live(self, member: Member, now: float) -> bool:
        """Whether a silent suspect sends to others, or might without being known to."""
        if member.broken == NEVER:
            return now - member.flowed < self.lease_s / 2
        unheard = any(fellow.reported <= member.broken for fellow in self._fellows(member))
        return now - member.flowed < FLOW_S or (unheard and now - member.broken < BROKEN_S)

    def _fellows(self, member: Member) -> list[Member]:
        """The other living members of its sessions."""
        names = {beat.session for beat in member.sessions}
        return [
            other
            for other in self.members.values()
            if other is not member
            and other.state is State.ALIVE
            and any(beat.session in names for beat in other.sessions)
        ]

    def _silence(self, member: Member, now: float, probed_s: float) -> str:
        """Why a suspect is lost: what is known of it, so that a stalled loop is told from a dead process."""
        last = f"its last report was {_span(now - member.seen)} ago"
        if member.loop_lag_s >= 1:
            last += f", its event loop {member.loop_lag_s:.1f} s behind"
        if member.compute != "idle":
            last += f", its compute thread {member.compute} for {member.compute_s:.0f} s"
        if member.broken != NEVER:
            return (
                f"its connection closed, and it did not answer a probe within {_span(probed_s)} ({last}): its process "
                f"ended, or its network is cut"
            )
        return (
            f"no sign of life for {_span(now - member.seen)}, nor an answer to a probe within {_span(probed_s)} "
            f"({last}): its process ended or stands still, or its network is cut"
        )

    def _decide(self, pnode: str, now: float, wall: float) -> list[Command]:
        """The id is free: whoever waits for it gets it."""
        member = self.members.get(pnode)
        if member is not None and member.state in LIVING:
            return []
        claim = self._claims.pop(pnode, None)
        return self._admit(claim.message, claim.peer, now, wall) if claim is not None else []

    def _admit(self, message: Register, peer: PeerRef, now: float, wall: float) -> list[Command]:
        before = self.members.get(message.pnode)
        same = before is not None and before.peer.boot == peer.boot
        known = self._granted.get(message.pnode, 0)
        # A process that outlived the orchestrator (or the link to it) keeps the number that nobody else was given.
        keeps = message.held > 0 and message.held >= known and not same
        incarnation = message.held if keeps else max(known, message.held) + 1
        self._granted[message.pnode] = incarnation
        self.members[message.pnode] = Member(message.pnode, incarnation, peer, message.profile, wall, now)
        return [self._grant(message, peer, fresh=True), Joined(message.pnode, incarnation)]

    def _grant(self, message: Register, peer: PeerRef, *, fresh: bool) -> Grant:
        return Grant(message.request_id, peer, message.pnode, self.members[message.pnode].incarnation, fresh)

    def _sign(self, member: Member, now: float) -> list[Command]:
        member.seen, member.broken = max(member.seen, now), NEVER
        if member.state is State.SUSPECT:
            _move(member, State.ALIVE)
            self._probing.pop(member.id, None)
            return [Note(f"{member.id} is alive again")]
        return []

    def _end(self, member: Member, state: State, reason: str) -> list[Command]:
        _move(member, state)
        member.sessions = []
        return [Lost(member.id, member.incarnation, member.peer, reason)]


def _move(member: Member, state: State) -> None:
    if state not in TRANSITIONS[member.state]:
        raise AssertionError(f"{member.id} can't go from {member.state.value} to {state.value}")
    member.state = state


def _address(peer: PeerRef) -> str:
    return ", ".join(peer.addresses) or f"{peer.id} (no address)"


def _span(seconds: float) -> str:
    """A time that passed, in whole seconds; less than one is not rounded away."""
    return f"{seconds:.0f} s" if seconds >= 0.95 else f"{seconds:.2g} s"


def _clock(wall: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def beats_of(members: Iterable[Member], session: str) -> list[tuple[Member, SessionBeat]]:
    """What the members say about a session."""
    return [(member, beat) for member in members for beat in member.sessions if beat.session == session]
