"""PNodes that can only dial, and those that join them: real sockets, the daemon's own part, nothing that computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from pnode.relays import OFF, Relays
from tests.integration.wire.keyed import Keyed, running, until
from tests.integration.wire.peers import hop
from wire.errors import UnreachableError
from wire.ids import new_request_id
from wire.messages import PeerRef, RelayOpen, RelayTicket
from wire.requests import RefusedError


class Machine(Keyed):
    """A bus with keys and a PNode's relays."""

    def __init__(self, name: str, *, hidden: bool = False, relay: str = "") -> None:
        super().__init__(name, reachable=not hidden)
        log = structlog.wrap_logger(structlog.testing.ReturnLogger())
        self.relays = Relays(self.bus, self.admission, log, bind=relay)
        self.tasks: set[asyncio.Future[None]] = set()
        self.bus.on_message(self._message)

    def _message(self, sender, message, frames) -> None:
        if isinstance(message, RelayOpen | RelayTicket):
            self.relays.on(sender, message, self._spawn)
        else:
            self._took(sender, message, frames)

    def _spawn(self, work) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @property
    def me(self) -> PeerRef:
        return self.bus.me


@asynccontextmanager
async def machines(*every: Machine) -> AsyncIterator[None]:
    async with running(*every):
        try:
            yield
        finally:
            for one in every:
                await one.relays.close()
            await asyncio.sleep(0.2)


async def meet(a: Machine, b: Machine, *relays: Machine) -> PeerRef:
    """Both are told to meet, as by a deployment; how a reaches b."""
    refs = [relay.me for relay in relays]
    [[there], _] = await asyncio.gather(a.relays.join([b.me], refs), b.relays.join([a.me], refs))
    return there


async def test_two_that_can_only_dial_meet_through_the_first_relay_and_go_on_through_the_next():
    a, b, first, second = Machine("a", hidden=True), Machine("b", hidden=True), Machine("r1"), Machine("r2")
    async with machines(a, b, first, second):
        there = await meet(a, b, first, second)
        for step in range(5):
            a.bus.send(there, hop(step))
            await until(lambda: b.got)
            sender, message, _ = b.got.pop()
            assert (sender.id, sender.key, message) == ("a", a.pair.public, hop(step))
            b.bus.send(a.me, message)  # by id and boot: there is no address
            await until(lambda: a.got)
            assert a.got.pop()[1] == message
        assert first.relays._server is not None
        assert first.relays._server.carried_bytes > 1000
        assert second.relays._server is None, "one is enough"
        await first.relays.close()
        await first.bus.close()
        for step in range(5, 10):
            a.bus.send(there, hop(step))
            b.bus.send(a.me, hop(step))
        await until(lambda: len(a.got) == len(b.got) == 5, 60)
        assert [message.step for _, message, _ in b.got] == list(range(5, 10))
        assert second.relays._server is not None
        assert not [peer for peer, _ in (*a.lost, *b.lost) if peer.id in "ab"]


async def test_without_a_relay_it_is_said_who_is_needed():
    a, b, r = Machine("a", hidden=True), Machine("b", hidden=True), Machine("r", relay=OFF)
    async with machines(a, b, r):
        with pytest.raises(UnreachableError, match=r"neither a nor b can be dialled, and nobody relays \(let a PNode"):
            await a.relays.join([b.me], [])
        for asked, to, text in ((r, "b", "r does not relay"), (r, "nobody", "r does not relay")):
            with pytest.raises(RefusedError, match=text):
                await a.bus.ask(asked.anyone, RelayOpen(new_request_id(), to), timeout_s=15)


async def test_a_relay_joins_admitted_pnodes_only_and_ends_the_streams_of_who_is_revoked():
    a, b, r = Machine("a", hidden=True), Machine("b", hidden=True), Machine("r")
    async with machines(a, b, r):
        with pytest.raises(RefusedError, match="'x' is no admitted PNode"):
            await a.bus.ask(r.anyone, RelayOpen(new_request_id(), "x"), timeout_s=15)
        there = await meet(a, b, r)
        server = r.relays._server
        assert server is not None
        assert len(server.desk)
        r.admit(a)
        await until(lambda: len(server.desk) == 0, 15)
        a.bus.send(there, hop(1))
        await asyncio.sleep(1.0)
        assert not b.got


async def test_a_ticket_to_somewhere_else_than_its_sender_leads_nowhere():
    a, r = Machine("a", hidden=True), Machine("r")
    came: list[int] = []
    server = await asyncio.start_server(lambda reader, writer: (came.append(1), writer.close()), "127.0.0.2", 0)
    port = server.sockets[0].getsockname()[1]
    async with machines(a, r):
        await a.bus.meet(r.me, timeout_s=15)
        for host, calls in (("127.0.0.2", 0), ("localhost", 0)):
            r.bus.send(PeerRef("a"), RelayTicket("", "b", f"tcp://{host}:{port}", "0" * 32))
            await asyncio.sleep(0.3)
            assert len(came) == calls
    server.close()
    await server.wait_closed()
