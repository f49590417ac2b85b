"""PNodes that reach the store through the storage service alone, as `dcnr up --store-service` starts them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.conftest import Dcnr

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 100
RUN = [
    "train", "gpt-char", "--pnodes", "3", "--steps", str(STEPS), "--set", "train.checkpoint.every=5",
    "--set", "vars.d=32", "--set", "train.batch=4",
]  # fmt: skip


def test_the_service_is_killed_while_a_run_trains(dcnr: Dcnr) -> None:
    """Three PNodes that know no other store train; the run waits for the service, goes on, and ends with the hash."""
    dcnr("up", "--pnodes", "3", "--store-service")
    record = dcnr.record()
    url = record["storage_address"].replace("tcp:", "dcnr:")
    assert dcnr.json("status")["cluster"]["store"] == url
    dcnr(*RUN, "--name", "calm")
    dcnr(*RUN, "--name", "hit", "-d")
    dcnr.wait_for(lambda: dcnr.session("hit")["committed"] >= 5)
    os.kill(record["storage"]["pid"], signal.SIGKILL)

    def waits() -> str:
        lines = dcnr("status").splitlines()
        return "\n".join(line for line in lines if "waits for store" in line)

    dcnr.wait_for(lambda: "the storage service has given nothing" in waits(), 120)
    assert dcnr.session("hit")["state"] == "running"
    dcnr("up")  # starts what has ended, at its old address
    assert dcnr.record()["storage_address"] == record["storage_address"]
    dcnr.wait_for(lambda: dcnr.session("hit")["state"] == "finished", 120)
    calm, hit = dcnr.session("calm"), dcnr.session("hit")
    assert (hit["step"], hit["recoveries"], hit["final_hash"]) == (STEPS, 0, calm["final_hash"])
    dcnr("down")
