"""What the pure side asks its driver to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wire.codec import Payload
from wire.messages import Message, PeerRef
from wire.packets import Kind


class Route(NamedTuple):
    """How to reach a process: dial `address`, or, where that is "", its own connection to us (by id and boot)."""

    id: str
    boot: int
    address: str


@dataclass(frozen=True, slots=True)
class Transmit:
    """Put one packet on its way: the header and its payloads. May be lost; the link repeats what must arrive.

    A packet that only tells the present state (`Kind` up to PING) may replace an earlier one of its kind that is
    still waiting for the same route and lane.
    """

    route: Route
    lane: int
    kind: Kind
    parts: Sequence[Payload]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a message to the process, exactly once."""

    sender: PeerRef
    message: Message
    frames: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Lost:
    """A boot is gone for good, and why; what was not acknowledged may or may not have arrived."""

    peer: PeerRef
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody is reached by this route any longer: its sockets can be closed."""

    route: Route


Command = Transmit | Deliver | Lost | Release
