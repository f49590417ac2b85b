"""`up`, `status`, `down`: all processes start, are found, and end; no foreign process is ever touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from cli.processes import Process, birth_of, stop
from tests.e2e.conftest import Dcnr

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_up_status_down(dcnr: Dcnr) -> None:
    shown = dcnr("up", "--pnodes", "2")
    assert "p1 p2" in shown
    assert "next: dcnr train" in shown
    found = dcnr.json("status")
    assert [node["pnode"] for node in found["pnodes"]] == ["p1", "p2"]
    assert {node["state"] for node in found["pnodes"]} == {"alive"}
    assert found["pnodes"][0]["profile"]["threads"] >= 1
    assert "already up" in dcnr("up")

    os.kill(dcnr.pids()["p2"], signal.SIGKILL)
    dcnr.wait_for(lambda: "p2 ended unasked" in dcnr("doctor", "-o", "json"))
    assert "p2 had ended before" in dcnr.run("down").stderr
    assert dcnr.daemons() == []
    assert "no cluster is running" in dcnr("down")


def test_up_starts_only_what_has_ended(dcnr: Dcnr) -> None:
    """Also the orchestrator, at the same address; and more PNodes join a cluster that runs."""
    dcnr("up", "--pnodes", "2", "--lease", "1")
    before, address = dcnr.pids(), dcnr.record()["address"]
    os.kill(before["p2"], signal.SIGKILL)
    dcnr.wait_for(lambda: dcnr.gone(before["p2"]))
    shown = dcnr("up")
    assert "started p2 again (had ended); left p1, orchestrator alone" in shown
    after = dcnr.pids()
    assert {name for name in after if after[name] != before[name]} == {"p2"}

    os.kill(after["orchestrator"], signal.SIGKILL)
    dcnr.wait_for(lambda: dcnr.gone(after["orchestrator"]))
    assert "dcnr up starts it again" in dcnr.run("ps").stderr
    done = dcnr.json("up", "--pnodes", "3")
    assert (done["again"], done["added"], done["ran"]) == (["orchestrator"], ["p3"], ["p1", "p2"])
    assert dcnr.record()["address"] == address
    last = dcnr.pids()
    assert (last["p1"], last["p2"]) == (after["p1"], after["p2"])
    assert {node["pnode"]: node["state"] for node in dcnr.json("status")["pnodes"]} == dict.fromkeys(
        ("p1", "p2", "p3"), "alive"
    )

    fewer = dcnr.run("up", "--pnodes", "1")
    assert fewer.returncode == 2
    assert "dcnr up ends none of them" in fewer.stderr
    assert "runs with --threads" in dcnr.run("up", "--threads", "7").stderr
    dcnr("down")
    assert dcnr.daemons() == []


def test_an_interrupted_up_ends_only_what_it_started(dcnr: Dcnr) -> None:
    dcnr("up", "--pnodes", "1")
    before = dcnr.pids()
    child = dcnr.start("up", "--pnodes", "3")
    dcnr.wait_for(lambda: "p2" in dcnr.pids())
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=30) == 130
    left = {process.pid for process in dcnr.daemons()}
    assert left == set(before.values())
    dcnr("down")


def test_down_after_everything_was_killed(dcnr: Dcnr) -> None:
    dcnr("up", "--pnodes", "1")
    dcnr.kill_everything()
    done = dcnr.run("ps")
    assert done.returncode == 69
    assert "has ended" in done.stderr
    assert "started orchestrator, p1 again" in dcnr("up")
    dcnr.kill_everything()
    assert "down" in dcnr("down")
    dcnr("up", "--pnodes", "1")
    dcnr("down")


def test_a_foreign_pid_is_never_killed(dcnr: Dcnr) -> None:
    bystander = dcnr.start("--version")
    bystander.wait()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as foreign:
        try:
            record = {"name": "orchestrator", "pid": foreign.pid, "birth": "another-boot:1", "log": "x"}
            state = {"store": "file:///x", "address": "tcp://h:1", "threads": 1, "orchestrator": record, "pnodes": []}
            (dcnr.home / "cluster.json").write_text(json.dumps(state))
            dcnr("down")
            assert foreign.poll() is None
        finally:
            foreign.kill()


def test_interrupted_up_leaves_nothing(dcnr: Dcnr) -> None:
    child = dcnr.start("up", "--pnodes", "2")
    dcnr.wait_for(lambda: (dcnr.home / "cluster.json").exists())
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=30) == 130
    assert dcnr.daemons() == []
    assert not (dcnr.home / "cluster.json").exists()


def test_a_daemon_that_fails_to_start_is_explained(dcnr: Dcnr) -> None:
    done = dcnr.run("up", "--store", "ftp://nowhere/x")
    assert done.returncode in (1, 2, 69)
    assert "orchestrator ended while starting" in done.stderr
    assert "ftp" in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    assert dcnr.daemons() == []


def test_stubborn_processes_are_killed_with_their_children(tmp_path: object) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        record = Process("stubborn", parent.pid, birth_of(parent.pid) or "", "log")
        assert record.alive()
        assert stop([record], grace_s=0.2) == [record]
        assert not record.alive()
    left = [process for process in psutil.process_iter() if process.pid == grandchild]
    assert not psutil.wait_procs(left, timeout=5)[1]
