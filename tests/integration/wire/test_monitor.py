"""What a ROUTER's monitor tells when nobody has read it for long."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from wire.sockets import Monitor, new_context, new_router

COUNT = 3000
"""Above the 2,000 events that libzmq keeps for two ends with its default limits."""


@pytest.fixture
def watched() -> Iterator[tuple[Monitor, int]]:
    context = new_context()
    router = new_router(context)
    router.bind("tcp://127.0.0.1:0")
    monitor = Monitor(router)
    yield monitor, int(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
    monitor.close()
    router.close(linger=0)
    context.term()


def test_events_that_nobody_reads_stop_no_connection_and_are_kept(watched):
    monitor, port = watched
    assert monitor.closed() == []
    for _ in range(COUNT):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as another:
        assert another.recv(1) == b"\xff"  # the first byte of ZMTP: libzmq's I/O thread is at work
    found: list[int] = []
    deadline = time.monotonic() + 30
    while len(found) < COUNT + 1 and time.monotonic() < deadline:
        found += monitor.closed()
        time.sleep(0.01)
    assert len(found) == COUNT + 1
