"""A PNode whose compute thread, messages and sockets are timed from outside; the product has no switch for it.

    python -m benchmarks.profiled_pnode FILE.json [options of dcnr-pnode]

At its end the PNode writes what happened when: each job of the compute thread, why it was submitted, each hop's way in
and out, copies, and the CPU seconds of its threads. `benchmarks.pipeline_profile` makes sense of it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pnode import executor, main, session, work
from pnode.compute_thread import ComputeThread
from wire import peer
from wire.zmq_bus import ZmqBus

clock = time.monotonic


class Recorder:
    """What happened, by kind; every entry begins with its time."""

    def __init__(self) -> None:
        self.jobs: list[tuple[float, float, float, str]] = []  # start, end, CPU seconds of the thread, name
        self.submits: list[tuple[float, str, str]] = []  # when, name, event that caused it
        self.hops: list[tuple[float, int, int, int, bool]] = []  # arrival, channel, step, microbatch, backward
        self.sends: list[tuple[float, float, int, int, int, bool]] = []  # begin, end of send, the same
        self.copies: list[tuple[float, float, str]] = []  # begin, end
        self.wire: list[tuple[float, float, str]] = []  # begin, end of work in the event loop's thread
        self.threads: list[tuple[float, dict[str, float]]] = []  # CPU seconds by thread
        self.event = ""

    def time_threads(self) -> None:
        """CPU seconds of each thread so far (Linux)."""
        found: dict[str, float] = {}
        tick = os.sysconf("SC_CLK_TCK")
        for task in Path("/proc/self/task").iterdir():
            name, _, fields = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            numbers = fields.split()
            seconds = (int(numbers[11]) + int(numbers[12])) / tick
            label = "loop" if task.name == str(os.getpid()) else name
            found[label] = found.get(label, 0.0) + seconds
        self.threads.append((clock(), found))

    def write(self, path: Path) -> None:
        """All of it as JSON."""
        kinds = ("jobs", "submits", "hops", "sends", "copies", "wire", "threads")
        path.write_text(json.dumps({kind: getattr(self, kind) for kind in kinds}))


def timed(entries: list[tuple[float, float, str]], label: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with begin and end written down."""

    @functools.wraps(inner)
    def outer(*arguments: Any, **named: Any) -> Any:
        begin = clock()
        try:
            return inner(*arguments, **named)
        finally:
            entries.append((begin, clock(), label))

    return outer


def install(recorder: Recorder) -> None:
    """Put the stop watches in."""
    do, submit = ComputeThread._do, ComputeThread.submit
    post, send_hop = session.Session.post, session.Session._send_hop

    def timed_do(self: ComputeThread, item: Any) -> None:
        begin, cpu = clock(), time.thread_time()
        do(self, item)
        recorder.jobs.append((begin, clock(), time.thread_time() - cpu, item.name))
        if ": U of step" in item.name:
            recorder.time_threads()

    def timed_submit(self: ComputeThread, lane: str, name: str, *rest: Any) -> None:
        recorder.submits.append((clock(), name, recorder.event))
        submit(self, lane, name, *rest)

    def timed_post(self: session.Session, event: Any) -> None:
        recorder.event = kind = type(event).__name__
        if kind == "HopArrived":
            recorder.hops.append((clock(), event.channel, event.step, event.microbatch, event.backward))
        post(self, event)

    def timed_send(self: session.Session, command: Any) -> None:
        begin = clock()
        send_hop(self, command)
        entry = (begin, clock(), command.channel, command.step, command.microbatch, command.backward)
        recorder.sends.append(entry)

    ComputeThread._do, ComputeThread.submit = timed_do, timed_submit  # type: ignore[method-assign]
    session.Session.post, session.Session._send_hop = timed_post, timed_send  # type: ignore[method-assign]
    work.pack, work.unpack = timed(recorder.copies, "pack", work.pack), timed(recorder.copies, "unpack", work.unpack)
    executor.receive = timed(recorder.copies, "align", executor.receive)
    peer.digest_of = timed(recorder.wire, "digest, out", peer.digest_of)
    ZmqBus._arrived = timed(recorder.wire, "receive", ZmqBus._arrived)  # type: ignore[method-assign]
    ZmqBus._carry = timed(recorder.wire, "socket, out", ZmqBus._carry)  # type: ignore[method-assign]


def run() -> None:
    recorder = Recorder()
    install(recorder)
    code = main.run(sys.argv[2:])
    recorder.write(Path(sys.argv[1]))
    os._exit(code)


if __name__ == "__main__":
    run()
