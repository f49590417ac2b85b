"""Programs for `test_hostile`: a PNode-like server with keys, and strangers that attack its port.

`python -m tests.integration.wire.hostile server SECRET KEY…` and `… attack KIND PORT SECONDS`.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

import psutil
import zmq

from wire.admission import Admission
from wire.keys import KeyPair
from wire.messages import BACKWARD, Admitted, Hop, ListPNodes, Message, Ok, PeerRef
from wire.roles import CLIENT
from wire.zmq_bus import ZmqBus

GREETING = bytes([0xFF, *[0] * 8, 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)


async def serve(secret: str, *keys: str) -> None:
    """Echo hops; `ListPNodes`: RSS, packets refused, and what was handed over by whom."""
    admission = Admission([Admitted(key, f"peer{index}", CLIENT) for index, key in enumerate(keys)], 1)
    bus = ZmqBus("server", bind="tcp://127.0.0.1:0", keys=KeyPair.of_secret(secret), admission=admission)
    bus._admission = None  # roles are not what is tried here, and hops are a PNode's
    count = 0
    process = psutil.Process()

    def handle(sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        nonlocal count
        if isinstance(message, Hop):
            count += 1
            bus.send(sender, message, frames, lane=BACKWARD)
        elif isinstance(message, ListPNodes):
            text = f"{process.memory_info().rss} {count} {len(process.net_connections())}"
            bus.send(sender, Ok(message.request_id), [text.encode()])

    bus.on_message(handle)
    await bus.start()
    print(bus.me.addresses[0], flush=True)
    await asyncio.Event().wait()


# ---------------------------------------------------------------- attacks: each tries once, and gives what it sent


def random_bytes(port: int) -> int:
    """A mebibyte of noise."""
    return _pour(port, [random.Random(os.getpid()).randbytes(1 << 20)])


def huge(port: int) -> int:
    """A frame that claims 2^40 bytes, and as much of it as is taken."""
    return _pour(port, [GREETING, b"\x06" + struct.pack(">Q", 1 << 40), *[bytes(65536)] * 64])


def large(port: int) -> int:
    """A handshake command as large as any packet may be."""
    size = 4 << 20
    return _pour(port, [GREETING, b"\x06" + struct.pack(">Q", size), *[bytes(65536)] * (size // 65536 - 1)], hold_s=2)


def tiny(port: int) -> int:
    """Frames of one byte."""
    return _pour(port, [GREETING, *[b"\x00\x01x" * 10_000] * 20])


def silent(port: int) -> int:
    """A connection that says nothing."""
    return _pour(port, [], hold_s=2)


_context: zmq.Context | None = None
_dealers: list[zmq.Socket] = []


def handshakes(port: int) -> int:
    """Sound handshakes, with keys of nobody."""
    global _context
    _context = _context or zmq.Context(io_threads=1)
    if len(_dealers) > 50:
        _dealers.pop(0).close()
        time.sleep(0.001)  # libzmq closes them in the background
    dealer = _context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = os.environ["SERVER_KEY"].encode()
    dealer.connect(f"tcp://127.0.0.1:{port}")
    _dealers.append(dealer)
    return 1


ATTACKS: dict[str, Callable[[int], int]] = {
    attack.__name__: attack for attack in (random_bytes, huge, large, tiny, silent, handshakes)
}


def _pour(port: int, parts: Sequence[bytes], hold_s: float = 0.0) -> int:
    sent = 0
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as line:
            for part in parts:
                line.sendall(part)
                sent += len(part)
            if hold_s:
                line.settimeout(hold_s)
                while line.recv(65536):
                    pass
    except OSError:
        pass
    return sent


def attack(kind: str, port: str, seconds: str) -> None:
    """As fast as it goes, on 16 threads where connections are held open."""
    from concurrent.futures import ThreadPoolExecutor

    end = time.monotonic() + float(seconds)
    done = ATTACKS[kind]

    def work() -> tuple[int, int]:
        tries = sent = 0
        while time.monotonic() < end:
            sent += done(int(port))
            tries += 1
        return tries, sent

    threads = 128 if kind in ("large", "silent") else 1
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda _: work(), range(threads)))
    print(sum(tries for tries, _ in results), sum(sent for _, sent in results), flush=True)
    for dealer in _dealers:
        dealer.close()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        asyncio.run(serve(*sys.argv[2:]))
    else:
        attack(*sys.argv[2:])
