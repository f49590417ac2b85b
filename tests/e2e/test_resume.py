"""Stop at step 17 of 40, kill everything with -9, start again, resume: as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Dcnr
from tests.seaweed import ENVIRONMENT, seaweed_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TRAIN = ["train", "cnn-digits", "--steps", "40", "--pnodes", "3", "--name", "run", "--set", "train.checkpoint.every=10"]


def ids_and_losses(dcnr: Dcnr, session: str) -> dict[int, tuple[str, float]]:
    """Digest of the sample ids, and the loss, of each step; a step that was made twice must be the same twice."""
    found: dict[int, tuple[str, float]] = {}
    for event in dcnr.events("logs", session, "--steps"):
        for report in event["steps"]:
            told = (report["ids_digest"], report["loss"])
            assert found.setdefault(report["step"], told) == told
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[int, Any], str]]:
    """What an uninterrupted run gives."""
    dcnr = Dcnr(tmp_path_factory.mktemp("undisturbed"))
    try:
        dcnr("up", "--pnodes", "3")
        dcnr(*TRAIN)
        yield ids_and_losses(dcnr, "run"), dcnr.session("run")["final_hash"]
        dcnr("down")
    finally:
        dcnr.close()


def killed_and_resumed(dcnr: Dcnr, *up: str) -> tuple[dict[int, Any], str]:
    """The same with a kill -9 of all daemons after step 17."""
    dcnr("up", "--pnodes", "3", *up)
    first = dcnr.events(*TRAIN, "--until", "17")
    assert first[-1]["verdict"] == "paused"
    assert first[-1]["step"] == 17
    before = ids_and_losses(dcnr, "run")
    dcnr.kill_everything()
    dcnr("up", "--pnodes", "3", *up)
    assert dcnr.session("run")["committed"] == 17
    events = dcnr.events("resume", "run")
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(18, 41))
    assert events[-1]["verdict"] == "finished"
    after = before | ids_and_losses(dcnr, "run")
    final = dcnr.session("run")
    assert final["bit_exact"] == ""
    dcnr("down")
    return after, final["final_hash"]


def test_local_disk(dcnr: Dcnr, undisturbed: tuple[dict[int, Any], str]) -> None:
    steps, final_hash = killed_and_resumed(dcnr)
    assert steps == undisturbed[0]
    assert final_hash == undisturbed[1]
    assert len(final_hash) == 64


def test_seaweedfs(dcnr: Dcnr, undisturbed: tuple[dict[int, Any], str], tmp_path: Path) -> None:
    with seaweed_server(tmp_path / "weed") as server:
        server.make_bucket("dcnr")
        dcnr.extra = dict(ENVIRONMENT)
        steps, final_hash = killed_and_resumed(dcnr, "--store", server.url("dcnr", "runs"))
    assert steps == undisturbed[0]
    assert final_hash == undisturbed[1]
