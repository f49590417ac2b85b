"""What `dcnr up` would start, and which options it takes, for clusters of which more or less still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cli import reviving
from cli.cluster import NOBODY, Cluster
from cli.processes import Process, birth_of
from cli.reviving import Done, Wanted
from wire.errors import DCNRError, UsageError


def process(name: str, alive: bool) -> Process:
    """This very process stands for one that runs."""
    return Process(name, os.getpid(), birth_of(os.getpid()) or "" if alive else "ended", "log")


def cluster(orchestrator: bool = True, **pnodes: bool) -> Cluster:
    members = tuple(process(name, alive) for name, alive in pnodes.items())
    return Cluster(Path("/h"), "file:///s", process("o", orchestrator), "tcp://127.0.0.1:7", members, 2)


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (None, ["p1", "p2", "p3"]),
        (3, ["p1", "p2", "p3"]),
        (2, ["p1", "p3"]),
        (5, ["p1", "p2", "p3", "p4", "p5"]),
    ],
)
def test_who_is_to_run(number: int | None, names: list[str]) -> None:
    assert reviving._names(cluster(p1=True, p2=False, p3=True), number) == names


def test_names_have_no_gaps_and_stay_in_order() -> None:
    assert reviving._names(cluster(p2=True, p10=True), 4) == ["p2", "p10", "p1", "p3"]


def test_what_runs_is_never_ended() -> None:
    with pytest.raises(UsageError, match="2 PNodes run in /h, and dcnr up ends none"):
        reviving._names(cluster(p1=True, p2=False, p3=True), 1)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Wanted(store="/elsewhere"), "--store file:///s"),
        (Wanted(threads=1), "--threads 2"),
        (Wanted(device="cuda"), "--device cpu"),
        (Wanted(lease_s=1.0), "--lease 10.0"),
        (Wanted(bind="tcp://127.0.0.1:8"), "--bind tcp://127.0.0.1:7"),
    ],
)
def test_a_running_cluster_keeps_its_options(wanted: Wanted, says: str) -> None:
    with pytest.raises(UsageError, match=f"runs with {says} "):
        reviving._agreed(cluster(p1=True), wanted)
    assert reviving._changed(cluster(p1=False), wanted) != cluster(p1=False)


def test_options_that_change_nothing_are_taken() -> None:
    same = Wanted(3, "file:///s", "tcp://127.0.0.1:0", 2, "cpu", 10.0)
    assert reviving._agreed(cluster(p1=True), same) == cluster(p1=True)
    assert reviving._agreed(cluster(p1=True), Wanted(threads=0)) == cluster(p1=True)


def test_an_address_in_use_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert not reviving._free(address)
        with pytest.raises(DCNRError, match="can't come back"):
            reviving._give_address_up(cluster(orchestrator=False, p1=True), [process("p1", True)])
        reviving._give_address_up(cluster(orchestrator=False), [])
    assert reviving._free(address)
    assert reviving._free("tcp://127.0.0.1:0")


def test_a_sentence_says_what_was_done() -> None:
    assert Done(["p1"], ["p2"], ["p4"]).sentence() == "started p2 again (had ended); added p4; left p1 alone"
    assert not NOBODY.alive()
