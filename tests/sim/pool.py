"""Worker processes: each has ranges of seeds to do; one that dies or hangs costs its seed, and is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.sim.worker import failure

HANG_S = 120.0
"""Wall-clock seconds that one seed may take."""

SEEDS_PER_PROCESS = 1000
"""Then a worker is replaced, so that whatever leaks stays small."""

Task = tuple[int, int]
"""First seed, count."""

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """One process. `task`: what it does now."""

    def __init__(self, command: Sequence[str], hang_s: float = HANG_S) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            list(command), cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.hang_s = hang_s
        self.task: Task | None = None
        self.seed = -1
        self.done = 0
        self.since = time.monotonic()
        self._buffer = b""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        os.set_blocking(self.process.stderr.fileno(), False)
        self._said = b""

    def fileno(self) -> int:
        """Its answers."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, task: Task, keep: Sequence[int] | None = None) -> None:
        """Let it do a range of seeds."""
        assert self.process.stdin is not None
        self.task, self.seed, self.since = task, task[0], time.monotonic()
        request: dict[str, Any] = {"first": task[0], "count": task[1]}
        if keep is not None:
            request["keep"] = list(keep)
        with contextlib.suppress(BrokenPipeError):  # it has died: its end of file will tell
            self.process.stdin.write((json.dumps(request) + "\n").encode())
            self.process.stdin.flush()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """What it says, and whether it still lives."""
        self._listen()
        try:
            data = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return [], True
        if not data:
            return [], False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        for message in found:
            self.since = time.monotonic()
            if "begin" in message:
                self.seed = message["begin"]
            elif "result" in message:
                self.done += 1
        return found, True

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                self._said = (self._said + data)[-2000:]

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._listen()
        return " | ".join(self._said.decode(errors="replace").strip().splitlines()[-4:])

    def late(self) -> bool:
        """It has had a seed for too long."""
        return self.task is not None and time.monotonic() - self.since > self.hang_s

    def end(self) -> None:
        """End it, and wait until it is gone."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.kill()
        self.process.wait()


class Pool:
    """Runs tasks on `jobs` workers; `results` yields the summary of each seed as it comes, in no order."""

    def __init__(self, jobs: int, *, planted: str = "", hang_s: float = HANG_S, command: Sequence[str] = ()) -> None:
        self.jobs = jobs
        self.hang_s = hang_s
        plant = [f"--plant={planted}"] if planted else []
        self.command = [*command] or [sys.executable, "-m", "tests.sim", "--worker", *plant]
        self._workers: list[Worker] = []

    def results(self, tasks: Iterable[Task], *, tick_s: float = 0.5) -> Iterator[dict[str, Any] | None]:
        """Summaries; None at least every `tick_s`, so that the caller can show how it goes."""
        pending = iter(tasks)
        again: list[Task] = []

        def next_task() -> Task | None:
            return again.pop() if again else next(pending, None)

        try:
            while True:
                self._fill(next_task)
                if not any(worker.task is not None for worker in self._workers):
                    return
                yield None
                for worker in self._ready(tick_s):
                    messages, alive = worker.read()
                    for message in messages:
                        if "result" in message:
                            yield message["result"]
                        elif "done" in message:
                            worker.task = None
                    if worker.task is None and worker.done >= SEEDS_PER_PROCESS:
                        self._drop(worker)
                    elif not alive or worker.late():
                        yield self._lost(worker, again, hangs=alive)
        finally:
            for worker in list(self._workers):
                self._drop(worker)

    def _fill(self, next_task: Any) -> None:
        for worker in self._workers:
            if worker.task is None and (task := next_task()) is not None:
                worker.give(task)
        while len(self._workers) < self.jobs and (task := next_task()) is not None:
            worker = Worker(self.command, self.hang_s)
            self._workers.append(worker)
            worker.give(task)

    def _ready(self, tick_s: float) -> list[Worker]:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(tick_s)]
        return [*ready, *(worker for worker in self._workers if worker.late() and worker not in ready)]

    def _lost(self, worker: Worker, again: list[Task], *, hangs: bool) -> dict[str, Any]:
        """A worker is gone: its seed failed, and somebody else has to do the rest of its range."""
        first, count = worker.task if worker.task is not None else (worker.seed, 1)
        words = worker.last_words()
        self._drop(worker)
        rest = first + count - worker.seed - 1
        if rest > 0:
            again.append((worker.seed + 1, rest))
        what = f"hangs: nothing for {self.hang_s:.0f} s" if hangs else f"died with {worker.process.returncode}"
        return failure(worker.seed, "the world runs", f"the worker {what}; {words}")

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.end()


def ranges(seeds: Sequence[int], size: int) -> Iterator[Task]:
    """Seeds in ascending order as runs of neighbours, at most `size` long."""
    first, count = -1, 0
    for seed in seeds:
        if count and seed == first + count and count < size:
            count += 1
        else:
            if count:
                yield first, count
            first, count = seed, 1
    if count:
        yield first, count
