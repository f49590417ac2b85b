"""A process whose children die by kill -9 at a chosen place of an operation on a store.

    python -m tests.integration.storage.crashing

reads one job a line, forks a child that carries it out, and answers with a line: {"killed": true} or {"done": true} or
{"error": "…"}. It forks before it has any thread, and never runs an event loop itself.

Places: "before" and "after" the n-th call of the store; "system", before the n-th change of a file below `root`
(creating, syncing, renaming, linking, removing); "time", after n milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from storage import open_store
from storage.s3 import open_s3
from tests.unit.storage.faulty import FaultyStore
from tests.unit.storage.operations import OPERATIONS

CHANGES = {"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


@dataclass(frozen=True)
class Job:
    """`place`: before, after, system, time, or "" to let it live."""

    operation: str
    url: str
    place: str = ""
    number: int = 0


def die() -> None:
    """As by kill -9: no handler, no cleaning up, no flushing."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillingStore(FaultyStore):
    """Dies where its parent class would fail."""

    def _fault(self, name: str) -> BaseException:
        die()
        raise AssertionError("still alive")


def watch_system(root: str, number: int) -> None:
    """Die before the n-th change of a file below `root`."""
    count = 0

    def change(path: object) -> None:
        nonlocal count
        if os.fspath(path).startswith(root):  # type: ignore[call-overload]
            count += 1
            if count == number:
                die()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and isinstance(arguments[0], str | os.PathLike):
            if event == "open" and not int(arguments[2]) & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):  # type: ignore[call-overload]
                return
            change(arguments[0])

    real = os.fsync

    def fsync(descriptor: int) -> None:
        change(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


async def carry_out(job: Job) -> None:
    store = open_s3(urlsplit(job.url)) if job.url.startswith("s3://") else open_store(job.url)
    faulty = KillingStore(store, fail_at=job.number if job.place in ("before", "after") else 0, mode=job.place)
    if job.place == "system":
        watch_system(job.url, job.number)
    if job.place == "time":
        threading.Timer(job.number / 1000, die).start()
    await OPERATIONS[job.operation].run(faulty)
    await store.close()


def child(job: Job, answer: int) -> None:
    """Never returns."""
    try:
        asyncio.run(carry_out(job))
        text = json.dumps({"done": True})
    except BaseException as error:
        text = json.dumps({"error": f"{type(error).__name__}: {error}"})
    os.write(answer, text.encode())
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receive)
            child(job, send)
        os.close(send)
        with os.fdopen(receive) as answer:
            text = answer.read()
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"killed": True}) if os.WIFSIGNALED(status) else text, flush=True)


class Crashing:
    """The process, for tests."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Crashing:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process
        assert self._process.stdin
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), 20)

    async def run(self, job: Job) -> bool:
        """Whether it was killed; if not, it succeeded."""
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        answer = json.loads(line)
        assert "error" not in answer, answer
        return bool(answer.get("killed"))


if __name__ == "__main__":
    main()
