"""Strangers at a port with keys: nothing they send is handed over, memory stays, and a peer keeps its pace."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.wire.hostile import ATTACKS
from tests.integration.wire.keyed import Keyed
from tests.integration.wire.peers import ROOT
from wire.ids import new_request_id
from wire.keys import KeyPair
from wire.messages import Admitted, Hop, ListPNodes, PeerRef, TensorMeta
from wire.roles import PNODE

PER_S = 40
"""Echoes of 64 KiB per second of the well-behaved peer: a pace that it keeps when it is left alone."""
ATTACK_S = 4.0
MEMORY = 100 << 20


class Scene:
    """A server process, and a peer of it."""

    def __init__(self, peer: Keyed, server: PeerRef, server_key: str) -> None:
        self.peer = peer
        self.server = server
        self.port = server.addresses[0].rpartition(":")[2]
        self._environment = {**os.environ, "SERVER_KEY": server_key}

    async def asked(self) -> tuple[int, int, int]:
        """RSS, hops handed over, connections of the server."""
        _, frames = await self.peer.bus.ask(self.server, ListPNodes(new_request_id()), timeout_s=30)
        rss, count, connections = bytes(frames[0]).split()
        return int(rss), int(count), int(connections)

    async def pace(self, seconds: float) -> float:
        """Echoes per second that come back, of `PER_S` sent."""
        before, size = len(self.peer.got), 65536
        started = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - started) < seconds:
            while sent < passed * PER_S:
                message = Hop("run", 1, 0, sent, 0, 0, 0, sent, "a", 1, [TensorMeta("uint8", [size])])
                self.peer.bus.send(self.server, message, [bytes(size)])
                sent += 1
            await asyncio.sleep(0.005)
        return (len(self.peer.got) - before) / seconds

    @asynccontextmanager
    async def attacked(self, kind: str, count: int = 1) -> AsyncIterator[list[str]]:
        """While strangers attack; afterwards what they did."""
        command = [sys.executable, "-m", "tests.integration.wire.hostile", "attack", kind, self.port, str(ATTACK_S)]
        found: list[str] = []
        attackers = [
            await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=self._environment, cwd=ROOT)
            for _ in range(count)
        ]
        try:
            await asyncio.sleep(1.0)
            yield found
            async with asyncio.timeout(60):
                found += [(await attacker.communicate())[0].decode().strip() for attacker in attackers]
        finally:
            for attacker in attackers:
                if attacker.returncode is None:
                    attacker.kill()
                    await attacker.communicate()


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    pair, peer = KeyPair.new(), Keyed("peer0", bind=None)
    command = [sys.executable, "-m", "tests.integration.wire.hostile", "server", pair.secret.reveal(), peer.pair.public]
    with subprocess.Popen(  # noqa: ASYNC220, it is only started
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            peer.admission.pin(Admitted(pair.public, "server", PNODE))
            await peer.bus.start()
            yield Scene(peer, PeerRef("server", 0, [address], pair.public), pair.public)
        finally:
            await peer.bus.close()
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTACKS)
async def test_strangers_get_nothing_in_cost_no_memory_and_leave_others_their_pace(kind):
    async with scene() as here:
        await here.pace(1.0)
        before, handed, _ = await here.asked()
        alone = await here.pace(2.0)
        most = before
        async with here.attacked(kind) as done:
            under = await here.pace(ATTACK_S - 1)
            most = max(most, (await here.asked())[0])
        after, total, connections = await here.asked()
        tries, sent = map(int, done[0].split())
        mine = len(here.peer.got)
        print(
            f"\n{kind}: {tries} tries, {sent} bytes; pace {alone:.1f} -> {under:.1f}/s; "
            f"memory {before >> 20} -> {max(most, after) >> 20} MiB; {connections} connections left"
        )
        assert under >= 0.8 * min(alone, PER_S)
        assert max(most, after) - before < MEMORY
        assert total >= mine >= handed
        assert not here.peer.lost
        assert not here.peer.bus.counters().get("damaged")
