"""B65 and B05: output away from a terminal, signals, closed pipes; and every end is quick and clean."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import pytest

from tests.e2e.conftest import Dcnr, read_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STRUCK = 100
"""Starts that a Ctrl-C meets at a random moment, of two commands, four at once."""
LOCAL = ["train", "mlp-digits", "--local", "--steps", "100000", "--threads", "1", "--every", "0.2"]


@pytest.mark.parametrize("extra", [{}, {"TERM": "dumb"}, {"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_lines_come_as_they_happen_and_the_last_state_on_sigterm(dcnr: Dcnr, extra: dict[str, str]) -> None:
    log = dcnr.home / "log"
    with log.open("wb") as sink:
        child = dcnr.start(*LOCAL, stdout=sink, **extra)
        dcnr.wait_for(lambda: log.read_text().count("step ") >= 3)
        assert log.stat().st_size < 4096, "the first lines come when they are written, not with a full buffer"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=5) == 143
    text = log.read_text()
    assert "\x1b" not in text
    assert "Traceback" not in text
    lines = text.splitlines()
    assert "interrupted at step" in lines[-1]
    assert f"step {lines[-1].rpartition(' ')[2].split('/')[0]}/" in lines[-2]


def test_json_lines_on_sigterm(dcnr: Dcnr) -> None:
    child = dcnr.start(*LOCAL, "-o", "json")
    read_until(child, '"step":3,')
    child.send_signal(signal.SIGTERM)
    rest = child.communicate(timeout=10)[0].decode()
    events = [json.loads(line) for line in rest.splitlines()]
    assert events[-1]["event"] == "end"
    assert events[-1]["verdict"] == "interrupted"


def test_a_closed_pipe_ends_quietly(dcnr: Dcnr) -> None:
    command = " ".join(f"'{word}'" for word in dcnr.command(*LOCAL))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        capture_output=True, text=True, timeout=60, env=dcnr.env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_ctrl_c_ends_a_local_run_with_130(dcnr: Dcnr) -> None:
    child = dcnr.start(*LOCAL)
    read_until(child, "step ")
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=5)[0].decode()
    assert child.returncode == 130
    assert "interrupted at step" in rest
    assert "Traceback" not in rest


def test_infer_always_ends_quickly(cluster: Dcnr) -> None:
    """B05: reachable, unreachable, and Ctrl-C at any moment of each, a hundred times (seed 0)."""
    cluster("train", "mlp-digits", "--steps", "5", "--name", "tiny")
    (cluster.home / "x.json").write_text(json.dumps([[[0.0] * 8] * 8]))
    ask = ["infer", "tiny", "--input", "x.json", "-o", "json"]
    elsewhere = [*ask, "--orchestrator", "127.0.0.1:1"]
    draw = random.Random(0)
    for _ in range(3):
        assert cluster.json(*ask[:-2])["outputs"]
        assert cluster.run(*elsewhere).returncode == 69
    for _ in range(STRUCK // 4):
        starts = [(cluster.start(*command), calm) for command, calm in 2 * [(ask, 0), (elsewhere, 69)]]
        began = time.monotonic()
        for moment, (child, calm) in sorted(
            zip([draw.uniform(0.1, 2.0) for _ in starts], starts, strict=True), key=first
        ):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            child.send_signal(signal.SIGINT)
            sent = time.monotonic()
            output = child.communicate(timeout=20)[0].decode()
            cluster.started.remove(child)
            if child.returncode in (1, -signal.SIGINT) and "/cli/" not in output:
                continue  # the interpreter itself was still starting
            assert time.monotonic() - sent < 3, output
            assert child.returncode in (130, calm), output
            assert "Traceback" not in output
            assert "a bug in DCNR" not in output


def first(pair: tuple[float, object]) -> float:
    return pair[0]
