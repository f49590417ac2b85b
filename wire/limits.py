"""Every limit of the wire in one place, each with its reason. Nothing here is negotiable by a peer.

`Limits` holds what a test may want smaller; the module's constants are part of the protocol (docs/protocol.md).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

PROTOCOL_VERSION = 2

HEADER_BYTES = 64 * KIB
"""A header is decoded into Python objects; one of this size costs milliseconds and megabytes at worst."""

HEADER_DEPTH = 16
"""No message type nests deeper (a test sees to it), so the typed structs refuse deeper input; a reader's stack is safe,
as msgpack itself ends at 512."""

HEADER_ARRAY = 8 * KIB
"""Longest array in a header: a deep network's gradient report has one entry per tensor."""

HEADER_MAP = 4 * KIB
"""Longest map in a header: a placement has one entry per VNode."""

ID_CHARS = 63
"""Ids become parts of file names, S3 keys and socket identities (which end at 255 bytes)."""

ADDRESSES = 8
"""Addresses one process may be dialled at."""

ADDRESS_CHARS = 256

FRAMES = 256
"""Frames of one message: one per tensor of a hop, and a stage border has few."""

NUMBER = (1 << 63) - 1
"""Largest number in a packet: what is counted up from it still fits into the 64 bits that a header has for it."""

BODY_BYTES = 64 * MIB
"""A frame that holds msgpack: a deployment of 100,000 VNodes takes 10 MB. As Python objects it takes more."""

TENSOR_DIMS = 16
TENSOR_EXTENT = 1 << 40

FRAME_BYTES = 4 * GIB
"""One tensor: a vocabulary of 128,000 times 8,192 wide in float32."""

MESSAGE_BYTES = 8 * GIB
"""All frames of one message. Pages are touched only as bytes arrive, so a false claim costs no memory."""

CHUNK_BYTES = MIB
"""A piece of a large message: fits the processor's cache, so that digest and copy are cheap. (Pieces of 256 KiB and
messages cut from 512 KiB on would overlap digests with travel, but the additional wake-ups cost twice the gain.)"""

WHOLE_BYTES = 4 * MIB
"""Messages up to this size travel whole; above it their frames are cut into chunks."""

PART_BYTES = 4 * MIB
"""The largest single frame of a packet that is accepted (MAXMSGSIZE: libzmq cuts off a peer that sends more)."""

PACKET_BYTES = PART_BYTES
"""All frames of one packet; what is larger comes in chunks."""

ACK_RANGES = 32
"""Gaps told in one acknowledgement; later ones are told by the next."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and times of a process's links. Times in seconds."""

    window_bytes: int = 32 * MIB  # sent to one peer on one lane and not acknowledged; above it a packet goes alone
    window_packets: int = 2048  # the same in packets: what a killed receiver can lose, and the queue in libzmq
    queue_bytes: int = GIB  # waiting or unacknowledged for one peer, above which send refuses (a message goes alone)
    queue_messages: int = 65536
    early_bytes: int = 64 * MIB  # out-of-order packets kept per lane: more than a window
    early_packets: int = 4096

    ack_bytes: int = 4 * MIB  # acknowledge at the latest after so many bytes …
    ack_packets: int = 64  # … or packets …
    ack_delay_s: float = 0.02  # … or this long after the first one

    stall_s: float = 0.25  # no progress for so long: ask the peer what it has
    stall_max_s: float = 4.0  # the back-off's end
    hello_s: float = 0.25
    hello_max_s: float = 2.0
    give_up_s: float = 60.0  # no sign of life while something waits: the peer is reported lost
    idle_s: float = 900.0  # a link without any traffic is dropped
    damaged_max: int = 10  # times one packet may arrive damaged before the link is given up

    peers: int = 4096  # links of a process
    dead_boots: int = 4096  # remembered, so that their late packets are refused
    ask_again_s: float = 2.0  # a request without an answer is sent again under its id
    answers: int = 4096  # remembered per process, so that a repeated request isn't carried out twice
    answers_bytes: int = 64 * MIB


LIMITS = Limits()

# ---------------------------------------------------------------- the sockets

SEND_HWM = 4096
"""Messages in a DEALER's queue; the window keeps it below that."""

RECEIVE_HWM = 512
"""Messages per peer in the ROUTER's queue: with PART_BYTES at most 2 GiB from a hostile peer, one window from ours."""

DRAIN_MESSAGES = 64
"""Messages taken from a socket before other work of the event loop gets its turn."""

DRAIN_BYTES = 2 * MIB
"""The same in bytes: below a millisecond of digests and copies."""

LINGER_MS = 500
"""How long closing may take to flush; the default is for ever."""

RECONNECT_MS, RECONNECT_MAX_MS = 50, 1000

ZMTP_HEARTBEAT_MS, ZMTP_TIMEOUT_MS = 3000, 9000
"""Finds half-open TCP connections. It does not show that the peer's loop runs: links have their own times."""

SOCKETS = 16384
"""ZMQ_MAX_SOCKETS: three per peer; the default of 1,023 ends at 340 peers."""

NO_COPY_SEND_BYTES = 128 * KIB
"""Frames from here on are sent from the caller's memory; handing a smaller one over costs more than to copy it."""

LOOPBACK_SEND_BUFFER_BYTES = 256 * KIB
"""Within one machine a small kernel buffer stays in the cache: 1 MiB hops take a third less time, floods run at twice
the rate. Towards other machines the kernel finds the size itself, as a fixed one would limit long fast lines."""
