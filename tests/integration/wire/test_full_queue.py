"""A ROUTER whose process does not read for a while, and a peer that ends meanwhile: libzmq must not abort (#4364)."""

from __future__ import annotations

import subprocess
import sys

import zmq

from tests.integration.wire.peers import ROOT
from wire.limits import RECEIVE_HWM
from wire.messages import FORWARD
from wire.sockets import new_context, new_dealer

AWAY_S = 5.0
"""Longer than any heartbeat that libzmq could be set to send."""
SLEEPER = f"""
import time
import zmq
from wire.sockets import Inlet, new_context, new_router
router = new_router(new_context())
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
input()
time.sleep({AWAY_S})
inlet, count = Inlet(router), 0
while router.poll(500):
    while inlet.take() is not None:
        count += 1
print(count, flush=True)
"""


def test_a_peer_that_ends_while_its_queue_is_full_ends_nobody_else() -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert sleeper.stdout is not None
    context = new_context()
    try:
        address = f"tcp://127.0.0.1:{sleeper.stdout.readline().strip()}"
        dealer = new_dealer(context, b"peer", FORWARD, receives=False, loopback=True)
        dealer.connect(address)
        sent = 0
        while dealer.poll(1000, zmq.POLLOUT):  # until the ROUTER's queue, the buffers between and our own are full
            dealer.send(bytes(10_000))
            sent += 1
        dealer.close(linger=0)
        out, _ = sleeper.communicate("go on\n", timeout=30)
    finally:
        sleeper.kill()
        context.term()
    assert sleeper.returncode == 0
    assert RECEIVE_HWM / 2 <= int(out) < sent, "its queue was full"
