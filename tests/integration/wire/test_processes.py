"""The bus and the life of processes: forks, exits, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.integration.wire.peers import ROOT, echo_process

FORK = """
    import asyncio, os, sys, traceback
    from wire.messages import AskCluster, Ok, PeerRef
    from wire.zmq_bus import ZmqBus

    async def main():
        bus = ZmqBus("parent", bind="tcp://127.0.0.1:0")
        await bus.start()
        to = PeerRef("", 0, [sys.argv[1]])
        await bus.ask(to, AskCluster("r0"), timeout_s=10)
        body = bytes(1 << 20)
        bus.send(to, Ok("x"), [body])
        child = os.fork()
        if child == 0:
            try:
                bus.send(to, Ok("y"), [body])
            except Exception as error:
                print("child:", error, flush=True)
                os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        answer, _ = await bus.ask(to, AskCluster("r1"), timeout_s=10)
        print("parent:", os.waitstatus_to_exitcode(status), answer.request_id, flush=True)
        await bus.close()

    asyncio.run(main())
"""

WORKERS = """
    import asyncio, multiprocessing, sys
    from wire.messages import AskCluster, PeerRef
    from wire.zmq_bus import ZmqBus

    def work(number):
        return number * number

    async def main():
        bus = ZmqBus("parent", bind="tcp://127.0.0.1:0")
        await bus.start()
        to = PeerRef("", 0, [sys.argv[1]])
        loop = asyncio.get_running_loop()
        with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
            for number in range(20):
                result = pool.apply_async(work, (number,))
                await bus.ask(to, AskCluster(f"r{number}"), timeout_s=10)
                assert await loop.run_in_executor(None, result.get, 30) == number * number
        await bus.close()
        print("done", flush=True)

    if __name__ == "__main__":
        asyncio.run(main())
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


def test_a_forked_child_is_refused_with_one_clear_line_and_the_parent_goes_on():
    """B10."""
    with echo_process() as server:
        result = run(FORK, server.ref.addresses[0])
    assert result.returncode == 0, result.stderr
    child, parent = result.stdout.splitlines()
    assert child.startswith("child: this bus belongs to process ")
    assert "a forked child" in child
    assert "spawn" in child
    assert parent == "parent: 7 r1"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_beside_traffic(method, tmp_path):
    """B10: a data loader's workers, by either start method, that leave the bus alone."""
    script = tmp_path / "workers.py"
    script.write_text(textwrap.dedent(WORKERS))
    with echo_process() as server:
        command = [sys.executable, str(script), server.ref.addresses[0], method]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


def start_client(address: str, timeout: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.integration.wire.peers", "ask", address, timeout]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.parametrize("reachable", [True, False])
def test_a_client_ends_at_once_whether_anybody_answers_or_not(reachable):
    """B05; test_bus repeats the start and stop of buses a hundred times within one process."""
    with echo_process() as server:
        for _ in range(5):
            client = start_client(server.ref.addresses[0] if reachable else "tcp://127.0.0.1:9", "0.2")
            assert client.stdout is not None
            client.stdout.readline()
            start = time.monotonic()
            _, errors = client.communicate(timeout=10)
            assert time.monotonic() - start < 2.2
            assert client.returncode == (0 if reachable else 1), errors
            assert reachable or "did not answer" in errors


def test_ctrl_c_ends_a_waiting_client_at_once():
    for _ in range(5):
        client = start_client("tcp://127.0.0.1:9", "60")
        assert client.stdout is not None
        client.stdout.readline()
        client.send_signal(signal.SIGINT)
        start = time.monotonic()
        client.communicate(timeout=10)
        assert time.monotonic() - start < 2
        assert client.returncode in (130, -signal.SIGINT)
