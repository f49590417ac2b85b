"""Field case B30: a PNode is killed with -9 in the middle of a generation, an evaluation, a forward pass.

The command names who is missing, waits for the next deployment, and ends as if nothing had been: the same tokens, the
same loss, exit code 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Dcnr

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SMALL = ["vars.layers=2", "vars.d=32", "vars.heads=2", "vars.ctx=128", "train.data.limit_bytes=200000"]
SETS = [word for one in [*SMALL, "train.checkpoint.every=5"] for word in ("--set", one)]
TOKENS = 160
"""More than the context of 128: the last tokens have no cache."""
ASK = ["generate", "gen", "def ", "-n", str(TOKENS)]


@pytest.fixture(scope="module")
def trained(cluster: Dcnr) -> Dcnr:
    """A cluster of three PNodes with a short lease, and `gen`, which has made its steps and stays deployed."""
    cluster("down")
    cluster("up", "--pnodes", "3", "--lease", "3")
    cluster("train", "gpt-char", "--steps", "10", "--name", "gen", "--pnodes", "3", *SETS)
    return cluster


def generated(child: subprocess.Popen[bytes], after: int, kill: int) -> bytes:
    """All that a child writes; `kill` gets SIGKILL once `after` bytes are there."""
    assert child.stdout is not None
    timer = threading.Timer(120, child.kill)
    timer.start()
    text = b""
    try:
        while len(text) < after and (piece := os.read(child.stdout.fileno(), 4096)):
            text += piece
        os.kill(kill, signal.SIGKILL)
        while piece := os.read(child.stdout.fileno(), 4096):
            text += piece
    finally:
        timer.cancel()
    return text


def revive(cluster: Dcnr) -> None:
    """All three PNodes are there again, and hold the session."""
    cluster("up", "--pnodes", "3")
    cluster("infer", "gen", "--text", "def ")


def using(cluster: Dcnr) -> list[str]:
    """The PNodes that hold the session."""
    found: list[str] = cluster.session("gen")["pnodes"]
    return found


GREEDY, SEEDED = ["--temperature", "0"], ["--seed", "7"]


@pytest.mark.parametrize(
    ("place", "after", "options"), [(0, 1, SEEDED), (1, 60, GREEDY), (2, 120, SEEDED), (1, 150, GREEDY)]
)
def test_the_tokens_are_those_of_an_undisturbed_run(
    trained: Dcnr, place: int, after: int, options: list[str], tmp_path: Path
) -> None:
    """At the first token, in the middle of the cached part, at its end, and beyond it; each of the PNodes."""
    revive(trained)
    calm = trained.run(*ASK, *options)
    assert calm.returncode == 0, calm.stderr
    names = using(trained)
    assert len(names) > 1
    name = names[place % len(names)]
    with (tmp_path / "err").open("wb") as errors:
        child = subprocess.Popen(
            trained.command(*ASK, *options), stdout=subprocess.PIPE, stderr=errors, env=trained.env, cwd=trained.home
        )
        trained.started.append(child)
        text = generated(child, after, trained.pids()[name])
        assert child.wait(timeout=60) == 0, (tmp_path / "err").read_text()
    told = (tmp_path / "err").read_text()
    assert text.decode().rsplit("\n", 2)[0] == calm.stdout.rsplit("\n", 2)[0]
    assert "Traceback" not in told
    assert "gen is placed anew (" in told
    assert "(at most 300 s)" in told
    assert "gen: goes on in epoch " in told
    assert name not in using(trained)


@pytest.mark.parametrize("command", [["eval", "gen"], ["infer", "gen", "--text", "def "]])
def test_eval_and_infer_go_on_too(trained: Dcnr, command: list[str]) -> None:
    """Both end with what they give undisturbed."""

    def outcome(text: str) -> Any:
        found = json.loads(text)
        return {key: value for key, value in found.items() if key not in ("seconds", "moves")}

    revive(trained)
    calm = trained.run(*command, "-o", "json")
    assert calm.returncode == 0, calm.stderr
    os.kill(trained.pids()[using(trained)[-1]], signal.SIGKILL)
    hit = trained.run(*command, "-o", "json")
    assert hit.returncode == 0, hit.stderr
    assert outcome(hit.stdout) == outcome(calm.stdout)
