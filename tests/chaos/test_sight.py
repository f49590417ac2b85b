"""The watcher's judgement: what can't be is called a breach, what can be is not."""

from __future__ import annotations

import msgspec

from cli.chaos.sight import Sight
from wire.messages import SessionEvent, SessionInfo, StepReport


def info(step: int = 0, committed: int = 0, final_hash: str = "", epoch: int = 1, **extra: object) -> SessionInfo:
    usual = SessionInfo(
        session="run", network="net", state="running", epoch=epoch, step=step, steps=10, until=10, loss=0.0,
        tokens_s=0.0, committed=committed, pnodes=["p1"], created=0.0, error="", hint="", waiting=[], deployed=True,
        bit_exact="", final_hash=final_hash, eta_s=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(usual, **extra)


def steps(seq: int, *losses: tuple[int, float]) -> SessionEvent:
    return SessionEvent(
        seq, 0.0, "progress", "", losses[-1][0], [StepReport(s, v, 1, 0.0, 0.0, 0.0, 1, "") for s, v in losses]
    )


def test_an_ordinary_run_has_no_breach() -> None:
    sight = Sight()
    sight.take(info(), [], 1.0)
    sight.take(info(2, 2, "b"), [steps(1, (1, 0.5), (2, 0.4))], 2.0)
    sight.take(info(2, 2, "b", 2), [SessionEvent(2, 0.0, "placement", "", 1)], 3.0)
    sight.take(info(3, 3, "c", 2), [steps(3, (2, 0.4), (3, 0.3))], 4.0)
    assert sight.breaches == []
    assert (sight.highest, sight.redone, sight.moved, sight.still_s(6.0)) == (3, 1, 4.0, 2.0)
    assert sight.compare([0.5, 0.4, 0.3], "c", 3) == []
    assert sight.missing(4) == [4]


def test_each_breach_is_seen_once() -> None:
    sight = Sight()
    sight.take(info(2, 2, "b", 3), [steps(1, (1, 0.5), (2, 0.4))], 1.0)
    for _ in range(2):
        sight.take(info(1, 1, "a", 2), [steps(2, (2, 0.41))], 2.0)
    sight.take(info(2, 2, "B", 3), [], 3.0)
    assert len(sight.breaches) == 4
    text = "\n".join(sight.breaches)
    for word in ("step 2 had loss 0.4, then 0.41", "committed", "epoch 2 after epoch 3", "had hash b, then B"):
        assert word in text


def test_what_differs_from_the_undisturbed_run() -> None:
    sight = Sight()
    assert sight.compare([], "x", 1) == ["nothing was seen of the run"]
    sight.take(info(2, 2, "b", bit_exact="not bit-exact: threads 1→2"), [steps(1, (1, 0.5), (2, 0.4))], 1.0)
    found = sight.compare([0.5, 0.3, 0.2], "c", 3)
    assert len(found) == 4
    assert "1 losses differ, the first in step 2: 0.4, not 0.3" in found[-1]


def test_what_is_told_again_by_a_new_orchestrator_was_not_made_again() -> None:
    sight = Sight()
    sight.take(info(2), [steps(1, (1, 0.5), (2, 0.4))], 1.0)
    sight.take(info(2), [SessionEvent(1, 0.0, "placement", "", 0), steps(2, (1, 0.5))], 2.0, replay=True)
    assert (sight.redone, sight.breaches, sight.moved) == (0, [], 1.0)
