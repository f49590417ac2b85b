"""A cluster with keys, as a person makes it: one command prints another, and who was not asked stays out."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wire.keys import load
from wire.tokens import read_token

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


class Cluster:
    """The processes of one test, each with a home folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str, given: str = "") -> subprocess.Popen[bytes]:
        """A daemon; what it writes is in `<name>.out` and `<name>.err`."""
        with open(self.folder / f"{name}.out", "wb") as out, open(self.folder / f"{name}.err", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *arguments, "--home", str(self.folder / name)],
                stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(given.encode())
        process.stdin.close()
        self.running.append(process)
        return process

    def dcnr(self, *arguments: str, home: str = "chief", code: int = 0) -> str:
        """A command that ends; its output."""
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments, "--home", str(self.folder / home)],
            capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ask(self, *arguments: str) -> Any:
        """A command's answer for programs."""
        done = self.dcnr(*arguments, "--output", "json")
        return json.JSONDecoder().raw_decode(done)[0]

    def said(self, name: str, kind: str = "out") -> str:
        return (self.folder / f"{name}.{kind}").read_text()

    def chief(self) -> str:
        """An orchestrator with keys; its token."""
        self.start("chief", "orchestrator", "--bind", "tcp://127.0.0.1:0", "--keys")
        until(lambda: "--join" in self.said("chief"))
        [token] = re.findall(r"dcnr pnode --join (\S+)", self.said("chief"))
        return token

    def members(self, state: str = "alive") -> set[str]:
        found = self.ask("status")
        return {pnode["pnode"] for pnode in found["pnodes"] if pnode["state"] == state}

    def session(self, name: str) -> Any:
        return next(session for session in self.ask("ps") if session["session"] == name)

    def step(self, name: str) -> int:
        return int(self.session(name)["step"])

    def state(self, name: str) -> str:
        return str(self.session(name)["state"])

    def relays(self) -> set[str]:
        """Who has joined others' streams so far."""
        logs = {log.parent.name: log.read_text() for log in self.folder.glob("r*/r*/*.log")}
        return {name for name, text in logs.items() if '"relays"' in text}

    def kill(self, name: str) -> None:
        process = next(process for process in self.running if f"--name {name} " in " ".join(map(str, process.args)))
        process.kill()
        process.wait()

    def end(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGKILL)
            process.wait()


def until(condition: Callable[[], object], timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def test_a_pnode_joins_by_the_printed_command_trains_and_is_out_once_revoked(cluster):
    token = cluster.chief()
    secret = read_token(token).pair.secret.reveal()
    one = cluster.start("m1", "pnode", "--name", "p1", "--join", token, "--bind", "tcp://127.0.0.1:0", "--threads", "1")
    cluster.start("m2", "pnode", "--name", "p2", "--join", "-", "--dial-only", "--threads", "1", given=token + "\n")
    until(lambda: cluster.members() == {"p1", "p2"})

    # secrets stay where they belong
    arguments = Path(f"/proc/{one.pid}/cmdline")
    if arguments.exists():
        assert b"--joined" in arguments.read_bytes()
        assert secret.encode() not in arguments.read_bytes()
        assert b"dcnr1:" not in arguments.read_bytes()
    kept = [file for file in cluster.folder.rglob("*") if file.is_file() and file.name != "chief.out"]
    assert not [file for file in kept if secret.encode() in file.read_bytes() or b"dcnr1:" in file.read_bytes()]
    for key in ("chief", "chief/client", "m1/p1", "m2/p2"):
        pair = load(cluster.folder / key)
        assert pair is not None
        own = cluster.folder / key / "keys"
        holders = [file for file in kept if pair.secret.reveal().encode() in file.read_bytes()]
        assert holders == [own / "curve.key"]
        assert [stat.S_IMODE(place.stat().st_mode) for place in (own, *own.iterdir())] == [0o700] + [0o600] * (
            1 if "/" not in key or "client" in key else 2
        )

    # a session across both, one of which can only dial
    cluster.dcnr("train", "mlp-digits", "--pnodes", "2", "--set", "train.steps=20")
    [session] = cluster.ask("ps")
    assert session["state"] == "finished"
    assert sorted(session["pnodes"]) == ["p1", "p2"]

    # revoked: lost at once, and not let in again, not by its old token either
    cluster.dcnr("node", "revoke", "p2")
    until(lambda: "p2" in cluster.members("lost"), 30)
    listed = cluster.ask("node", "ls")
    assert {entry["id"] for entry in listed if entry["role"] == "pnode"} == {"p1"}
    until(lambda: "refuses this process's key" in cluster.said("m2") + cluster.said("m2", "err"), 60)
    assert "refused" in cluster.said("chief", "err")
    assert cluster.members() == {"p1"}


def test_two_that_can_only_dial_train_through_a_third_which_is_replaced_when_it_ends(cluster):
    token = cluster.chief()
    for name in ("r1", "r2"):
        cluster.start(name, "pnode", "--name", name, "--join", token, "--bind", "tcp://127.0.0.1:0", "--threads", "1")
    for name in ("p1", "p2"):
        cluster.start(name, "pnode", "--name", name, "--join", token, "--dial-only", "--threads", "1")
    until(lambda: cluster.members() == {"p1", "p2", "r1", "r2"})
    network = cluster.folder / "hidden.yaml"
    text = (ROOT / "networks" / "mlp-digits.yaml").read_text().replace("name: mlp-digits", "name: hidden")
    network.write_text(text + "place: {fc1: p1, fc2: p2}\n")
    cluster.dcnr("train", str(network), "--pnodes", "2", "--steps", "20", "--name", "first")
    assert cluster.relays(), "nothing was relayed"
    cluster.dcnr("train", str(network), "--pnodes", "2", "--steps", "1500", "--name", "second", "--detach")
    until(lambda: cluster.step("second") > 100)
    [relay] = cluster.relays()
    cluster.kill(relay)
    until(lambda: cluster.state("second") == "finished")
    assert cluster.relays() == {"r1", "r2"}
    for session in cluster.ask("ps"):
        assert (session["state"], sorted(session["pnodes"])) == ("finished", ["p1", "p2"])


def test_a_token_for_one_use_lets_one_in_and_names_the_reason_to_the_next(cluster):
    cluster.chief()
    made = cluster.dcnr("node", "invite", "--client")
    [token] = re.findall(r"dcnr context join NAME (\S+)", made)
    cluster.dcnr("context", "join", "lab", token, home="laptop")
    assert "no PNodes" in cluster.dcnr("status", home="laptop")
    assert "no PNodes" in cluster.dcnr("status", home="laptop")
    refused = cluster.dcnr("context", "join", "lab", token, home="other", code=1)
    assert "this token was used already" in refused
    assert token not in refused
    pnode_token = re.findall(r"--join (\S+)", cluster.dcnr("node", "invite"))[0]
    assert "is for a PNode" in cluster.dcnr("context", "join", "lab", pnode_token, home="other", code=2)
    address = json.loads((cluster.folder / "chief" / "orchestrator.json").read_text())["address"]
    stranger = cluster.dcnr("status", "--orchestrator", address, "--timeout", "3", home="stranger", code=69)
    assert "one side has keys and the other has none" in stranger


def test_an_open_address_needs_keys(cluster):
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.main", "--bind", "tcp://0.0.0.0:0", "--home", str(cluster.folder / "x")],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there are no keys (dcnr keys makes them" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    cluster.dcnr("keys", home="x")
    assert (cluster.folder / "x" / "keys" / "curve.key").exists()
