"""What the rest of DCNR sees of the network: a bus that sends typed messages and hands over those that arrive.

Implemented by `wire.zmq_bus.ZmqBus` (real sockets) and `wire.sim.SimBus` (virtual network and clock); both drive the
same `wire.endpoint.Endpoint`. A message is delivered exactly once and in order within its lane between two boots, or
the peer is reported lost; whoever needs an answer by a time says so with `ask`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wire.messages import Message, PeerRef

Frame = memoryview
"""One raw frame; of a received message it stays valid for as long as somebody holds it."""

Buffer = bytes | bytearray | memoryview
"""What can be sent as a frame; it must not change until the message is acknowledged."""

Handler = Callable[[PeerRef, Message, Sequence[Frame]], None]
"""Called in the event loop with sender (id and boot; addresses as far as known), message and frames. Must not block."""

LossHandler = Callable[[PeerRef, str], None]
"""Called when a peer's boot is gone for good (restarted under a new boot, refused us, or closed) with the reason."""


BreakHandler = Callable[[PeerRef], None]
"""Called when a connection of a peer closed and nothing more came from it: it may have ended, or come back at once."""


class Bus(Protocol):
    """A process's connection to its peers. All methods are called in the event loop's thread."""

    @property
    def me(self) -> PeerRef:
        """This process: id, boot number, and the addresses at which it can be dialled (empty: dial-only)."""

    def on_message(self, handler: Handler) -> None:
        """Set the one handler of incoming messages."""

    def on_loss(self, handler: LossHandler) -> None:
        """Set the one handler of lost peers."""

    def on_break(self, handler: BreakHandler) -> None:
        """Set the one handler of connections that closed: a hint, seldom late and sometimes wrong."""

    async def start(self) -> None:
        """Bind (unless dial-only) and begin to receive."""

    async def close(self) -> None:
        """Say goodbye, flush for a bounded time, close every socket. Idempotent."""

    def send(self, to: PeerRef, message: Message, frames: Sequence[Buffer] = (), *, lane: int | None = None) -> None:
        """Queue a message, fire and forget. Lane: the message's own unless given.

        `to.boot` 0 means whichever process answers at the address; a known boot that turns out to be gone is
        reported to the loss handler. Raises `wire.errors.MisuseError` if the peer has neither address nor link, or
        the message breaks a limit; `wire.link.QueueFull` if the bytes queued for this peer exceed the limit.
        """

    async def ask(
        self, to: PeerRef, message: Message, frames: Sequence[Buffer] = (), *, timeout_s: float, lane: int | None = None
    ) -> tuple[Message, Sequence[Frame]]:
        """Send a request (it has a `request_id`) and wait for the message with the same id. Lane: the message's own
        unless given.

        Raises `wire.errors.UnreachableError` naming the peer and what was asked at the deadline, and
        `wire.requests.RefusedError` when the answer is `Refused`.
        """

    async def meet(self, to: PeerRef, *, timeout_s: float) -> None:
        """Make the link to a peer stand, without a message: so that one that can't dial this process can send to it.

        Raises `wire.errors.UnreachableError` at the deadline, `wire.errors.MisuseError` as `send` does.
        """

    def queued_bytes(self, to: PeerRef) -> int:
        """Bytes sent to this peer that it has not acknowledged."""

    def heard(self) -> list[PeerRef]:
        """The processes from which anything arrived since the last call: also acknowledgements, and pieces of messages
        that are not whole yet. What came before its connection closed does not count."""

    def forget(self, to: PeerRef) -> None:
        """Drop the link to this peer and what is queued for it."""
