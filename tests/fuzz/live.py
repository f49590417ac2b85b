"""Whole messages to a live PNode over a real socket: links that stand, messages that are wrong.

The PNode is a daemon with a session that is deployed, in this process, so that whatever its handlers or its loop raise
is seen here, and its memory is this process's. The sender is the orchestrator that it obeys, so nothing is refused for
being from a stranger. Between the cases the PNode has to go on reporting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import msgspec
import structlog
import zmq

from pnode.daemon import Daemon, Options
from tests.fuzz import samples
from tests.fuzz.engine import MAX_BYTES, Figures, Memory
from tests.fuzz.mutate import MARKED, change_bytes, change_tree, msgpack_of, pick
from tests.integration.pnode.conductor import Conductor
from wire.codec import seal_header
from wire.zmq_bus import ZmqBus

SESSION = "mlp-1"
SPARED = ("shut_down",)
"""Messages that are not sent whole: they mean the end, and do."""

IDENTITIES = (b"a/5/0/1", b"a/5/2/1", b"x", b"\x01/../1", b"a/5/9/1", b"run/3/0/1")
BATCH = 64
STALL_S = 20.0


class Fields(list[Any]):
    """A message as it travels, with whatever in it; passes for one of ours where it is sent."""

    lane = 0


class Listener:
    """A log that keeps what nobody foresaw."""

    def __init__(self) -> None:
        self.broke: dict[str, int] = {}

    def note(self, kind: str) -> None:
        """It broke in this way."""
        self.broke[kind] = self.broke.get(kind, 0) + 1

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's handler of exceptions."""
        error = context.get("exception")
        self.note(f"{type(error).__name__} in the loop: {str(error)[:120]!r} ({context.get('message')})")

    def of_log(self, logger: object, method: str, event: dict[str, Any]) -> dict[str, Any]:
        """A processor of the daemon's log: lines with a traceback are about what nobody foresaw."""
        if event.get("exc_info"):
            self.note(f"{event.get('event')}: {str(event.get('error') or event.get('text'))[:120]!r}")
        raise structlog.DropEvent


class Fuzzer:
    """A PNode with a deployed session, and the one who sends."""

    def __init__(self, conductor: Conductor, listener: Listener, random: Random) -> None:
        self.conductor = conductor
        self.listener = listener
        self._random = random
        self._fields = [fields for fields in samples.message_fields() if fields[0] not in SPARED]
        self._packets = [msgpack.packb(fields) for fields in samples.packet_fields()]
        self._context: zmq.Context[Any] = zmq.Context()
        self._raw: zmq.Socket[Any] | None = None
        self._count = 0

    def case(self) -> None:
        """Send one."""
        random = self._random
        peer = self.conductor.peers["p1"]
        self._count += 1
        if random.random() < 0.05:
            self._packet(peer.addresses[0])
            return
        fields: Any = Fields(msgspec.msgpack.decode(msgspec.msgpack.encode(pick(random, self._fields))))
        fields = self._meant(fields)
        frames = [bytes(24)] * pick(random, (0, 1, 1, 2))
        if fields[0] == "prepare" or random.random() < 0.1:
            body = msgspec.msgpack.encode(self.conductor.deployments[SESSION])
            tree = change_tree(random, msgspec.msgpack.decode(body))
            frames = [change_bytes(random, body) if random.random() < 0.2 else msgpack_of(tree)]
        for _ in range(pick(random, (0, 1, 1, 2))):
            fields = Fields(changed) if isinstance(changed := change_tree(random, fields), list) else fields
        if fields and fields[0] in SPARED:
            return
        fields.lane = int(random.random() * 3)
        self.conductor.bus.send(peer, fields, frames)

    def _meant(self, fields: Fields) -> Fields:
        """As it would be for the session that runs, so that a change meets the code behind the first checks."""
        for at, value in enumerate(fields):
            if value == "run" and at:
                fields[at] = pick(self._random, (SESSION, SESSION, "p1", f"q{self._count}", MARKED))
            elif value == 3 and type(value) is int:
                fields[at] = pick(self._random, (0, 1, 1, 2, 3))
        if isinstance(fields[-1], list) and self._random.random() < 0.5:
            fields[-1] = [["float32", [2, 3]]] * pick(self._random, (1, 1, 2))
        return fields

    def _packet(self, address: str) -> None:
        """Bytes on a connection of its own, with and without a proper beginning."""
        if self._raw is None or self._random.random() < 0.02:
            if self._raw is not None:
                self._raw.close(linger=0)
            self._raw = self._context.socket(zmq.DEALER)
            self._raw.setsockopt(zmq.IDENTITY, pick(self._random, IDENTITIES))
            self._raw.connect(address)
        packet = change_tree(self._random, msgpack.unpackb(pick(self._random, self._packets)))
        frames = [bytes(pick(self._random, (0, 1, 24, 70_000)))] * int(self._random.random() * 3)
        parts = [seal_header(msgpack_of(packet)), *frames]
        if self._random.random() < 0.3:
            parts = [change_bytes(self._random, part) for part in parts]
        with contextlib.suppress(zmq.Again):
            self._raw.send_multipart(parts, zmq.NOBLOCK)
            while True:
                self._raw.recv_multipart(zmq.NOBLOCK)

    async def settled(self) -> float:
        """Until the PNode has taken all of it and reports again; how long that took, in seconds."""
        begun = time.perf_counter()
        peer = self.conductor.peers["p1"]
        async with asyncio.timeout(STALL_S):
            while self.conductor.bus.queued_bytes(peer):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return time.perf_counter() - begun

    async def reports(self) -> None:
        """Until a fresh report has come."""
        self.conductor.beats.pop("p1", None)
        async with asyncio.timeout(STALL_S):
            while "p1" not in self.conductor.beats:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def close(self) -> None:
        """Close the sockets of its own."""
        if self._raw is not None:
            self._raw.close(linger=0)
        self._context.term()


