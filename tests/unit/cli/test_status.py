"""`dcnr status`: who is not well, what recovers and why, and who waits for whom."""

from __future__ import annotations

import io

from cli.commands.status import _show_status
from cli.terminal import Terminal
from tests.unit.cli.sessions import session
from wire.messages import ClusterInfo, PeerRef, PNodeInfo, Profile


def pnode(name: str, state: str = "alive", health: str = "", seen_s: float = 0.1) -> PNodeInfo:
    profile = Profile("host", "cpu", 1, 1e9, 10**9, 1e9, 1e-4, "2.8", "x86", "0.1")
    return PNodeInfo(name, state, 1, PeerRef(name), profile, seen_s, ["gpt-1"], 3, 10**8, 0.001, "idle", health=health)


def shown(*sessions: object, pnodes: list[PNodeInfo] | None = None) -> str:
    out = io.StringIO()
    info = ClusterInfo("c", "0.1", 4, "file:///s", 0.0, 1)
    _show_status(Terminal(stdout=out), info, pnodes or [pnode("p1")], list(sessions))  # type: ignore[arg-type]
    return out.getvalue()


def test_pnodes_that_are_not_well_are_explained() -> None:
    text = shown(pnodes=[pnode("p1"), pnode("p2", health="its compute thread died"), pnode("p3", "suspect", "", 12.4)])
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.startswith("p") and "GFLOP" in line}
    assert rows == {"p1": "alive", "p2": "unhealthy", "p3": "suspect"}
    assert "p2 is unhealthy: its compute thread died; it gets no VNodes until it is started anew" in text
    assert "p3 is suspected: no sign of life for 12 s" in text


def test_a_recovery_says_its_cause_and_what_is_made_again() -> None:
    waits = ["PNodes: room for 2 VNodes, for 4 s (at most 3600 s)"]
    told = session("recovering", 7, error="PNode p2 is lost", committed=5, epoch=2, recoveries=1, waiting=waits)
    text = shown(told)
    assert "gpt-1 recovers: PNode p2 is lost\n" in text
    assert "from step 5" in text
    assert "steps 6 to 7 will be made again" in text
    assert "gpt-1 waits for PNodes: room for 2 VNodes, for 4 s (at most 1 h)\n" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("gpt-1  "))
    assert row == ["gpt-1", "recovering", "2", "7/10", "5", "1", "p1"]


def test_sessions_at_rest_are_left_out_unless_deployed() -> None:
    def states(text: str) -> list[str]:
        return [line.split()[1] for line in text.splitlines() if line.startswith("gpt-1 ")]

    assert states(shown(session("finished", 10, deployed=False))) == []
    assert states(shown(session("finished", 10))) == ["finished"]


def test_a_pnode_without_vnodes_is_an_offer() -> None:
    idle = PNodeInfo(**{**{f: getattr(pnode("p4"), f) for f in PNodeInfo.__struct_fields__}, "vnodes": 0})
    text = shown(session("running", 3), pnodes=[pnode("p1"), idle])
    assert "p4 has no VNodes\nnext: dcnr rebalance gpt-1\n" in text
    assert "no VNodes" not in shown(session("finished", 10), pnodes=[pnode("p1"), idle])
    assert "no VNodes" not in shown(session("running", 3))
