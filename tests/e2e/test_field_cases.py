"""Cases from the field that a person meets at the terminal, on a real cluster."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Dcnr, read_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = ["train", "mlp-digits", "--steps", "100000", "--pnodes", "3", "--every", "0.2"]
EXPLODES = [
    "train", "mlp-digits", "--steps", "60", "--pnodes", "3", "--set", "train.checkpoint.every=1",
    "--set", "train.optimizer={type: sgd, lr: 1e7}", "--set", "train.schedule={type: constant}", "--replace",
]  # fmt: skip


@pytest.mark.parametrize("extra", [{}, {"TERM": "dumb", "LC_ALL": "C"}])
def test_output_to_a_file_of_a_run_on_the_cluster(cluster: Dcnr, extra: dict[str, str], tmp_path: Path) -> None:
    """Field case B65: lines come while it runs; after SIGTERM the last state is there, and the run goes on."""
    name = f"log-{len(extra)}"
    log = tmp_path / "log"
    with log.open("wb") as sink:
        child = cluster.start(*LONG, "--name", name, stdout=sink, **extra)
        cluster.wait_for(lambda: log.read_text().count("step ") >= 3)
        assert log.stat().st_size < 4096, "the first lines come when they are written, not with a full buffer"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=10) == 143
    text = log.read_text()
    assert "\x1b" not in text
    assert "\r" not in text
    assert "Traceback" not in text
    lines = text.splitlines()
    assert f"detached; {name} goes on" in lines
    assert any(f"{name}" in line and "at step" in line for line in lines[-5:]), lines[-5:]
    assert cluster.session(name)["state"] == "running"
    cluster("stop", name)
    cluster("rm", name, "--yes")


def test_json_and_a_closed_pipe_of_a_run_on_the_cluster(cluster: Dcnr) -> None:
    """Field case B65: every line is an object, the last one the state; a reader that goes away ends it quietly."""
    child = cluster.start(*LONG, "--name", "json", "-o", "json", stdout=subprocess.PIPE)
    read_until(child, '"event":"step"')
    child.send_signal(signal.SIGTERM)
    rest = child.communicate(timeout=20)[0].decode()
    assert child.returncode == 143
    events = [json.loads(line) for line in rest.splitlines()]
    assert events[-1]["event"] == "end"
    assert events[-1]["step"] > 0
    words = " ".join(f"'{word}'" for word in cluster.command("attach", "json", "--every", "0.1"))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} | head -1"],
        capture_output=True, text=True, timeout=60, env=cluster.env, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert cluster.session("json")["state"] == "running"
    cluster("stop", "json")
    cluster("rm", "json", "--yes")


def test_a_loss_that_is_not_finite_keeps_the_checkpoint_before_it(cluster: Dcnr) -> None:
    """The failed step is in no checkpoint and in no list of steps; VNode and step are named; the exit code is 1."""
    done = cluster.run(*EXPLODES, "--name", "inf")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    info = cluster.session("inf")
    good = info["step"]
    assert info["state"] == "failed"
    assert 1 <= good < 60
    assert f"inf failed at step {good}" in done.stderr
    assert f"step {good + 1} was not applied: a value in VNode '" in done.stderr
    cluster.wait_for(lambda: cluster.session("inf")["committed"] == good, timeout=20)
    kept = cluster.session("inf")["final_hash"]
    told = [report["step"] for event in cluster.events("logs", "inf", "--steps") for report in event["steps"]]
    assert told == list(range(1, good + 1))
    again = cluster.run("resume", "inf")  # from the checkpoint it comes to the same step, and ends there again
    assert again.returncode == 1
    assert f"step {good + 1} was not applied" in again.stderr
    assert cluster.session("inf")["final_hash"] == kept
    cluster("rm", "inf", "--yes")


def test_resume_with_another_thread_count_says_so(dcnr: Dcnr) -> None:
    """Field case B58: recorded in the manifest, said by the session, and within 1e-5 of the undisturbed run."""
    run = ["train", "cnn-digits", "--steps", "12", "--name", "run", "--set", "train.checkpoint.every=3"]
    dcnr("up", "--pnodes", "1", "--threads", "1")
    dcnr(*run, "--until", "6")
    assert dcnr.session("run")["bit_exact"] == ""
    dcnr("down")
    dcnr("up", "--pnodes", "1", "--threads", "2")
    shown = dcnr("resume", "run")
    assert "not bit-exact: threads 1→2" in shown
    assert dcnr.session("run")["bit_exact"] == "not bit-exact: threads 1→2"
    assert "not bit-exact: threads 1→2" in dcnr("ps")
    assert "not bit-exact: threads 1→2" in dcnr("logs", "run")
    losses = {r["step"]: r["loss"] for event in dcnr.events("logs", "run", "--steps") for r in event["steps"]}
    dcnr("down")
    local = dcnr.events("train", "cnn-digits", "--steps", "12", "--local", "--threads", "1")
    undisturbed = {event["step"]: event["loss"] for event in local if event["event"] == "step"}
    assert losses == pytest.approx(undisturbed, rel=1e-5)
    manifests = sorted((dcnr.home / "store").rglob("manifests/*.json"))
    recorded = [json.loads(path.read_text())["environment"] for path in manifests]
    assert all("torch " in one and "; device cpu; cpu " in one for environment in recorded for one in environment)
    assert recorded[-1][0].endswith("; threads 2")


BAD_IDS = ["../../other", "gpt-chаr", "/etc/passwd"]


@pytest.mark.parametrize("name", BAD_IDS)
def test_names_that_are_no_ids_are_refused_by_every_command(cluster: Dcnr, name: str, tmp_path: Path) -> None:
    """Field case B64: in one or two lines, before any key or file is made of them."""
    before = sorted(path for path in cluster.home.rglob("*") if "log" not in path.name)
    for command in (
        ["train", "mlp-digits", "--name", name, "-d"], ["attach", name], ["pause", name], ["inspect", name],
        ["rm", name, "--yes"], ["infer", name, "--text", "x"], ["export", name, "--to", str(tmp_path / "out")],
    ):  # fmt: skip
        done = cluster.run(*command)
        assert done.returncode in (1, 2, 65), (command, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert "a bug in DCNR" not in done.stderr
        assert 1 <= len(done.stderr.splitlines()) <= 4, done.stderr
    assert not (tmp_path / "out").exists()
    after = sorted(path for path in cluster.home.rglob("*") if "log" not in path.name)
    assert [path for path in after if path not in before and "blobs" not in str(path) and "data" not in str(path)] == []
    assert not os.path.lexists(cluster.home.parent / "other")


def test_special_tokens_stay_whole_from_training_to_use(cluster: Dcnr) -> None:
    """Field case B63: the session's manifest names the tokenizer; another process encodes `<SEP>` as one token."""
    sets = ["vars.layers=1", "vars.d=32", "vars.heads=2", "vars.ctx=16", "train.data.limit_bytes=200000",
            "train.data.vocab_size=300", "train.data.special_tokens=['<SEP>']"]  # fmt: skip
    cluster("train", "gpt-bpe", "--steps", "4", "--name", "sep", *(word for one in sets for word in ("--set", one)))
    (path,) = (cluster.home / "store").rglob("sessions/sep/manifests/*.json")
    digest = json.loads(path.read_text())["data"]["tokenizer_digest"]
    (blob,) = (path for path in (cluster.home / "store" / "blobs").rglob("*") if path.name == digest)
    assert "<SEP>" in json.loads(blob.read_bytes())["special_tokens"]
    shape = cluster.json("infer", "sep", "--text", "<SEP>")["outputs"]["logits"]["shape"]
    assert shape[:2] == [1, 1]
    shape = cluster.json("infer", "sep", "--text", "<SEP>\n<SEP>")["outputs"]["logits"]["shape"]
    assert shape[:2] == [1, 3]
    cluster("rm", "sep", "--yes")


