"""Relayed links: how PNodes that can only dial reach each other through a third one, and how this one is such a third.

- Who can't be dialled binds to loopback only and tells nobody; what comes there comes through a relay (`wire.splice`).
- Of two such members of a session the one whose name comes first dials, at a port of its own on loopback (a stub); the
  other waits for it. Both make links to the relays first, for a relay can only tell those who are linked to it.
- A stub asks the relays one after another, so a stream that ends with its relay is made anew through the next one.
- A relay joins admitted PNodes only; and where a ticket leads to is believed only if it's at an address of its sender.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from wire.admission import Admission
from wire.errors import DCNRError, MisuseError, UnreachableError
from wire.messages import PeerRef, Refused, RelayOpen, RelayTicket
from wire.roles import PNODE
from wire.splice import RelayServer, Stub, answer, host_of, shown
from wire.zmq_bus import ZmqBus

OFF = "off"
JOIN_S = 30.0
"""So long may it take until two that can only dial have met."""
LOOK_S = 0.05
ANSWERS = 192
"""Streams that lead here at a time: three lanes of 64 others."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Relays:
    """See the module. `bind`: where to listen for others' streams; "" for a free port beside the bus's, or `OFF`."""

    def __init__(
        self, bus: ZmqBus, admission: Admission, log: structlog.typing.FilteringBoundLogger, *, bind: str = ""
    ) -> None:
        self._bus = bus
        self._admission = admission
        self._log = log
        self._bind = bind
        self._server: RelayServer | None = None
        self._starting = asyncio.Lock()
        self._stubs: dict[str, tuple[PeerRef, Stub]] = {}
        self._answers = 0
        admission.watch(self._expel)

    async def close(self) -> None:
        """Relay nothing any more, and lead nowhere."""
        for _, stub in self._stubs.values():
            await stub.close()
        self._stubs.clear()
        if self._server is not None:
            await self._server.close()

    # ------------------------------------------------------------------------------------ one that can only dial

    async def join(self, peers: Sequence[PeerRef], relays: Sequence[PeerRef]) -> list[PeerRef]:
        """Make the links to peers that can't be dialled; how to reach each. Raises `UnreachableError`."""
        names = ", ".join(peer.id for peer in peers)
        hint = "let a PNode that can be dialled join: it relays"
        if not relays:
            text = f"neither {self._bus.me.id} nor {names} can be dialled, and nobody relays"
            raise UnreachableError(text, hint=hint)
        problems = await asyncio.gather(*(self._meet(relay) for relay in relays))
        standing = [relay for relay, problem in zip(relays, problems, strict=True) if not problem]
        if not standing:
            raise UnreachableError(f"no relay to {names} is reached: {problems[0]}", hint=hint)
        return list(await asyncio.gather(*(self._join(peer, standing) for peer in peers)))

    async def _meet(self, peer: PeerRef) -> str:
        try:
            await self._bus.meet(peer, timeout_s=JOIN_S / 2)
        except DCNRError as error:
            return str(error)
        return ""

    async def _join(self, peer: PeerRef, relays: Sequence[PeerRef]) -> PeerRef:
        if self._bus.me.id > peer.id:
            await self._wait_for(peer)
            return peer
        stub = await self._stub(peer, relays)
        found = PeerRef(peer.id, peer.boot, [stub.address], peer.key)
        try:
            await self._bus.meet(found, timeout_s=JOIN_S)
        except UnreachableError as error:
            problem = f": {stub.problem}" if stub.problem else ""
            raise UnreachableError(f"{peer.id} is not reached through a relay{problem}") from error
        return found

    async def _stub(self, peer: PeerRef, relays: Sequence[PeerRef]) -> Stub:
        known = self._stubs.get(peer.id)
        if known is not None and (known[0].boot, known[0].key) == (peer.boot, peer.key):
            known[1].relays = list(relays)
            return known[1]
        if known is not None:
            await known[1].close()
        stub = Stub(self._bus, relays, peer.id)
        await stub.start()
        self._stubs[peer.id] = (peer, stub)
        return stub

    async def _wait_for(self, peer: PeerRef) -> None:
        """It dials; until it has, there is no address for it."""
        try:
            async with asyncio.timeout(JOIN_S):
                while True:
                    with contextlib.suppress(MisuseError):
                        await self._bus.meet(peer, timeout_s=JOIN_S)
                        return
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise UnreachableError(f"{peer.id} did not come through a relay within {JOIN_S:g} s") from None

    # ------------------------------------------------------------------------------------ messages

    def on(self, sender: PeerRef, message: RelayOpen | RelayTicket, spawn: Spawn) -> None:
        """Somebody wants to be joined with another one, or a relay has somebody for this process."""
        if isinstance(message, RelayOpen):
            spawn(self._open(sender, message))
            return
        if message.request_id:
            return  # the answer to a question that nobody waits for any more
        theirs = {host_of(address) for address in sender.addresses}
        if self._bus.me.addresses or host_of(message.address) not in theirs:
            self._log.warning("refused a relay's ticket", relay=sender.id, peer=message.peer, at=message.address)
        elif self._answers < ANSWERS:
            self._answers += 1
            spawn(self._answer(message))

    async def _answer(self, ticket: RelayTicket) -> None:
        try:
            await answer(self._bus, ticket)
        finally:
            self._answers -= 1

    async def _open(self, sender: PeerRef, message: RelayOpen) -> None:
        if self._bind == OFF or not self._bus.me.addresses:
            text = f"{self._bus.me.id} does not relay"
            self._bus.send(sender, Refused(message.request_id, "relay", text))
            return
        if message.to not in self._pnodes():
            text = f"{message.to[:63]!r} is no admitted PNode"
            self._bus.send(sender, Refused(message.request_id, "relay", text))
            return
        try:
            server = await self._started()
        except OSError as error:
            self._log.warning("can't relay", error=str(error))
            text = f"{self._bus.me.id} can't listen for streams: {error.strerror or error}"
            self._bus.send(sender, Refused(message.request_id, "relay", text))
            return
        self._log.info("relays", of=sender.id, to=message.to, at=server.address)
        server.take(sender, message)

    async def _started(self) -> RelayServer:
        async with self._starting:
            if self._server is None:
                bind = self._bind or f"tcp://{shown(host_of(self._bus.inner))}:0"
                server = RelayServer(self._bus, bind, seen_at=host_of(self._bus.me.addresses[0]))
                await server.start()
                self._server = server
            return self._server

    def _pnodes(self) -> set[str]:
        return {entry.id for entry in self._admission.entries() if entry.role == PNODE}

    def _expel(self) -> None:
        if self._server is not None:
            self._server.expel(self._pnodes().__contains__)
