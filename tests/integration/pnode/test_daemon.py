"""One daemon in this process, and `dcnr-pnode` as it is called from a shell."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from pnode.compute_thread import ComputeThread
from pnode.daemon import Daemon, Options
from pnode.executor import StageExecutor
from pnode.work import Work
from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_inference import Client
from tests.integration.pnode.test_training import prepare_network
from wire.ending import END_S
from wire.ids import new_request_id
from wire.messages import InferFailed, InspectRun, Ok, ShutDown, StartRun
from wire.refusals import STORE_AWAY
from wire.requests import RefusedError
from wire.zmq_bus import ZmqBus

QUIET = structlog.wrap_logger(
    structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(50), processors=[]
)


@pytest.fixture
async def conductor(tmp_path: Path) -> AsyncIterator[Conductor]:
    found = Conductor(tmp_path)
    await found.start()
    yield found
    await found.close()


class Running:
    """A daemon as a task of this loop."""

    def __init__(self, conductor: Conductor, tmp_path: Path, devices: tuple[str, ...] = ("cpu",)) -> None:
        options = Options(name="p1", orchestrator=conductor.address, home=tmp_path / "p1", devices=devices)
        self.daemon = Daemon(options, ZmqBus("p1", bind="tcp://127.0.0.1:0"), QUIET)

    async def __aenter__(self) -> Daemon:
        self._task = asyncio.ensure_future(self.daemon.run())
        return self.daemon

    async def __aexit__(self, *_: object) -> None:
        self.daemon.stop()
        await asyncio.wait([self._task], timeout=10)
        if not self._task.cancelled() and self._task.done():
            self._task.exception()


async def test_a_dead_compute_thread_shows_and_fails_its_sessions(conductor: Conductor, tmp_path: Path) -> None:
    network, data = prepare_network("mlp-digits", ["train.steps=100000"], tmp_path)
    _, digest = await conductor.put(network, data)
    async with Running(conductor, tmp_path) as daemon:
        await conductor.until(lambda: "p1" in conductor.beats)
        placement = {str(node.id): "p1" for node in network.graph.nodes}
        await conductor.deploy("mlp-1", network, digest, placement)
        await conductor.run("mlp-1", 100_000)
        await conductor.until(lambda: bool(conductor.steps.get("mlp-1")))

        def end() -> None:
            raise SystemExit("planted")

        daemon.computing.threads[0].submit("planted", "planted", end, lambda value, error: None)
        await conductor.until(lambda: conductor.beats["p1"].compute == "dead")
        await conductor.until(lambda: bool(conductor.failed))
        assert "compute thread is dead" in conductor.failed[0].text
        with pytest.raises(RefusedError, match="compute thread is dead"):
            await conductor.run("mlp-1", 100_000)


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_a_request_that_ends_the_compute_thread_says_so(
    conductor: Conductor, tmp_path: Path, end: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case B26: whoever asked learns which thread of which PNode is dead, and so does the orchestrator."""
    network, data = prepare_network("mlp-digits", ["train.steps=1"], tmp_path)
    _, digest = await conductor.put(network, data)
    client = Client(conductor)
    await client.start()
    async with Running(conductor, tmp_path) as daemon:
        await conductor.until(lambda: "p1" in conductor.beats)
        await conductor.deploy("mlp-1", network, digest, {str(node.id): "p1" for node in network.graph.nodes})
        await conductor.run("mlp-1", 1)
        await conductor.until(lambda: conductor.all_held("mlp-1", 1))

        def infer(*_: object) -> None:
            raise end

        monkeypatch.setattr(StageExecutor, "infer", infer)
        output = next(iter(network.graph.outputs))
        found = await client.ask("mlp-1", [output], request_id="r-1", split="val", count=1)
        failed, _ = found["failed"]
        assert isinstance(failed, InferFailed)
        assert (failed.pnode, failed.code) == ("p1", "compute")
        assert failed.text == f"the compute thread of p1 (cpu) is dead: infer r-1 in stage 0 ended it: {end!r}"
        await conductor.until(lambda: conductor.beats["p1"].compute == "dead")
        await conductor.until(lambda: bool(conductor.failed))
        assert conductor.failed[0].cause == "compute"
        assert "compute thread is dead" in conductor.failed[0].text, "which dcnr status shows"
        assert daemon.compute_status().state == "dead"
    await client.bus.close()