def test_kill_9_while_every_step_is_saved(dcnr: Dcnr) -> None:
    """Field case B35 (and B33): all processes die at random moments of a run that saves each step; every resume begins
    at the step that was committed last, and the end is the undisturbed run's, bit for bit."""
    run = ["train", "mlp-digits", "--steps", "60", "--pnodes", "3", "--set", "train.checkpoint.every=1"]
    draw = random.Random(35)
    dcnr("up", "--pnodes", "3")
    dcnr(*run, "--name", "calm")
    dcnr(*run, "--name", "hit", "-d")
    for _ in range(2):
        seen = dcnr.session("hit")["committed"]
        dcnr.wait_for(lambda seen=seen: dcnr.session("hit")["committed"] > seen)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.3))
        committed = dcnr.session("hit")["committed"]
        dcnr.kill_everything()
        dcnr("up", "--pnodes", "3")
        found = dcnr.session("hit")
        assert found["committed"] >= committed
        if found["committed"] == 60:
            break
        dcnr("resume", "hit", "-d")
    dcnr.wait_for(lambda: dcnr.session("hit")["state"] == "finished")
    calm, hit = dcnr.session("calm"), dcnr.session("hit")
    assert hit["final_hash"] == calm["final_hash"]
    assert hit["bit_exact"] == ""
    steps = {}
    for name in ("calm", "hit"):
        steps[name] = {r["step"]: r["ids_digest"] for e in dcnr.events("logs", name, "--steps") for r in e["steps"]}
    assert steps["hit"].items() <= steps["calm"].items()
    dcnr("down")
