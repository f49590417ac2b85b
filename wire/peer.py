"""Everything this process knows of one other process: the handshake and three lanes each way.

States: GREETING (Hello is sent, what is to be sent waits) -> UP (the other has named our stream) -> GONE. The other
side's data is taken as soon as its stream is known, from its Hello or its Welcome. Each life of the link has a stream
number; what belongs to another life is dropped, and a Hello brings both sides together again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

from wire.assembly import Assembly, cut
from wire.codec import Payload, digest_of, write_header, write_message
from wire.commands import Command, Lost, Route, Transmit
from wire.limits import WHOLE_BYTES, Limits
from wire.link import Parcel, QueueFull, ReceiveLane, SendLane
from wire.messages import CONTROL, LANES, Message, PeerRef
from wire.packets import Ack, Kind, Ping

Stored = tuple[Any, Any]
"""What a receive lane keeps: (message or its refusal or a chunk, its frames)."""


PROMPT_BYTES = 1 << 20
"""Acknowledgements that ride on a bulk lane with more than this under way would come too late to count."""


class State(Enum):
    """Where the link stands."""

    GREETING = "greeting"
    UP = "up"
    GONE = "gone"


class Peer:
    """One other process."""

    def __init__(self, me: PeerRef, ref: PeerRef, stream: int, limits: Limits, now: float) -> None:
        self.me = me
        self.stream = stream
        self.limits = limits
        self.state = State.GREETING
        self.their_stream = 0
        self.torn = False  # part of what had arrived of their stream was dropped: it can't go on
        self.sending = tuple(SendLane(limits) for _ in LANES)
        self.receiving: tuple[ReceiveLane[Stored], ...] = tuple(ReceiveLane(limits) for _ in LANES)
        self.assembling: list[Assembly | None] = [None for _ in LANES]
        self.queued_bytes = 0
        self.queued_messages = 0
        self._acks_heard = (0, 0, 0)  # by the latest packet
        self._address_index = 0
        self.meet(ref)
        self.hello_at: float | None = None
        self.hello_s = limits.hello_s
        self.heard_at = now  # or made
        self.sign_at = -math.inf  # when the last packet came, if any did
        self.greeting_since: float | None = None  # since when something waits for the other's answer to a Hello
        self.resends = 0
        self.pings = 0

    # ------------------------------------------------------------ who and where

    def meet(self, ref: PeerRef) -> None:
        """This is who it is and where it can be dialled."""
        self.ref = ref
        self._address_index = 0
        self._head = (self.me.id, self.me.boot, ref.id, ref.boot)
        self._readdress()

    def _readdress(self) -> None:
        ref = self.ref
        address = ref.addresses[self._address_index % len(ref.addresses)] if ref.addresses else ""
        self.route = Route(ref.id, ref.boot, address, ref.key)

    @property
    def name(self) -> str:
        """For people."""
        where = f" at {self.route.address}" if self.route.address else ""
        return f"{self.ref.id or 'whoever answers'}{where}"

    # ------------------------------------------------------------ sending

    def push(self, message: Message, frames: Sequence[Payload], sizes: Sequence[int], lane: int) -> None:
        """Queue a message. Raises `QueueFull`."""
        raw = write_message(message)
        total = sum(sizes) + len(raw)
        limits = self.limits
        if self.queued_messages and (
            self.queued_bytes + total > limits.queue_bytes or self.queued_messages >= limits.queue_messages
        ):
            raise QueueFull(
                f"{self.queued_bytes} bytes in {self.queued_messages} packets wait for {self.name} "
                f"(limit {limits.queue_bytes} bytes, {limits.queue_messages} packets)",
                hint="it is slower than this side sends, or it stands still",
            )
        label = type(message).__name__
        waiting = self.sending[lane].waiting
        packed = msgspec.Raw(raw)
        before = len(waiting)
        if total <= WHOLE_BYTES:
            waiting.append(Parcel(Kind.DATA, (sizes, 0, packed), frames, total, label))
        else:
            pieces = list(cut(frames))
            described = [(size, 0) for size in sizes]
            waiting.append(Parcel(Kind.DATA, (described, len(pieces), packed), (), len(raw), label, last=False))
            waiting.extend(
                Parcel(
                    Kind.CHUNK,
                    (piece.frame, piece.offset, len(piece.payload)),
                    (piece.payload,),
                    len(piece.payload),
                    label,
                    last=False,
                )
                for piece in pieces
            )
            waiting[-1].last = True
        self.queued_bytes += total
        self.queued_messages += len(waiting) - before

    def pump(self, now: float, out: list[Command]) -> None:
        """Transmit what the windows allow, control first."""
        if self.state is not State.UP:
            return
        for lane in LANES:
            sending = self.sending[lane]
            if sending.waiting:
                for parcel in sending.pump(now):
                    out.append(self.transmit(lane, parcel))

    def transmit(self, lane: int, parcel: Parcel) -> Transmit:
        """The packet of a numbered parcel, with fresh acknowledgements."""
        payloads, fields = parcel.payloads, parcel.fields
        digests = parcel.digests
        if digests is None:
            digests = parcel.digests = [digest_of(payload) for payload in payloads]
        if parcel.kind is Kind.CHUNK:
            fields = (*fields, digests[0])
        elif payloads:
            fields = (list(zip(fields[0], digests, strict=True)), fields[1], fields[2])
        header = write_header(
            parcel.kind, *self._head, self.stream, self.their_stream, self.acks(), lane, parcel.seq, *fields
        )
        if lane == CONTROL or self.sending[lane].flying_bytes <= PROMPT_BYTES:
            for receiving in self.receiving:
                if receiving.ack_at is not None and not (receiving.early or receiving.answer_ping or receiving.damaged):
                    receiving.told()
        return Transmit(self.route, lane, parcel.kind, (header, *payloads))

    def addressed(self) -> tuple[str, int, str, int]:
        """Source and destination, as each header says them."""
        return self._head

    def acks(self) -> tuple[int, int, int]:
        """Per lane, the number below which all is stored."""
        first, second, third = self.receiving
        return first.next_seq, second.next_seq, third.next_seq

    def bases(self) -> tuple[int, int, int]:
        """Per lane, the lowest number that the other has not acknowledged."""
        first, second, third = self.sending
        return first.base, second.base, third.base

    def hello(self, now: float) -> Transmit:
        """Greet, and set when to greet again."""
        self.hello_at = now + self.hello_s
        self.hello_s = min(2 * self.hello_s, self.limits.hello_max_s)
        header = write_header(Kind.HELLO, *self.addressed(), self.me, self.stream, self.bases())
        return Transmit(self.route, CONTROL, Kind.HELLO, (header,))

    def welcome(self, greeting: int = 0) -> Transmit:
        """Answer a Hello; `greeting`: one that began no stream, by the stream that it named."""
        yours = greeting or self.their_stream
        header = write_header(Kind.WELCOME, *self.addressed(), self.me, yours, self.stream, self.bases())
        return Transmit(self.route, CONTROL, Kind.WELCOME, (header,))

    def ack(self, lane: int) -> Transmit:
        """Tell what a lane has stored."""
        receiving = self.receiving[lane]
        header = write_header(
            Kind.ACK,
            *self.addressed(),
            self.stream,
            self.their_stream,
            self.acks(),
            lane,
            receiving.answer_ping,
            receiving.ranges(),
            receiving.damaged,
        )
        receiving.told()
        return Transmit(self.route, CONTROL, Kind.ACK, (header,))

    # ------------------------------------------------------------ what the other says

    def begin_stream(self, stream: int, bases: Sequence[int]) -> bool:
        """The other names its stream and its bases. False if that is an older life of the link, or can't go on."""
        if stream < self.their_stream or (self.torn and stream == self.their_stream):
            return False
        if stream > self.their_stream:
            self.their_stream = stream
            self.torn = False
            self.receiving = tuple(ReceiveLane(self.limits) for _ in LANES)
            self.assembling = [None for _ in LANES]
        for receiving, base in zip(self.receiving, bases, strict=True):
            receiving.advance(base)
        return True

    def incomplete(self) -> bool:
        """Whether something that was acknowledged, or may have been, is not handed over yet."""
        return any(receiving.early for receiving in self.receiving) or any(one is not None for one in self.assembling)

    def up(self, now: float, out: list[Command]) -> None:
        """The other has named our stream: what waits can go."""
        if self.state is State.GREETING:
            self.state = State.UP
            self.hello_at = None
            self.hello_s = self.limits.hello_s
            self.greeting_since = None
            self.pump(now, out)

    def acknowledged(
        self, acks: tuple[int, int, int], packet: Ack | Ping | None, now: float, out: list[Command]
    ) -> str:
        """Take acknowledgements. Returns why the link can't go on, or ""."""
        if packet is None and acks == self._acks_heard:
            return ""
        self._acks_heard = acks
        freed = False
        for lane, (sending, below) in enumerate(zip(self.sending, acks, strict=True)):
            done = sending.acked_below(below, now) if sending.flying else []
            if type(packet) is Ack and packet.lane == lane:
                further, again = sending.acked_beyond(done, packet.ranges, packet.damaged, packet.ping, now)
                done.extend(further)
                for parcel in again:
                    problem = self._worn(parcel)
                    if problem:
                        return problem
                    self.resends += 1
                    out.append(self.transmit(lane, parcel))
            for parcel in done:
                self.queued_bytes -= parcel.size
                self.queued_messages -= 1
                freed = True
        if freed:
            self.pump(now, out)
        return ""

    def _worn(self, parcel: Parcel) -> str:
        if parcel.digests is not None and parcel.digests != [digest_of(p) for p in parcel.payloads]:
            return f"a frame of {parcel.label} was changed by this process before it was acknowledged"
        if parcel.damaged > self.limits.damaged_max:
            return f"a frame of {parcel.label} arrived damaged {parcel.damaged} times"
        return ""

    # ------------------------------------------------------------ time

    def tick(self, now: float, out: list[Command]) -> str:
        """Do what is due. Returns why the peer is given up, or ""."""
        give_up_s = self.limits.give_up_s
        if self.greeting_since is not None and now - self.greeting_since >= give_up_s:
            return f"{self.name} did not answer for {give_up_s:.0f} s"
        if self.hello_at is not None and now >= self.hello_at:
            self._address_index += 1
            self._readdress()
            out.append(self.hello(now))
        if self.state is State.UP:
            for lane in LANES:
                sending = self.sending[lane]
                ping = sending.stalled(now)
                if not ping:
                    continue
                if now - sending.progress_at >= give_up_s:
                    return f"{self.name} acknowledged nothing for {now - sending.progress_at:.0f} s"
                self.pings += 1
                header = write_header(
                    Kind.PING, *self.addressed(), self.stream, self.their_stream, self.acks(), lane, ping
                )
                out.append(Transmit(self.route, lane, Kind.PING, (header,)))
                out.append(self.hello(now))
                self.hello_at = None
        self.flush(now, out)
        return ""

    def flush(self, now: float, out: list[Command]) -> None:
        """Send the acknowledgements that are due."""
        for lane in LANES:
            ack_at = self.receiving[lane].ack_at
            if ack_at is not None and now >= ack_at:
                out.append(self.ack(lane))

    def deadline(self) -> float | None:
        """When `tick` has something to do, or None."""
        found = self.hello_at
        if self.greeting_since is not None:
            found = _sooner(found, self.greeting_since + self.limits.give_up_s)
        for sending in self.sending:
            found = _sooner(found, sending.stall_at)
        for receiving in self.receiving:
            found = _sooner(found, receiving.ack_at)
        return found

    def lost(self, reason: str) -> Lost:
        """Report it, with what was under way."""
        self.state = State.GONE
        labels = [
            parcel.label
            for sending in self.sending
            for parcel in (*sending.flying.values(), *sending.waiting)
            if parcel.last
        ]
        if labels:
            kinds = ", ".join(f"{labels.count(label)} {label}" for label in sorted(set(labels))[:6])
            reason = f"{reason}; not acknowledged: {kinds}"
        return Lost(self.ref, reason)


def _sooner(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
