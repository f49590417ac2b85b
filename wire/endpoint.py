"""All links of one process, pure: packets, sends and time in; commands out.

`out` receives the commands; whoever passes it carries them out. Rules:

- A packet is believed only if its source is the one that its connection is bound to, and its destination this boot.
- Only a Hello or Welcome makes a peer known; data of an unknown boot or stream is dropped and comes again.
- A boot is lost when another answers in its place, when it says goodbye, when it was silent for too long while
  something waited for it, or when its frames keep arriving damaged. It is reported once, with the reason. A boot that
  was replaced or said goodbye is dead: nothing is taken from it any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wire.assembly import Assembly, BufferPool
from wire.codec import (
    FrameError,
    HeaderError,
    MessageError,
    Payload,
    check_digests,
    check_frames,
    check_outgoing,
    read_header,
    read_message,
    tensor_problem,
    write_header,
)
from wire.commands import Command, Deliver, Lost, Route, Transmit
from wire.directory import Directory, check_address, introduces
from wire.errors import MisuseError
from wire.ids import checked_id, is_id
from wire.limits import ACK_RANGES, LIMITS, MESSAGE_BYTES, PACKET_BYTES, Limits
from wire.link import Arrival
from wire.messages import CONTROL, Message, PeerRef, Refused
from wire.packets import Ack, Bye, Chunk, Data, Gone, Hello, Kind, Linked, Packet, Ping, Welcome
from wire.peer import Peer, State

__all__ = ["Endpoint", "Source", "check_address"]


class Source(NamedTuple):
    """Whom a packet's connection belongs to: the identity it gave; of a connection we dialled ourselves id "", and
    whoever answers at that address is believed to be who it says.

    `key`: the public key that the connection proved. Then `id` is its owner's, and boot 0 on connections we dialled."""

    id: str
    boot: int
    lane: int
    key: str = ""