@contextlib.asynccontextmanager
async def running(folder: Path, seed: str) -> AsyncIterator[Fuzzer]:
    """A PNode with a session that holds, and its fuzzer."""
    from tests.integration.pnode.test_training import prepare_network

    listener = Listener()
    asyncio.get_running_loop().set_exception_handler(listener.of_loop)
    logging.disable(logging.CRITICAL)
    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[listener.of_log])
    conductor = Conductor(folder)
    await conductor.start()
    options = Options(name="p1", orchestrator=conductor.address, home=folder / "p1")
    daemon = Daemon(options, ZmqBus("p1", bind="tcp://127.0.0.1:0"), log)
    task = asyncio.ensure_future(daemon.run())
    fuzzer = Fuzzer(conductor, listener, Random(seed))
    try:
        await conductor.until(lambda: "p1" in conductor.beats)
        network, data = prepare_network("mlp-digits", ["train.steps=1000"], folder)
        _, digest = await conductor.put(network, data)
        await conductor.deploy(SESSION, network, digest, {str(node.id): "p1" for node in network.graph.nodes})
        yield fuzzer
    finally:
        fuzzer.close()
        daemon.stop()
        await asyncio.wait([task], timeout=20)
        if task.done() and not task.cancelled() and task.exception() is not None:
            listener.note(f"the daemon ended: {type(task.exception()).__name__}: {task.exception()}")
        await conductor.close()
        logging.disable(logging.NOTSET)


async def _campaign(cases: int, seconds: float, seed: str) -> Figures:
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="dcnr-fuzz-") as folder:
        async with running(Path(folder), seed) as fuzzer:
            memory = Memory()
            for _ in range(BATCH):
                fuzzer.case()
            await fuzzer.settled()
            started = time.perf_counter()
            first = memory.begin()
            while figures.cases < cases and time.perf_counter() - started < seconds:
                for _ in range(BATCH):
                    fuzzer.case()
                took_s = await fuzzer.settled() / BATCH
                figures.cases += BATCH
                figures.slowest_s = max(figures.slowest_s, took_s)
                if figures.cases % (BATCH * 32) == 0:
                    await fuzzer.reports()
            await fuzzer.reports()
            figures.seconds = time.perf_counter() - started
            figures.largest_bytes = memory.grown(first)
            figures.too_large = int(figures.largest_bytes > MAX_BYTES)
            counters = fuzzer.conductor.bus.counters()
            figures.accepted = int(counters.get("messages_received", 0))
        for kind, count in fuzzer.listener.broke.items():
            figures.count(kind, count)
    return figures


def campaign(*, cases: int, seconds: float, seed: str) -> Figures:
    """See the module. `slowest_s` is the mean of the slowest batch; `accepted` counts answers that came back."""
    return asyncio.run(_campaign(cases, seconds, seed))
