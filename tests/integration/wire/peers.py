"""Processes for the tests: `python -m tests.integration.wire.peers ROLE [ARGUMENT …]`, and how to start them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from wire.messages import BACKWARD, AskCluster, Hop, InferOutput, ListPNodes, Message, Ok, PeerRef, TensorMeta
from wire.zmq_bus import ZmqBus

ROOT = Path(__file__).parent.parent.parent.parent


def hop(step: int, sizes: Sequence[int] = ()) -> Hop:
    """A hop with one tensor per size."""
    return Hop("run", 1, 0, step, 0, 0, 0, step, "a", 0, [TensorMeta("uint8", [size]) for size in sizes])


def digest(frames: Sequence[object]) -> str:
    """One digest over all frames."""
    hasher = xxhash.xxh3_128()
    for frame in frames:
        hasher.update(frame)  # type: ignore[arg-type]
    return hasher.hexdigest()


async def echo(bind: str) -> None:
    """Echo hops on the backward lane; `AskCluster`: all steps that came, in order, and their digests."""
    bus = ZmqBus("echo", bind=bind)
    log: list[str] = []

    def handle(sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, Hop):
            log.append(f"{message.step}:{digest(frames)}")
            if message.count == 1:
                bus.send(sender, message, frames, lane=BACKWARD)
        elif isinstance(message, AskCluster):
            bus.send(sender, Ok(message.request_id), ["\n".join(log).encode()])
        elif isinstance(message, ListPNodes):
            counters = ";".join(f"{key}={value}" for key, value in bus.counters().items() if key != "peers")
            bus.send(sender, Ok(message.request_id), [counters.encode()])
        elif isinstance(message, InferOutput):
            raise RuntimeError("a handler fails")

    bus.on_message(handle)
    await bus.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    print(bus.me.addresses[0], bus.me.boot, flush=True)
    await stop.wait()
    await bus.close()


async def ask_once(address: str, seconds: str) -> None:
    """What a command-line client does: ask and go."""
    bus = ZmqBus(f"cli-{os.getpid()}")
    await bus.start()
    print("ready", flush=True)
    try:
        await bus.ask(PeerRef("", 0, [address]), AskCluster("r"), timeout_s=float(seconds))
    finally:
        await bus.close()


class Process:
    """A started peer."""

    def __init__(self, popen: subprocess.Popen[str], address: str, boot: int) -> None:
        self.popen = popen
        self.ref = PeerRef("echo", boot, [address])
        self.anyone = PeerRef("echo", 0, [address])

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """As with kill -9, and reaped."""
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def start_echo(bind: str = "tcp://127.0.0.1:0") -> Process:
    """An echo process that is ready."""
    command = [sys.executable, "-m", "tests.integration.wire.peers", "echo", bind]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert popen.stdout is not None
    address, boot = popen.stdout.readline().split()
    return Process(popen, address, int(boot))


@contextmanager
def echo_process(bind: str = "tcp://127.0.0.1:0") -> Iterator[Process]:
    """An echo process that ends with the test."""
    process = start_echo(bind)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.signal(signal.SIGCONT)
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        asyncio.run(echo(sys.argv[2]))
    else:
        asyncio.run(ask_once(sys.argv[2], sys.argv[3]))
