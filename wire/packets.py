"""The packets of the link protocol: what a header says, before and around a message.

A header is the msgpack array `[version, kind, source id, source boot, destination id, destination boot, …]`; the rest
depends on the kind. Kinds up to GONE make and end a link and carry no sequence number; DATA and CHUNK are numbered per
lane and repeated until acknowledged; ACK and PING speak about numbers. docs/protocol.md tells the whole story.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any

import msgspec

from wire.limits import ACK_RANGES, FRAME_BYTES, FRAMES, ID_CHARS, MESSAGE_BYTES, NUMBER
from wire.messages import PeerRef

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER)]
Digest = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=ID_CHARS)]
LaneNumber = Annotated[int, msgspec.Meta(ge=0, le=2)]
Three = tuple[Number, Number, Number]
FrameSize = Annotated[int, msgspec.Meta(ge=0, le=FRAME_BYTES)]


class Kind(IntEnum):
    """What a packet is."""

    HELLO = 0
    WELCOME = 1
    BYE = 2
    GONE = 3
    ACK = 4
    PING = 5
    DATA = 6
    CHUNK = 7


class Packet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all packets: from which boot of which process, to which."""

    version: Number
    kind: Number
    src: Name
    src_boot: Number
    dst: Name
    dst_boot: Number


class Hello(Packet, frozen=True):
    """A process introduces itself. `stream`: the life of its link to the other; `bases`: next number per lane that is
    not acknowledged. `dst` "" or `dst_boot` 0: whoever answers."""

    me: PeerRef
    stream: Number
    bases: Three


class Welcome(Packet, frozen=True):
    """Answer to Hello: `yours` is the stream it named; the rest introduces the one who answers."""

    me: PeerRef
    yours: Number
    stream: Number
    bases: Three


class Bye(Packet, frozen=True):
    """The sender closes; this boot never speaks again."""

    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Gone(Packet, frozen=True):
    """Answer to a Hello meant for another boot or id: who is here instead. `yours`: the stream it named.

    From the process that was meant: that stream can't go on.
    """

    me: PeerRef
    yours: Number


class Linked(Packet, frozen=True):
    """Base of what travels on a link that stands. `yours`: the receiver's stream that `acks` speaks of; `acks`: per
    lane, the number below which all has been stored."""

    stream: Number
    yours: Number
    acks: Three


class Ack(Linked, frozen=True):
    """What has been stored. `lane`: the one that `ranges` (stored beyond the gap, [first, last]) and `damaged`
    (arrived with a wrong digest) speak of. `ping`: the number of the ping that this answers, else 0."""

    lane: LaneNumber
    ping: Number
    ranges: Annotated[list[tuple[Number, Number]], msgspec.Meta(max_length=ACK_RANGES)]
    damaged: Annotated[list[Number], msgspec.Meta(max_length=ACK_RANGES)]


class Ping(Linked, frozen=True):
    """Asks for an Ack. It follows its lane's data on the same connection, so that what the answer lacks is lost."""

    lane: LaneNumber
    ping: Number


class Data(Linked, frozen=True):
    """A message. `frames`: size and xxh3-64 digest of each; with `chunks` > 0 the frames follow in so many CHUNKs of
    the same lane, and the digests here are 0."""

    lane: LaneNumber
    seq: Number
    frames: Annotated[list[tuple[FrameSize, Digest]], msgspec.Meta(max_length=FRAMES)]
    chunks: Annotated[int, msgspec.Meta(ge=0, le=MESSAGE_BYTES)]
    message: list[Any]


class Chunk(Linked, frozen=True):
    """A piece of the message before it: `size` bytes of frame `frame` from `offset` on."""

    lane: LaneNumber
    seq: Number
    frame: Annotated[int, msgspec.Meta(ge=0, lt=FRAMES)]
    offset: FrameSize
    size: FrameSize
    digest: Digest


KINDS: dict[int, type[Packet]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.BYE: Bye,
    Kind.GONE: Gone,
    Kind.ACK: Ack,
    Kind.PING: Ping,
    Kind.DATA: Data,
    Kind.CHUNK: Chunk,
}
