"""The filter in the kernel, and the counts of a connection: as the system has them."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from tests.integration.wire.keyed import Keyed, running, until
from tests.integration.wire.peers import hop
from wire.door import Door, Doorway
from wire.doorkeeper import filter_addresses
from wire.messages import PeerRef

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="socket filters are Linux's")


def reaches(address: str, port: int, source: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as dialler:
        dialler.settimeout(0.3)
        dialler.bind((source, 0))
        try:
            dialler.connect((address, port))
        except TimeoutError:
            return False
        return True


def test_only_those_shut_out_are_shut_out_and_only_so_long():
    with socket.create_server(("127.0.0.1", 0)) as four:
        port = four.getsockname()[1]
        assert reaches("127.0.0.1", port, "127.0.0.9")
        assert filter_addresses(four, ["10.1.2.3", "127.0.0.9", "::1", "127.0.0.11"])
        for source, through in [("127.0.0.9", False), ("127.0.0.11", False), ("127.0.0.10", True), ("127.0.0.1", True)]:
            assert reaches("127.0.0.1", port, source) is through, source
        assert filter_addresses(four, [])
        assert reaches("127.0.0.1", port, "127.0.0.9")


def test_ipv6_and_ipv4_addresses_as_an_ipv6_socket_names_them():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both:
        port = both.getsockname()[1]
        assert filter_addresses(both, ["fe80::1", "::ffff:127.0.0.9"])
        assert reaches("::1", port, "::1")
        assert not reaches("127.0.0.1", port, "127.0.0.9")
        assert reaches("127.0.0.1", port, "127.0.0.10")
        assert filter_addresses(both, ["2001:db8::1", "::1"])
        assert not reaches("::1", port, "::1")
        assert reaches("127.0.0.1", port, "127.0.0.9")


async def test_an_address_that_is_shut_out_leaves_connections_alone_that_stand():
    a, b = Keyed("a"), Keyed("b")
    b.bus._guard.keeper.door = Door(Doorway(burst=20.0, rate=1.0))
    async with running(a, b):
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.got)
        port = int(b.bus.me.addresses[0].rpartition(":")[2])
        strangers = [socket.socket() for _ in range(25)]  # from the same address as a
        for stranger in strangers:
            stranger.settimeout(1)
            try:
                await asyncio.to_thread(stranger.connect, ("127.0.0.1", port))
            except OSError:
                break
        await until(lambda: b.bus._guard.keeper._banned == ("127.0.0.1",))
        assert not await asyncio.to_thread(reaches, "127.0.0.1", port, "127.0.0.1")
        assert await asyncio.to_thread(reaches, "127.0.0.1", port, "127.0.0.77")
        a.bus.send(PeerRef("b", b.bus.me.boot), hop(2))
        await until(lambda: len(b.got) == 2)
        b.bus._guard.keeper.door._banned.clear()
        b.bus._guard.keeper._look_again()
        assert await asyncio.to_thread(reaches, "127.0.0.1", port, "127.0.0.1")
        for stranger in strangers:
            stranger.close()
