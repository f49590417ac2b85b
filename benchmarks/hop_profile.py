"""Where the time of a hop goes: the same round trip through ever more of our stack, in turns.

    python -m benchmarks.hop_profile [--size 1048576] [--rounds 7]

raw socket -> ZeroMQ's sockets, blocking -> our bus without digests and copy -> without digests -> all of it. What each
adds is the difference to the one before, the median over rounds. The product has no such switches: both processes are
patched here.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from benchmarks import hop_bus
from benchmarks.hop_peers import SocketClient, hop_count
from wire import endpoint, peer
from wire.assembly import BufferPool
from wire.loop import run

LADDER = {
    "socket": "kernel: a raw socket's round trip",
    "zmq": "ZeroMQ: its thread, framing and wake-ups",
    "bare": "Python: event loop, header, link",
    "copied": "the aligned copy",
    "dcnr": "two digests",
}


def patch(step: str) -> None:
    """Take out what this step of the ladder does without."""
    if step in ("bare", "copied"):
        peer.digest_of = lambda payload: 0
        endpoint.check_digests = lambda described, frames: True
    if step == "bare":
        BufferPool.copy = lambda self, payload: payload  # type: ignore[method-assign, assignment, return-value]


def serve_zmq() -> None:
    """Echo whole messages without an event loop."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
        while True:
            parts = router.recv_multipart(copy=False)
            router.send_multipart(parts, copy=False)


class ZmqClient:
    """Round trips over a DEALER."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    async def hop(self, size: int) -> float:
        """Half the median round trip, in seconds."""
        body, times = bytes(size), []
        for _ in range(hop_count(size)):
            start = time.perf_counter()
            self._socket.send_multipart([b"header", body], copy=False)
            self._socket.recv_multipart(copy=False)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / 2

    async def close(self) -> None:
        """Close both."""
        self._socket.close(linger=0)
        self._context.term()


async def one(step: str, size: int, address: str) -> float:
    """One measurement, in a process of its own because of the patches."""
    client: Any
    if step == "socket":
        client = SocketClient(int(address))
    elif step == "zmq":
        client = ZmqClient(int(address))
    else:
        patch(step)
        client = await hop_bus.BusClient.connect(address)
    await client.hop(size)
    seconds: float = await client.hop(size)
    await client.close()
    return seconds


def serve(step: str) -> None:
    """The other side."""
    if step == "zmq":
        serve_zmq()
    else:
        patch(step)
        run(hop_bus.serve())


def measure(step: str, size: int) -> float:
    """Start both sides and end them."""
    module = ["benchmarks.hop_peers", "socket"] if step == "socket" else ["benchmarks.hop_profile", "--serve", step]
    root = Path(__file__).parent.parent
    server = subprocess.Popen([sys.executable, "-m", *module], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        command = [sys.executable, "-m", "benchmarks.hop_profile", "--size", str(size), "--ask", step, address]
        return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=True).stdout)
    finally:
        server.kill()
        server.communicate()


def table(found: dict[str, list[float]]) -> str:
    """Markdown, in microseconds."""
    lines = ["| of it | µs | up to here, µs |", "|---|---|---|"]
    before: Sequence[float] = [0.0] * len(found["socket"])
    for step, what in LADDER.items():
        added = statistics.median(now - then for now, then in zip(found[step], before, strict=True))
        lines.append(f"| {what} | {added * 1e6:.0f} | {statistics.median(found[step]) * 1e6:.0f} |")
        before = found[step]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", choices=tuple(LADDER), help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.ask:
        print(run(one(options.ask[0], options.size, options.ask[1])))
    else:
        found: dict[str, list[float]] = {step: [] for step in LADDER}
        for _ in range(options.rounds):
            for step in LADDER:
                found[step].append(measure(step, options.size))
        print(table(found))


if __name__ == "__main__":
    main()