class Endpoint:
    """The links of the process `me`."""

    def __init__(self, me: PeerRef, limits: Limits = LIMITS) -> None:
        checked_id(me.id, "peer id")
        if me.boot <= 0:
            raise MisuseError("a process needs a boot number above 0", hint="wire.ids.new_boot()")
        self.me = me
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.soonest: float | None = None  # no timer is due before
        self._directory = Directory(me, limits)
        self._timed: dict[Peer, None] = {}  # a dict, because its order does not depend on addresses
        self._due: dict[Peer, None] = {}  # acknowledgements to be sent after this batch
        self._shortest_s = min(limits.ack_delay_s, limits.stall_s, limits.hello_s)
        self._pool = BufferPool()
        self._asked_at = 0.0  # when `heard` was asked last

    # ------------------------------------------------------------ sending

    def send(
        self,
        to: PeerRef,
        message: Message,
        frames: Sequence[Payload],
        lane: int | None,
        now: float,
        out: list[Command],
    ) -> None:
        """Queue a message. Raises `MisuseError`, `QueueFull`."""
        lane = message.lane if lane is None else lane
        if frames:
            frames = [_plain(frame) for frame in frames]
        sizes = check_outgoing(message, frames, lane)
        if to.boot == self.me.boot and to.id == self.me.id:
            out.append(Deliver(self.me, message, [memoryview(frame) for frame in frames]))
            return
        peer = self._directory.find(to, now, out)
        if peer is None:
            out.append(Lost(to, self._directory.dead((to.id, to.boot))))
            return
        peer.push(message, frames, sizes, lane)
        self.counters["messages_sent"] += 1
        if peer.state is State.UP:
            peer.pump(now, out)
        elif peer.greeting_since is None:
            peer.greeting_since = now
            out.append(peer.hello(now))
        self._time(peer, now)

    def greet(self, to: PeerRef, now: float, out: list[Command]) -> bool:
        """Make a link, with nothing to send yet; whether it stands. Raises `MisuseError`."""
        peer = self._directory.find(to, now, out)
        if peer is None:
            return False
        if peer.state is State.GREETING and peer.greeting_since is None:
            peer.greeting_since = now
            out.append(peer.hello(now))
            self._time(peer, now)
        return peer.state is State.UP

    def queued_bytes(self, to: PeerRef) -> int:
        """Bytes sent to this peer that it has not acknowledged."""
        peer = self._directory.known(to)
        return 0 if peer is None else peer.queued_bytes

    def idle(self) -> bool:
        """Whether everything sent was acknowledged."""
        return not any(peer.queued_bytes for peer in self._directory)

    def reaches(self, route: Route) -> bool:
        """Whether a peer is reached by dialling as this route says."""
        return self._directory.reaches(route)

    def heard(self, now: float) -> list[PeerRef]:
        """The processes from which any valid packet came since the last call, or at the very time of it."""
        since, self._asked_at = self._asked_at, now
        return [peer.ref for peer in self._directory if peer.ref.boot and peer.sign_at >= since]

    def broke(self, name: str, boot: int) -> PeerRef | None:
        """A connection of that process closed: who it is, if it is known; what came from it before is no sign of it."""
        peer = self._directory.by_boot.get((name, boot))
        if peer is None:
            return None
        peer.sign_at = -math.inf
        return peer.ref

    def forget(self, to: PeerRef, out: list[Command]) -> None:
        """Drop the link to this peer and what is queued for it; what it sends later begins a new link."""
        peer = self._directory.known(to)
        if peer is not None:
            self._drop(peer, out)

    def expel(self, refusal: Callable[[PeerRef], str], out: list[Command]) -> None:
        """Lose every peer for which `refusal` gives a reason: its key was taken off the list."""
        for peer in self._directory:
            reason = refusal(peer.ref)
            if reason:
                self._lose(peer, reason, out)

    def close(self, reason: str, out: list[Command]) -> None:
        """Say goodbye to everybody."""
        for peer in self._directory:
            if peer.state is State.UP or peer.their_stream:
                peer.flush(math.inf, out)
                header = write_header(Kind.BYE, *peer.addressed(), reason[:1000])
                out.append(Transmit(peer.route, CONTROL, Kind.BYE, (header,)))
        for peer in self._directory:
            self._drop(peer, [])

    # ------------------------------------------------------------ packets that come

    def on_frames(self, source: Source, header: Payload, frames: Sequence[Any], now: float, out: list[Command]) -> None:
        """One packet from the connection that is bound to `source`."""
        try:
            packet = read_header(header)
        except HeaderError:
            self.counters["refused_headers"] += 1
            return
        bound = packet.src == source.id and source.boot in (0, packet.src_boot)
        if not (bound or not source.id) or not packet.src_boot or not is_id(packet.src):
            self.counters["refused_sources"] += 1
            return
        if isinstance(packet, Linked):
            peer = self._directory.by_boot.get((packet.src, packet.src_boot))
            if packet.dst != self.me.id or packet.dst_boot != self.me.boot:
                self.counters["refused_destinations"] += 1
            elif peer is None or packet.stream != peer.their_stream or peer.torn:
                self.counters["refused_streams"] += 1
            else:
                self._linked(peer, packet, frames, now, out)
        elif frames:
            self.counters["refused_frames"] += 1
        elif self._directory.dead((packet.src, packet.src_boot)):
            self.counters["refused_dead"] += 1
        else:
            self._handshake(packet, source.key, now, out)

    def _linked(self, peer: Peer, packet: Linked, frames: Sequence[Any], now: float, out: list[Command]) -> None:
        peer.heard_at = peer.sign_at = now
        if packet.yours == peer.stream:
            if peer.state is State.GREETING:
                peer.up(now, out)
            problem = peer.acknowledged(packet.acks, packet if type(packet) is Ack else None, now, out)
            if problem:
                self._lose(peer, problem, out)
                return
        if type(packet) is Data or type(packet) is Chunk:
            receiving = peer.receiving[packet.lane]
            self._data(peer, packet, frames, now, out)
            if receiving.ack_at is not None and receiving.ack_at <= now:
                self._due[peer] = None
        elif frames:
            self.counters["refused_frames"] += 1
        elif isinstance(packet, Ping):
            receiving = peer.receiving[packet.lane]
            receiving.answer_ping = packet.ping
            receiving.ack_at = now
            self._due[peer] = None
        self._time(peer, now)

    def _data(self, peer: Peer, packet: Data | Chunk, frames: Sequence[Any], now: float, out: list[Command]) -> None:
        receiving = peer.receiving[packet.lane]
        size = sum(map(len, frames))
        if packet.seq != receiving.next_seq:
            arrival = receiving.arrival(packet.seq, size)
            if arrival is Arrival.DUPLICATE:
                self.counters["duplicates"] += 1
                receiving.ack_at = now
                return
            if arrival is Arrival.TOO_FAR:
                self.counters["dropped_early"] += 1
                return
        described: Sequence[tuple[int, int]]
        if type(packet) is Data:
            described = () if packet.chunks else packet.frames
        else:
            described = ((packet.size, packet.digest),)  # type: ignore[union-attr]
        try:
            check_frames(described, frames)
            if size > PACKET_BYTES:
                raise FrameError(f"packet of {size} bytes")
        except FrameError:
            self.counters["refused_frames"] += 1
            return
        if not check_digests(described, frames):
            self.counters["damaged"] += 1
            if packet.seq not in receiving.damaged and len(receiving.damaged) < ACK_RANGES:
                receiving.damaged.append(packet.seq)
            receiving.ack_at = now
            return
        for stored, its_frames in receiving.store(packet.seq, size, (packet, frames), now):
            self._in_order(peer, stored, its_frames, now, out)

    def _in_order(
        self, peer: Peer, packet: Data | Chunk, frames: Sequence[Any], now: float, out: list[Command]
    ) -> None:
        lane = packet.lane
        assembly = peer.assembling[lane]
        if isinstance(packet, Chunk):
            if assembly is None:
                self.counters["refused_chunks"] += 1
                return
            try:
                last = assembly.add(packet, frames[0])
            except FrameError:
                self.counters["refused_chunks"] += 1
                peer.assembling[lane] = None
                return
            if last:
                peer.assembling[lane] = None
                if assembly.message is not None:
                    self._deliver(peer, assembly.message, assembly.frames, out)
            return
        if assembly is not None:
            self.counters["refused_chunks"] += 1
            peer.assembling[lane] = None
        sizes = [size for size, _ in packet.frames]
        message: Message | None = None
        try:
            message = read_message(packet.message)
            problem = tensor_problem(message, sizes)
            if problem:
                raise MessageError(problem)
            if packet.chunks and sum(sizes) > MESSAGE_BYTES:
                raise MessageError(f"{sum(sizes)} bytes of frames; at most {MESSAGE_BYTES} are allowed")
            if packet.chunks:
                peer.assembling[lane] = Assembly(message, sizes, packet.chunks, self._pool)
                return
        except (MessageError, FrameError, MemoryError, OSError) as error:
            self.counters["refused_messages"] += 1
            if packet.chunks:
                peer.assembling[lane] = Assembly(None, sizes, packet.chunks, self._pool)
            self._refuse(peer, packet.message, str(error) or "out of memory", now, out)
            return
        self._deliver(peer, message, [self._pool.copy(frame) for frame in frames], out)

    def _deliver(self, peer: Peer, message: Message, frames: Sequence[Any], out: list[Command]) -> None:
        self.counters["messages_received"] += 1
        out.append(Deliver(peer.ref, message, frames))

    def _refuse(self, peer: Peer, fields: Sequence[Any], text: str, now: float, out: list[Command]) -> None:
        """If what can't be read looks like a request, tell its sender so; never refuse a refusal."""
        if len(fields) > 1 and type(fields[1]) is str and len(fields[1]) <= 64 and fields[0] != "refused":
            answer = Refused(fields[1], "unreadable", text, "do both sides run the same version?")
            self.send(peer.ref, answer, (), None, now, out)

    # ------------------------------------------------------------ handshake

    def _handshake(self, packet: Packet, proved: str, now: float, out: list[Command]) -> None:
        key = (packet.src, packet.src_boot)
        match packet:
            case Hello() if introduces(packet.me, key):
                if packet.dst not in ("", self.me.id) or packet.dst_boot not in (0, self.me.boot):
                    out.append(self._gone(packet, _route(_proved(packet.me, proved))))
                    return
                peer = self._directory.by_boot.get(key)
                if peer is not None and peer.ref.key != proved:
                    self._lose(peer, f"{packet.src} has another key now", out)
                    peer = None
                known = peer is not None
                if peer is None:
                    self._replaced(packet.me, out)
                    if len(self._directory.by_boot) >= self.limits.peers:
                        self.counters["refused_peers"] += 1
                        return
                    peer = self._directory.add(_proved(packet.me, proved), now, out)
                peer.heard_at = peer.sign_at = now
                if not peer.ref.addresses and packet.me.addresses:
                    peer.meet(_proved(packet.me, proved))
                if not packet.dst_boot and (known or peer.their_stream) and packet.stream != peer.their_stream:
                    # It does not know yet whom it greets, and may have another link to us, which goes on then.
                    out.append(peer.welcome(packet.stream))
                elif peer.begin_stream(packet.stream, packet.bases):
                    out.append(peer.welcome())
                elif packet.dst_boot:
                    out.append(self._gone(packet, peer.route))
                self._time(peer, now)
            case Welcome() if introduces(packet.me, key) and packet.dst_boot == self.me.boot:
                greeted = self._directory.of_stream(packet.yours)
                if greeted is not None and greeted.ref.key == proved:
                    self._welcomed(greeted, packet, now, out)
            case Gone() if introduces(packet.me, key) and packet.dst_boot == self.me.boot:
                greeted = self._directory.of_stream(packet.yours)
                if greeted is not None and greeted.ref.key == proved:
                    self._refused(greeted, packet, now, out)
            case Bye() if packet.dst_boot == self.me.boot:
                peer = self._directory.by_boot.get(key)
                if peer is not None:
                    self._lose(peer, f"{packet.src} has closed: {packet.reason}", out, dead=True)
            case _:
                self.counters["refused_handshakes"] += 1

    def _gone(self, packet: Hello | Welcome, route: Route) -> Transmit:
        """What this packet greets, or the stream that it names, is not here any more: who is."""
        gone = write_header(Kind.GONE, self.me.id, self.me.boot, packet.src, packet.src_boot, self.me, packet.stream)
        return Transmit(route, CONTROL, Kind.GONE, (gone,))

    def _refused(self, peer: Peer, packet: Gone, now: float, out: list[Command]) -> None:
        if (peer.ref.id, peer.ref.boot) != (packet.src, packet.src_boot):
            self._lose(peer, _gone_reason(peer, packet.me), out, dead=peer.ref.id == packet.me.id)
        elif peer.state is State.UP:
            self._lose(peer, f"{peer.name} has dropped what had arrived over this link", out)
        elif self._directory.renew(peer):
            out.append(peer.hello(now))
            if peer.greeting_since is None:
                peer.hello_at = None
            self._time(peer, now)

    def _replaced(self, ref: PeerRef, out: list[Command]) -> None:
        for other in self._directory.replaced_by(ref):
            self._lose(other, f"boot {ref.boot} of {ref.id} has taken its address", out, dead=True)

    def _welcomed(self, peer: Peer, packet: Welcome, now: float, out: list[Command]) -> None:
        key = (packet.src, packet.src_boot)
        if peer.ref.boot == 0:
            if peer.ref.id not in ("", packet.src):
                self._lose(peer, _gone_reason(peer, packet.me), out)
                return
            address = peer.route.address
            existing = self._directory.by_boot.get(key)
            if existing is None:
                self._replaced(packet.me, out)
                # The address that answered is the one that works; what it advertises may not be reachable from here.
                others = [other for other in packet.me.addresses if other != address]
                peer.meet(PeerRef(packet.src, packet.src_boot, [address, *others], peer.ref.key))
                self._directory.renew(peer)
                self._directory.enter(peer)
                out.append(peer.hello(now))  # now that it's known whom: our stream begins there, if it did not yet
            else:
                self._timed.pop(peer, None)
                self._directory.merge(peer, existing, out)
                peer = existing
                if peer.state is State.GREETING:
                    out.append(peer.hello(now))
        elif (peer.ref.id, peer.ref.boot) != key:
            self.counters["refused_handshakes"] += 1
            return
        peer.heard_at = peer.sign_at = now
        if not peer.begin_stream(packet.stream, packet.bases):
            # A late answer, or the other is in a life of the link that can't go on: greeting goes on.
            out.append(self._gone(packet, peer.route))
            peer.pump(now, out)
            self._time(peer, now)
            return
        peer.hello_at = None
        before = len(out)
        if packet.yours == peer.stream:
            peer.up(now, out)
        peer.pump(now, out)
        if peer.state is State.GREETING and peer.greeting_since is not None:
            out.append(peer.hello(now))
        elif len(out) == before:
            out.append(peer.ack(CONTROL))  # shows that the Welcome has come
        self._time(peer, now)

    # ------------------------------------------------------------ time and loss

    def on_tick(self, now: float, out: list[Command]) -> None:
        """Do what is due; `soonest` says when to call again."""
        self.soonest = None
        for peer in list(self._timed):
            problem = peer.tick(now, out)
            if problem:
                self._lose(peer, problem, out)
            else:
                self._time(peer, now)

    def flush(self, now: float, out: list[Command]) -> None:
        """Send the acknowledgements that are due; call it after a batch of packets."""
        if self._due:
            for peer in self._due:
                peer.flush(now, out)
            self._due.clear()

    def _time(self, peer: Peer, now: float) -> None:
        """See to it that the peer's timers are looked at in time.

        A peer that is looked at soon anyway needs no new time: no timer is set for sooner than an acknowledgement.
        """
        if self.soonest is not None and self.soonest <= now + self._shortest_s and peer in self._timed:
            return
        deadline = peer.deadline() if peer.state is not State.GONE else None
        if deadline is None:
            self._timed.pop(peer, None)
            return
        self._timed[peer] = None
        if self.soonest is None or deadline < self.soonest:
            self.soonest = deadline

    def _lose(self, peer: Peer, reason: str, out: list[Command], *, dead: bool = False) -> None:
        out.append(peer.lost(reason))
        self._drop(peer, out)
        if dead:
            self._directory.bury(peer, reason)

    def _drop(self, peer: Peer, out: list[Command]) -> None:
        self._timed.pop(peer, None)
        self._due.pop(peer, None)
        self._directory.drop(peer, out)

    # ------------------------------------------------------------ what people see

    def snapshot(self) -> dict[str, Any]:
        """Counters, and per peer what is queued and under way."""
        return {
            **self.counters,
            "peers": {
                f"{peer.ref.id}/{peer.ref.boot}": {
                    "state": peer.state.value,
                    "queued_bytes": peer.queued_bytes,
                    "queued_packets": peer.queued_messages,
                    "flying_bytes": sum(sending.flying_bytes for sending in peer.sending),
                    "early_bytes": sum(receiving.early_bytes for receiving in peer.receiving),
                    "resends": peer.resends,
                    "pings": peer.pings,
                }
                for peer in self._directory
            },
        }


def _plain(frame: Any) -> Payload:
    """The frame as something whose `len` is its bytes."""
    if isinstance(frame, bytes | bytearray):
        return frame
    view = memoryview(frame)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise MisuseError("a frame must be contiguous memory")
    return view.cast("B") if view.nbytes else b""


def _proved(ref: PeerRef, key: str) -> PeerRef:
    """Whoever introduces itself, with the key that its connection proved, whatever it says itself."""
    return ref if ref.key == key else PeerRef(ref.id, ref.boot, ref.addresses, key)


def _route(ref: PeerRef) -> Route:
    return Route(ref.id, ref.boot, ref.addresses[0] if ref.addresses else "", ref.key)


def _gone_reason(peer: Peer, here: PeerRef) -> str:
    if here.id != peer.ref.id:
        return f"{peer.name}: there answers {here.id} instead"
    return f"{peer.name} has restarted: boot {here.boot} answers instead of {peer.ref.boot}"
