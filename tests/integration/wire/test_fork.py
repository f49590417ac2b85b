"""B10: a bus in one process and children of it by fork and by spawn; each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PARENT = """
import asyncio, multiprocessing, os, sys, threading, time
from wire.ids import new_request_id
from wire.messages import Hop, Ok, AskCluster, PeerRef, TensorMeta
from wire.errors import DCNRError
from wire.zmq_bus import ZmqBus

SIZE = 1 << 20  # sent without a copy
COUNT = 120


def hop(step):
    return Hop("run", 1, 0, step, 0, 0, 0, step, "a", 0, [TensorMeta("uint8", [SIZE])])


def child(method, bus, address, answers):
    try:
        bus.send(PeerRef("b", 0, [address]), hop(0), [bytes(SIZE)])
        answers.put(("used", ""))
    except DCNRError as error:
        answers.put((type(error).__name__, str(error)))
    asyncio.run(bus.close())  # does nothing, and waits for nothing
    asyncio.run(with_own_bus(address, answers))


def fresh_child(address, answers):
    asyncio.run(with_own_bus(address, answers))


async def with_own_bus(address, answers):
    bus = ZmqBus("child-%d" % os.getpid())
    bus.on_message(lambda *a: None)
    await bus.start()
    answer, frames = await bus.ask(PeerRef("", 0, [address]), AskCluster(str(new_request_id())), timeout_s=20)
    answers.put((type(answer).__name__, bytes(frames[0]).decode()))
    await bus.close()


async def main(method):
    got, ids = [], set()
    b = ZmqBus("b", bind="tcp://127.0.0.1:0")

    def arrived(sender, message, frames):
        if isinstance(message, Hop):
            frame = memoryview(frames[0]).cast("B")
            got.append((message.step, frame[0] == frame[-1] == message.step % 251))
        elif isinstance(message, AskCluster):
            ids.add(str(message.request_id))
            b.send(sender, Ok(message.request_id), [sender.id.encode()])

    b.on_message(arrived)
    await b.start()
    a = ZmqBus("a", bind="tcp://127.0.0.1:0")
    a.on_message(lambda *x: None)
    await a.start()
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    children = []
    for step in range(COUNT):
        a.send(b.me, hop(step), [bytes([step % 251]) * SIZE])
        if step in (20, 60):
            if method == "fork":
                one = context.Process(target=child, args=(method, a, b.me.addresses[0], answers))
            else:
                one = context.Process(target=fresh_child, args=(b.me.addresses[0], answers))
            one.start()
            children.append(one)
        await asyncio.sleep(0.005)
    async with asyncio.timeout(60):
        while len(got) < COUNT or any(one.is_alive() for one in children):
            await asyncio.sleep(0.05)
    assert got == [(step, True) for step in range(COUNT)], got[:5]
    said = [answers.get(timeout=5) for _ in range(4 if method == "fork" else 2)]
    await asyncio.gather(a.close(), b.close())
    for one in children:
        print("exit", one.exitcode)
    for kind, text in sorted(said):
        print(kind, text)
    print("ids", len(ids))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_neither_break_the_parents_bus_nor_go_on_with_it(method: str, tmp_path: Path) -> None:
    """Field case B10: the parent's no-copy traffic goes on; a forked child is refused in one clear line, on one of its
    own it works, and ends with code 0; a spawned child works."""
    program = tmp_path / "parent.py"
    program.write_text(textwrap.dedent(PARENT))
    done = subprocess.run(
        [sys.executable, str(program), method], capture_output=True, text=True, timeout=100, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert "Assertion failed" not in done.stderr  # libzmq's own words when it aborts
    lines = done.stdout.splitlines()
    assert lines[:2] == ["exit 0", "exit 0"]
    refused = [line for line in lines if line.startswith("MisuseError")]
    worked = [line for line in lines if line.startswith("Ok child-")]
    assert len(worked) == 2
    assert lines[-1] == "ids 2", "a forked child's request ids are its own"
    assert len(refused) == (2 if method == "fork" else 0)
    assert all("a forked child" in line for line in refused)
