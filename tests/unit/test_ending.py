"""A daemon's end is bounded, and our own tools wait for longer than that before they kill."""

from __future__ import annotations

import inspect
import subprocess
import sys

from cli import cluster, processes
from cli.commands.cluster import down
from orchestrator import driver, service
from pnode import daemon
from wire import zmq_bus
from wire.ending import CLOSING_S, END_S, GRACE_S
from wire.limits import LINGER_MS

LEAVE_S = 0.5
"""For what has no limit of its own: the store's connections and the interpreter."""
BUS_S = zmq_bus.CLOSE_S + LINGER_MS / 1000


def test_nothing_that_ends_as_it_should_is_killed() -> None:
    assert GRACE_S >= END_S + 3.0
    for stop in (processes.stop, cluster.stop):
        assert inspect.signature(stop).parameters["grace_s"].default == GRACE_S
    assert inspect.signature(down).parameters["grace"].default == GRACE_S


def test_the_parts_of_an_end_fit_into_it() -> None:
    assert BUS_S + LEAVE_S <= CLOSING_S
    computing_s = END_S - CLOSING_S - daemon.BACKGROUND_S
    assert computing_s >= 3.0, "an action of ordinary length is finished"
    storing_s = service.DURABLE_STOP_S + service.TASKS_STOP_S + driver.CLOSE_S
    assert storing_s + BUS_S + LEAVE_S <= END_S


def test_a_process_that_hangs_in_its_end_is_over_by_then() -> None:
    """Here in the executor's threads, for which the event loop waits when it is closed."""
    code = (
        "import asyncio, time\n"
        "from wire.ending import end_in_time\n"
        "async def main():\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)\n"
        "    end_in_time('thing', 0.2)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "thing: could not end in good order within 0.2 s, ended all the same\n"
