"""Starts daemons by fork from one process that has imported all they need.

A start of a PNode costs two seconds of a core, nearly all of it imports; a campaign of hundreds of kills would consist
of those. What is forked is a process like any other: a session and a log of its own, killed and paused by pid. A fork
is safe while the nursery has one thread only, which is checked before each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cli import processes
from cli.processes import Process, birth_of

DAEMONS = ("pnode.main", "orchestrator.main")
IMPORTED = (
    *DAEMONS, "pnode.daemon", "orchestrator.service", "storage.open", "storage.local", "storage.s3", "wire.zmq_bus",
    "torch.optim", "torch._dynamo", "aioboto3", "pydantic", "yaml", "sqlite3",
)  # fmt: skip


class Nursery:
    """Use: `open()`, in the end `close()`; `start` is `cli.processes.start`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start it; it has imported everything when the first daemon is started."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """End it; what it has started runs on."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()

    def start(self, name: str, module: str, arguments: Sequence[str], *, log: Path, threads: int) -> Process:
        """See `cli.processes.start`; what is no daemon, or needs more than one thread, is started in the usual way."""
        if module not in DAEMONS or threads != 1:
            return processes.start(name, module, arguments, log=log, threads=threads)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        log.parent.mkdir(parents=True, exist_ok=True)
        process.stdin.write(json.dumps([module, list(arguments), str(log), dict(os.environ)]) + "\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        return Process(name, pid, birth_of(pid) or "ended", str(log))


def main() -> None:
    """Import, then fork for each line of the input until it ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to collect what has ended
    for line in sys.stdin:
        module, arguments, log, environment = json.loads(line)
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads: a fork would not be safe"
        pid = os.fork()
        if not pid:
            _be(module, arguments, log, environment)
        print(pid, flush=True)


def _be(module: str, arguments: Sequence[str], log: str, environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.environ.update(environment)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (sink, 1), (sink, 2)):
            os.dup2(source, target)
        sys.argv = [module, *arguments]
        importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