@pytest.mark.parametrize("doing", ["train", "inspect"])
async def test_an_action_that_ends_the_compute_thread_names_it(
    conductor: Conductor, tmp_path: Path, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, data = prepare_network("mlp-digits", ["train.steps=1"], tmp_path)
    _, digest = await conductor.put(network, data)
    async with Running(conductor, tmp_path):
        await conductor.until(lambda: "p1" in conductor.beats)
        await conductor.deploy("mlp-1", network, digest, {str(node.id): "p1" for node in network.graph.nodes})

        def end(*_: object) -> None:
            raise SystemExit(3)

        monkeypatch.setattr(Work, "run" if doing == "train" else "inspect", end)
        if doing == "train":
            await conductor.run("mlp-1", 1)
            await conductor.until(lambda: bool(conductor.failed))
            text = conductor.failed[0].text
            expected = "F0 of step 1 in stage 0: the compute thread of p1 (cpu) is dead: this ended it: SystemExit(3)"
        else:
            asked = InspectRun(str(new_request_id()), "mlp-1", 1)
            with pytest.raises(RefusedError) as refused:
                await conductor.bus.ask(conductor.peers["p1"], asked, timeout_s=10)
            text = refused.value.message
            expected = "the compute thread of p1 (cpu) is dead: inspect ended it: SystemExit(3)"
        assert text == expected
        await conductor.until(lambda: conductor.beats["p1"].compute == "dead")


async def test_each_device_has_a_thread_and_sessions_are_spread(conductor: Conductor, tmp_path: Path) -> None:
    """The second device is pretended: the processor twice, each with a thread of its own."""
    network, data = prepare_network("mlp-digits", ["train.steps=5"], tmp_path)
    _, digest = await conductor.put(network, data)
    placement = {str(node.id): "p1" for node in network.graph.nodes}
    async with Running(conductor, tmp_path, devices=("cpu", "cpu")) as daemon:
        await conductor.until(lambda: "p1" in conductor.beats)
        for session in ("mlp-1", "mlp-2"):
            await conductor.deploy(session, network, digest, placement)
            await conductor.run(session, 5)
        for session in ("mlp-1", "mlp-2"):
            await conductor.until(lambda session=session: conductor.all_held(session, 5))
        threads = {session.compute for session in daemon.sessions.values()}
        assert threads == set(daemon.computing.threads)
        assert len(threads) == 2
    assert [s.loss for s in conductor.steps["mlp-1"]] == [s.loss for s in conductor.steps["mlp-2"]]


async def test_an_old_term_and_strange_requests_are_refused(conductor: Conductor, tmp_path: Path) -> None:
    async with Running(conductor, tmp_path):
        await conductor.until(lambda: "p1" in conductor.beats)
        peer = conductor.peers["p1"]
        with pytest.raises(RefusedError, match="term 0 is over, term 1") as refused:
            await conductor.bus.ask(peer, StartRun(str(new_request_id()), "x-1", 1, 0, 5), timeout_s=5)
        assert refused.value.code == "stale-term"
        with pytest.raises(RefusedError, match="not deployed here") as refused:
            await conductor.bus.ask(peer, StartRun(str(new_request_id()), "x-1", 1, 1, 5), timeout_s=5)
        assert refused.value.code == "unknown-session"
        answer, _ = await conductor.bus.ask(peer, ShutDown(str(new_request_id())), timeout_s=5)
        assert isinstance(answer, Ok)
        await conductor.until(lambda: conductor.gone == ["p1"])


async def test_a_refused_pnode_ends_with_the_reason(conductor: Conductor, tmp_path: Path) -> None:
    conductor.refuse = "id p1 is already held by tcp://127.0.0.1:9"
    process = await conductor.spawn("p1")
    async with asyncio.timeout(60):
        assert await process.wait() == 1
    lines = (tmp_path / "p1.err").read_text().splitlines()
    assert lines[-1] == "dcnr-pnode: id p1 is already held by tcp://127.0.0.1:9"
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_without_its_home_folder_it_ends_and_says_why(conductor: Conductor, tmp_path: Path, how: str) -> None:
    """In good order: the orchestrator hears of it at once, and gives its VNodes to others."""
    process = await conductor.spawn("p1")
    await conductor.until(lambda: "p1" in conductor.beats)
    shutil.rmtree(tmp_path / "p1")
    if how == "replaced":
        (tmp_path / "p1").mkdir()
    await conductor.until(lambda: conductor.gone == ["p1"], 30)
    async with asyncio.timeout(30):
        assert await process.wait() == 1
    told = (tmp_path / "p1.err").read_text()
    assert f"dcnr-pnode: the home folder {tmp_path / 'p1'} was {how}" in told.splitlines()[-1]
    assert "Traceback" not in told


async def ends_in_time(task: asyncio.Future[None]) -> None:
    async with asyncio.timeout(END_S):
        await asyncio.wait([task])
    assert task.exception() is None


async def test_it_ends_in_time_though_it_computes_and_stores(conductor: Conductor, tmp_path: Path) -> None:
    """A long action in the compute thread, and work in the background that does not end by itself."""
    running = Running(conductor, tmp_path)
    async with running as daemon:
        await conductor.until(lambda: "p1" in conductor.beats)
        daemon.computing.threads[0].submit("x", "a long one", lambda: time.sleep(20), lambda result, error: None)
        daemon._spawn(asyncio.sleep(60))
        daemon.stop()
        await ends_in_time(running._task)
    assert conductor.gone == ["p1"]


async def test_it_ends_in_time_before_it_has_measured_itself(conductor: Conductor, tmp_path: Path) -> None:
    running = Running(conductor, tmp_path)
    daemon = running.daemon
    started = asyncio.Event()

    def make(device: str) -> ComputeThread:
        started.set()
        wake = asyncio.get_running_loop().call_soon_threadsafe
        return ComputeThread(device, wake=wake, prepare=lambda: time.sleep(20))

    daemon.computing._make = make
    async with running:
        await started.wait()
        daemon.stop()
        await ends_in_time(running._task)
    assert conductor.beats == {}


async def test_a_log_that_can_not_be_written_is_said_once_and_does_no_harm(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, signal, sys; from pnode.logs import open_log;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "log = open_log(pathlib.Path(sys.argv[1]), 'p1', 'info'); [log.info('x' * 50, n=n) for n in range(100)]"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr.count(f"the log {tmp_path / 'p1.log'} can't be written") == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count("x" * 50) == 100


async def test_it_tries_again_until_the_orchestrator_is_there(conductor: Conductor, tmp_path: Path) -> None:
    conductor.bus.on_message(lambda sender, message, frames: None)
    async with Running(conductor, tmp_path) as daemon:
        await asyncio.sleep(1.0)
        assert not daemon.registered.is_set()
        conductor.bus.on_message(conductor._on_message)
        await conductor.until(lambda: "p1" in conductor.beats, 30.0)
        assert conductor.beats["p1"].compute == "idle"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "the following arguments are required: --name, --orchestrator"),
        (["--name", "P 1", "--orchestrator", "tcp://127.0.0.1:1"], 2, "PNode id 'P 1' is not allowed"),
        (["--name", "p1", "--orchestrator", "nowhere"], 2, "nowhere"),
        (["--name", "p1", "--orchestrator", "tcp://127.0.0.1:1", "--device", "abacus"], 2, "no device 'abacus'"),
        (["--name", "p1", "--orchestrator", "tcp://127.0.0.1:1", "--device", "cuda:99"], 2, "CUDA devices, no cuda:99"),
        (["--name", "p1", "--orchestrator", "tcp://127.0.0.1:1", "--threads", "-1"], 2, "--threads"),
        (["--name", "p1", "--orchestrator", "tcp://127.0.0.1:1", "--home", "/dev/null/home"], 2, "no home folder at"),
        (["--name", "p1", "--orchestrator", "tcp://127.0.0.1:1", "--bind", "tcp://192.0.2.1:5"], 69, "can't listen"),
    ],
)
def test_what_can_not_be_is_one_line_and_a_code(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pnode.main", "--home", str(tmp_path), *arguments] if arguments else
        [sys.executable, "-m", "pnode.main"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


async def test_one_that_is_asked_to_prepare_before_it_knows_the_store_may_be_asked_again(
    conductor: Conductor, tmp_path: Path
) -> None:
    network, data = prepare_network("mlp-digits", [], tmp_path)
    _, digest = await conductor.put(network, data)
    placement = {str(node.id): "p1" for node in network.graph.nodes}
    async with Running(conductor, tmp_path) as daemon:
        await conductor.until(lambda: "p1" in conductor.beats)
        store, daemon.hub.store = daemon.hub.store, None  # as if `Registered` were still on its way
        with pytest.raises(RefusedError, match="has no store yet") as caught:
            await conductor.deploy("mlp-1", network, digest, placement)
        assert caught.value.code == STORE_AWAY
        daemon.hub.store = store
        await conductor.deploy("mlp-2", network, digest, placement)
