"""Codecs between real processes: verified against a rounding process, and the same hash again and after a kill."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.conftest import Dcnr

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_verify_finds_exactly_no_difference(dcnr: Dcnr, codec: str) -> None:
    found = dcnr.json(
        "verify", "mlp-digits", "--steps", "3", "--pnodes", "2", "--placements", "planner,random:1",
        "--set", f"train.codec={codec}",
    )  # fmt: skip
    assert found["good"]
    for run in found["runs"]:
        assert run["coded_edges"].keys() == {codec}
        assert run["bytes_crossed"] > 0
        assert [run[f"{kind}_difference"] for kind in ("loss", "gradient", "weight")] == [0.0, 0.0, 0.0]


TRAIN = ["train", "mlp-digits", "--pnodes", "2", "--steps", "40", "--set", "train.checkpoint.every=10"]
INT8 = ["--set", "train.codec=int8"]


def test_the_same_hash_again_and_after_a_kill(dcnr: Dcnr) -> None:
    dcnr("up", "--pnodes", "2", "--lease", "2")
    dcnr(*TRAIN, "--name", "plain")
    for name in ("coded", "again"):
        dcnr(*TRAIN, *INT8, "--name", name)
    plain, coded, again = (dcnr.session(name) for name in ("plain", "coded", "again"))
    assert plain["codecs"] == ""
    assert coded["codecs"].startswith("int8 on ")
    assert coded["codecs"] in dcnr("status")
    assert coded["codecs"] in dcnr("ps")
    assert again["final_hash"] == coded["final_hash"] != plain["final_hash"]

    dcnr(*TRAIN, *INT8, "--name", "killed", "--until", "17")
    assert len(dcnr.session("killed")["pnodes"]) == 2
    os.kill(dcnr.pids()["p2"], signal.SIGKILL)
    dcnr.wait_for(lambda: [node["state"] for node in dcnr.json("ps", "--pnodes")] == ["alive", "lost"])
    dcnr("resume", "killed")
    killed = dcnr.session("killed")
    assert killed["pnodes"] == ["p1"], "what was coded crosses nothing now"
    assert (killed["codecs"], killed["bit_exact"]) == (coded["codecs"], "")
    assert killed["final_hash"] == coded["final_hash"]
