"""What the pure side asks its driver to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from wire.codec import Payload
from wire.messages import Message, PeerRef
from wire.packets import Kind


class Route(NamedTuple):
    """How to reach a process: dial `address`, or, where that is "", its own connection to us (by id and boot).

    `key`: the public key that whoever answers there must have; "" where there are no keys."""

    id: str
    boot: int
    address: str
    key: str = ""


class Transmit(msgspec.Struct, frozen=True):
    """Put one packet on its way: the header and its payloads. May be lost; the link repeats what must arrive.

    A packet that only tells the present state (`Kind` up to PING) may replace an earlier one of its kind that is
    still waiting for the same route and lane.
    """

    route: Route
    lane: int
    kind: Kind
    parts: Sequence[Payload]


class Deliver(msgspec.Struct, frozen=True):
    """Hand a message to the process, exactly once."""

    sender: PeerRef
    message: Message
    frames: Sequence[memoryview]


class Lost(msgspec.Struct, frozen=True):
    """A boot is gone for good, and why; what was not acknowledged may or may not have arrived."""

    peer: PeerRef
    reason: str


class Release(msgspec.Struct, frozen=True):
    """Nobody is reached by this route: its sockets can be closed, unless a later packet has used it again."""

    route: Route


Command = Transmit | Deliver | Lost | Release
