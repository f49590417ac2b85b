"""`dcnr orchestrator` and `dcnr pnode` in the foreground, as on machines of one's own; contexts lead to them."""

from __future__ import annotations

import json
import signal

import pytest

from tests.e2e.conftest import Dcnr

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_cluster_by_hand(dcnr: Dcnr) -> None:
    log = dcnr.home / "log"
    with log.open("wb") as sink:
        orchestrator = dcnr.start("orchestrator", "--bind", "tcp://127.0.0.1:0", stdout=sink)
        ready = dcnr.home / "orchestrator.json"
        dcnr.wait_for(ready.exists)
        address = json.loads(ready.read_text())["address"]
        pnode = dcnr.start("pnode", "--name", "box", "--orchestrator", address, stdout=sink)

        def joined() -> bool:
            found = dcnr.json("status", "--orchestrator", address)["pnodes"]
            return [(node["pnode"], node["state"]) for node in found] == [("box", "alive")]

        dcnr.wait_for(joined)
        dcnr("context", "use", "mine", address)
        assert dcnr.json("status")["pnodes"][0]["pnode"] == "box"
        findings = {entry["what"]: entry["state"] for entry in dcnr.json("doctor")}
        assert findings["orchestrator"] == findings["store"] == findings["PNode box"] == "ok"
        done = dcnr.run("train", "mlp-digits", "--steps", "3", "--orchestrator", "127.0.0.1:1")
        assert done.returncode == 69
        assert dcnr.events("train", "mlp-digits", "--steps", "3")[-1]["verdict"] == "finished"
        for child in (pnode, orchestrator):
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=15) == 0, log.read_text()[-2000:]
    assert "Traceback" not in log.read_text()
