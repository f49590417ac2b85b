"""`dcnr demo` and `dcnr verify`: they show what they promise, and leave no process."""

from __future__ import annotations

import json
import signal

import pytest

from tests.e2e.conftest import Dcnr, read_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TINY = ["--set", "vars.layers=1", "--set", "vars.d=32", "--set", "vars.heads=2", "--set", "vars.ctx=16"]


def test_demo_without_a_terminal_and_again(dcnr: Dcnr) -> None:
    shown = dcnr("demo", "--steps", "24", *TINY)
    assert "\x1b" not in shown
    assert "finished at step 24/24" in shown
    assert "in one process: the same bits" in shown
    assert "a sample:\ndef " in shown
    assert "all processes have ended" in shown
    assert dcnr.daemons() == []

    lines = [json.loads(line) for line in dcnr("demo", "--steps", "24", *TINY, "-o", "json").splitlines()]
    last = lines[-1]
    assert last["event"] == "demo"
    assert last["session"] == "gpt-char-2"
    assert (last["steps"], last["compared"], last["largest_difference"]) == (24, 10, 0.0)
    assert last["sample"].startswith("def ")
    assert dcnr.daemons() == []


def test_demo_is_interrupted_resumed_and_begun_anew(dcnr: Dcnr) -> None:
    assert "nothing to resume" in dcnr.run("demo", "--resume", "--steps", "8", *TINY).stderr
    child = dcnr.start("demo", "--steps", "3000", *TINY, "--every", "0.1")
    read_until(child, "step 1", timeout=90)
    other = dcnr.run("demo", "--steps", "8", *TINY)
    assert "a demo already runs" in other.stderr
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=30)[0].decode()
    assert child.returncode == 130, rest
    assert "saved at step" in rest
    assert dcnr.daemons() == []

    child = dcnr.start("demo", "--steps", "3000", *TINY, "--every", "0.1")
    found = read_until(child, "going on from there", timeout=90)
    assert "found gpt-char-1, paused" in found
    read_until(child, "epoch 2 on ", timeout=60)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 143
    assert dcnr.daemons() == []

    fresh = dcnr("demo", "--fresh", "--steps", "4", *TINY)
    assert "starting anew" in fresh
    assert "finished at step 4/4" in fresh


def test_verify_finds_exactly_no_difference(dcnr: Dcnr) -> None:
    found = dcnr.json("verify", "gpt-char", *TINY, "--set", "vars.dropout=0.1", "--steps", "4", "--pnodes", "2",
                      "--placements", "planner,random:2", "--microbatches", "1,4")  # fmt: skip
    assert found["good"]
    assert (found["loss_difference"], found["gradient_difference"], found["weight_difference"]) == (0, 0, 0)
    assert len(found["runs"]) == 6
    assert all(run["bytes_crossed"] > 0 and run["steps"] == 4 and run["tensors"] > 0 for run in found["runs"])
    assert dcnr.daemons() == []


def test_verify_against_another_split(dcnr: Dcnr) -> None:
    shown = dcnr("verify", "mlp-digits", "--steps", "3", "--pnodes", "2", "--microbatches", "4",
                 "--against-microbatches", "1")  # fmt: skip
    assert "first step against 1 microbatches" in shown
    assert dcnr.daemons() == []
