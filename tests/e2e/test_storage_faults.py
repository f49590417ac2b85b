"""A store that takes nothing, a PNode whose clock is wrong, while a run trains: it is said, and the end is the same."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Dcnr
from tests.integration.storage.clocks import MovedClock
from tests.seaweed import ENVIRONMENT, seaweed_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "dcnr-test", str(folder)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount(folder, "size=8m")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take all room."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(64 << 10))
            except OSError:
                return filler


def waits(dcnr: Dcnr, session: str) -> str:
    """Who waits for what, as `dcnr status` shows it to a person."""
    lines = dcnr("status").splitlines()
    return "\n".join(line for line in lines if line.startswith((f"{session}: ", f"{session} waits for ")))


def test_a_full_disk_while_training(dcnr: Dcnr, disk: Path) -> None:
    """Also the orchestrator's restart on it is refused in one line, and nothing that was committed is lost."""
    store = str(disk / "store")
    long = ["train", "mlp-digits", "--steps", "2000", "--set", "train.checkpoint.every=25"]
    dcnr("up", "--pnodes", "2", "--store", store)
    dcnr(*long, "--name", "calm", timeout=300)
    dcnr(*long, "--name", "hit", "-d")
    dcnr.wait_for(lambda: dcnr.session("hit")["committed"] > 0)
    filler = fill(disk)
    dcnr.wait_for(lambda: "waits for store: cut of step " in waits(dcnr, "hit"), 120)
    told = waits(dcnr, "hit")
    assert "No space left on device; 0 bytes are free" in told
    assert store in told
    assert "make room on the disk" in told
    assert " s (at most 24 h)" in told
    found = dcnr.session("hit")
    assert (found["state"], found["recoveries"]) == ("running", 0)
    assert 0 < found["committed"] < found["step"] < 2000
    refused = dcnr.run("pause", "hit")
    assert refused.returncode == 1
    assert "No space left on device" in refused.stderr
    os.kill(dcnr.pids()["orchestrator"], 9)
    done = dcnr.run("up", "--pnodes", "2", "--store", store)
    assert done.returncode == 1
    assert "the store can't be used" in done.stderr
    assert "No space left on device; 0 bytes are free" in done.stderr
    filler.unlink()
    dcnr("up", "--pnodes", "2", "--store", store)
    dcnr.wait_for(lambda: dcnr.session("hit")["state"] == "finished", 240)
    assert dcnr.session("hit")["final_hash"] == dcnr.session("calm")["final_hash"]
    dcnr("down")


PNODE = "import sys\nsys.argv = ['dcnr-pnode', *sys.argv[1:]]\nfrom pnode.main import main\nmain()\n"


def test_the_clock_of_a_pnode_is_wrong(dcnr: Dcnr, tmp_path: Path) -> None:
    """B43: 20 minutes ahead, 20 behind, and a jump of an hour. Its lease does not mind; the store does, and is not
    blamed."""
    clock = MovedClock("injected", tmp_path)
    with seaweed_server(tmp_path / "weed") as server:
        server.make_bucket("dcnr")
        dcnr.extra = dict(ENVIRONMENT)
        dcnr("up", "--pnodes", "1", "--store", server.url("dcnr", "runs"))
        address = dcnr.record()["address"]
        with (dcnr.home / "p2.out").open("wb") as out:
            p2 = subprocess.Popen(
                clock.command(PNODE, "--name", "p2", "--orchestrator", address, "--home", str(dcnr.home / "p2")),
                env={**dcnr.env, **clock.environment, **ENVIRONMENT}, stdout=out, stderr=out, cwd=dcnr.home,
            )  # fmt: skip
        dcnr.started.append(p2)

        def state() -> str:
            return next((node["state"] for node in dcnr.json("ps", "--pnodes") if node["pnode"] == "p2"), "")

        dcnr.wait_for(lambda: state() == "alive", 180)
        pinned = tmp_path / "pinned.yaml"  # each PNode has something to save
        text = (ROOT / "networks/mlp-digits.yaml").read_text().replace("name: mlp-digits", "name: pinned")
        pinned.write_text(text + "place: {fc1: p1, fc2: p2}\n")
        run = ["train", str(pinned), "--steps", "100", "--set", "train.checkpoint.every=5"]
        dcnr(*run, "--name", "calm", timeout=300)
        for name, minutes, side in (("fast", 20, "ahead of"), ("slow", -20, "behind")):
            clock.set(60 * minutes)
            dcnr("train", "gpt-char", "--pnodes", "2", "--steps", "2", "--name", name, "-d")
            said = f"the clock of p2 is off by ~20 min ({side} the store's)"
            dcnr.wait_for(lambda said=said, name=name: said in waits(dcnr, name), 120)  # type: ignore[misc]
            assert state() == "alive"
            clock.set(0)
            dcnr.wait_for(lambda name=name: dcnr.session(name)["state"] == "finished", 120)  # type: ignore[misc]
        dcnr(*run, "--name", "hit", "--until", "20")
        clock.set(3600)
        dcnr("resume", "hit", "-d")
        said = "the clock of p2 is off by ~60 min (ahead of the store's)"
        dcnr.wait_for(lambda: said in waits(dcnr, "hit"), 120)
        assert "timedatectl" in waits(dcnr, "hit")
        found = dcnr.session("hit")
        assert (found["state"], found["committed"], found["recoveries"], state()) == ("running", 20, 0, "alive")
        clock.set(0)
        dcnr.wait_for(lambda: dcnr.session("hit")["state"] == "finished", 120)
        assert dcnr.session("hit")["final_hash"] == dcnr.session("calm")["final_hash"]
        dcnr("down")
        p2.terminate()
        p2.wait(timeout=20)
