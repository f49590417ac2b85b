"""Training on a cluster: attach, detach, pause, resume, stop; two networks at once; use; removal."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Dcnr, read_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = ["mlp-digits", "--steps", "20000", "--pnodes", "3"]
GPT = ["--set", "vars.layers=1", "--set", "vars.d=32", "--set", "vars.heads=2", "--set", "vars.ctx=16"]


@pytest.fixture(scope="module")
def trained(cluster: Dcnr) -> str:
    """A finished session of mlp-digits over three PNodes."""
    events = cluster.events("train", "mlp-digits", "--steps", "40", "--pnodes", "3", "--name", "digits")
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 41))
    assert events[-1]["verdict"] == "finished"
    assert events[-1]["committed"] == 40
    return "digits"


def test_a_run_is_the_same_as_in_one_process(cluster: Dcnr, trained: str) -> None:
    local = cluster.events("train", "mlp-digits", "--steps", "40", "--local", "--threads", "1")
    told = cluster.events("logs", trained, "--steps")
    mine = {report["step"]: report["loss"] for event in told for report in event["steps"]}
    assert mine == {event["step"]: event["loss"] for event in local if event["event"] == "step"}


def test_lists_have_stable_keys(cluster: Dcnr, trained: str) -> None:
    info = cluster.session(trained)
    assert {"session", "network", "state", "step", "steps", "loss", "committed", "pnodes", "final_hash"} <= info.keys()
    assert info["state"] == "finished"
    assert any(entry["network"] == "mlp-digits" for entry in cluster.json("net", "ls", "--registered"))
    assert "digits" in cluster("ps")
    assert "finished" in cluster("logs", trained)


def test_inspect(cluster: Dcnr, trained: str) -> None:
    found = cluster.json("inspect", trained)
    assert sum(vnode["parameter_count"] for vnode in found["vnodes"]) == 26_122
    assert {vnode["step"] for vnode in found["vnodes"]} == {40}
    assert len(set(found["placement"].values())) == 3
    assert sum(vnode["bytes_out"] for vnode in found["vnodes"]) > 0
    by_id = {vnode["vnode"]: vnode for vnode in found["vnodes"]}
    assert by_id["fc1"]["parameters"]["weight"] == [128, 64]
    assert by_id["fc1"]["gives"] == "float32(batch, 128)"
    assert by_id["fc1"]["weight_norm"] > 0
    assert by_id["fc1"]["gradient_norm"] > 0
    assert "fc1" in cluster("inspect", trained)


def test_infer_and_eval(cluster: Dcnr, trained: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), dtype=np.float32))
    outputs = cluster.json("infer", trained, "--input", str(tmp_path / "x.npy"))["outputs"]
    assert outputs["logits"]["shape"] == [3, 10]
    saved = tmp_path / "y.npy"
    cluster("infer", trained, "--input", str(tmp_path / "x.npy"), "--save", str(saved))
    assert np.load(saved).tolist() == outputs["logits"]["values"]
    score = cluster.json("eval", trained)
    assert score["samples"] == score["targets"] == 364
    assert 0.3 < score["accuracy"] <= 1
    bad = cluster.run("infer", trained, "--input", "pixels=nowhere.npy")
    assert bad.returncode == 65
    assert "does not read text" in cluster.run("infer", trained, "--text", "abc").stderr


def test_export_can_be_loaded_elsewhere(cluster: Dcnr, trained: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    done = cluster.json("export", trained, "--to", str(tmp_path / "out"))
    assert done["parameters"] == 26_122
    weights = load_file(tmp_path / "out" / "weights.safetensors")
    x = np.random.default_rng(0).random((2, 1, 8, 8), dtype=np.float32)
    h = x.reshape(2, 64)
    for name in ("fc1", "fc2"):
        h = np.maximum(h @ weights[f"{name}.weight"].T + weights[f"{name}.bias"], 0)
    logits = h @ weights["head.weight"].T + weights["head.bias"]
    np.save(tmp_path / "x.npy", x)
    values = cluster.json("infer", trained, "--input", str(tmp_path / "x.npy"))["outputs"]["logits"]["values"]
    np.testing.assert_allclose(values, logits, rtol=1e-5, atol=1e-5)


def test_ctrl_c_detaches_and_the_run_goes_on(cluster: Dcnr) -> None:
    child = cluster.start("train", *LONG, "--name", "long", "--every", "0.2")
    read_until(child, "step ")
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=20)[0].decode()
    assert child.returncode == 130
    assert "detached; long goes on" in rest
    assert "next: dcnr attach long" in rest
    before = cluster.session("long")
    assert before["state"] == "running"

    watcher = cluster.start("attach", "long", "--every", "0.2")
    read_until(watcher, "step ")
    cluster("pause", "long")
    last = watcher.communicate(timeout=20)[0].decode()
    assert watcher.returncode == 0
    assert "paused at step" in last
    held = cluster.session("long")
    assert held["state"] == "paused"
    assert held["committed"] == held["step"] >= before["step"]

    until = held["step"] + 5
    events = cluster.events("resume", "long", "--until", str(until))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(held["step"] + 1, until + 1))
    cluster("resume", "long", "-d")
    cluster("stop", "long")
    assert cluster.session("long")["state"] == "stopped"

    done = cluster.run("rm", "long")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    cluster("rm", "long", "--yes")
    assert all(info["session"] != "long" for info in cluster.json("ps"))
    assert "no session or network 'long'" in cluster.run("attach", "long").stderr


def test_two_networks_at_once_and_text(cluster: Dcnr) -> None:
    cluster("train", *LONG, "--name", "busy", "-d")
    events = cluster.events("train", "gpt-char", *GPT, "--steps", "8", "--pnodes", "3", "--name", "gpt")
    assert events[-1]["verdict"] == "finished"
    first = cluster.json("generate", "gpt", "--max-tokens", "24", "--seed", "5", "--prompt", "def ")
    again = cluster.json("generate", "gpt", "--max-tokens", "24", "--seed", "5", "--prompt", "def ")
    plain = cluster.json("generate", "gpt", "--max-tokens", "24", "--seed", "5", "--prompt", "def ", "--no-cache")
    assert len(first["ids"]) == 24
    assert first["ids"] == again["ids"] == plain["ids"]
    shown = cluster("generate", "gpt", "--max-tokens", "4", "--prompt", "def ")
    assert shown.startswith("def ")
    assert "4 tokens" in shown
    score = cluster.json("eval", "gpt", "--limit", "40")
    assert score["targets"] == 40 * 16
    assert score["perplexity"] > 1
    assert cluster.session("busy")["state"] == "running"
    cluster("stop", "busy")
    cluster("rm", "busy", "--yes")


def test_plan_deploys_nothing(cluster: Dcnr) -> None:
    plan = cluster.json("plan", "mlp-digits", "--pnodes", "2")
    assert len(set(plan["placement"].values())) == 2
    assert plan["step_s"] > 0
    assert plan["reasons"]
    assert "because" in cluster("plan", "mlp-digits")


def test_a_loss_that_explodes_fails_the_run_and_names_the_node(cluster: Dcnr) -> None:
    done = cluster.run("train", "mlp-digits", "--steps", "60", "--set", "train.optimizer.lr=1e30", "--name", "boom",
                       "--set", "train.schedule.type=constant", "--replace")  # fmt: skip
    if "min_lr" in done.stderr:
        done = cluster.run("train", "mlp-digits", "--steps", "60", "--set", "train.optimizer.lr=1e30", "--name", "boom")
    assert done.returncode == 1, done.stderr
    assert "boom failed at step" in done.stderr
    assert "Traceback" not in done.stderr
    assert cluster.session("boom")["state"] == "failed"
    cluster("rm", "boom", "--yes")


def test_gc_says_what_it_would_delete(cluster: Dcnr, trained: str) -> None:
    found = cluster.json("gc", "--dry-run")
    assert {"objects", "size_bytes", "keys", "dry_run"} <= found.keys()
