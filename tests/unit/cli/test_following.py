"""Following a session, against a client that answers from a script."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from cli import following
from cli.client import Client
from cli.following import failure, follow
from cli.progress import PlainView
from cli.terminal import Terminal
from wire.errors import UnreachableError
from wire.messages import SessionEvent, SessionInfo, StepReport, WatchInfo


def session(state: str, step: int = 0, **more: Any) -> SessionInfo:
    fields = {"loss": math.nan, "tokens_s": 0.0, "committed": 0, "error": "", "hint": "", "waiting": [], **more}
    return SessionInfo(
        session="gpt-1", network="gpt", state=state, epoch=1, step=step, steps=10, until=0, pnodes=["p1"], created=0.0,
        deployed=True, bit_exact="", final_hash="", eta_s=0.0, **fields,
    )  # fmt: skip


def event(seq: int, kind: str, text: str = "", *steps: int) -> SessionEvent:
    reports = [StepReport(step, 1.0, 10, 0.1, 1e-3, 0.1, 1, "") for step in steps]
    return SessionEvent(seq, 0.0, kind, text, max(steps, default=0), reports)


class Script:
    """Answers to `watch`, in order; an exception is raised."""

    address = "tcp://x:1"

    def __init__(self, *answers: WatchInfo | Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.idle = asyncio.Event()

    async def watch(self, name: str, after: int, wait_s: float, limit: int = 500) -> WatchInfo:
        self.asked.append(after)
        if not self.answers:
            self.idle.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


async def run(script: Script, **options: Any) -> tuple[str, SessionInfo]:
    out = io.StringIO()
    lines = PlainView(Terminal(stdout=out), 0.0)
    followed = await follow(cast(Client, script), session("running"), lines, **options)
    return out.getvalue(), followed.session


def watched(state: str, step: int, events: Sequence[SessionEvent] = (), **more: Any) -> WatchInfo:
    return WatchInfo(session(state, step, **more), list(events))


async def test_it_shows_steps_until_the_session_rests() -> None:
    script = Script(
        watched("running", 2, [event(1, "state", "running"), event(2, "progress", "", 1, 2)]),
        watched("finished", 10, [event(3, "progress", "", *range(3, 11)), event(4, "state", "finished")]),
    )
    text, last = await run(script)
    assert script.asked == [0, 2]
    assert "step 2/10" in text
    assert "finished at step 10/10" in text
    assert last.state == "finished"


async def test_attaching_does_not_replay_what_is_past() -> None:
    script = Script(
        watched("running", 5, [event(1, "note", "an old note"), event(2, "progress", "", 5)]),
        watched("running", 5),
        watched("finished", 6, [event(3, "progress", "", 6)]),
    )
    text, _ = await run(script, replay=False)
    assert "an old note" not in text
    assert "step 6/10" in text


async def test_cancelling_writes_the_last_state() -> None:
    out = io.StringIO()
    script = Script(watched("running", 3, [event(1, "progress", "", 1, 2, 3)]))
    lines = PlainView(Terminal(stdout=out), 1000.0)
    task = asyncio.create_task(follow(cast(Client, script), session("running"), lines))
    await script.idle.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert out.getvalue().endswith("detached at step 3/10\n")


async def test_an_orchestrator_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "GIVE_UP_S", -1.0)
    with pytest.raises(UnreachableError, match="the run may go on") as caught:
        await run(Script(UnreachableError("no answer")))
    assert caught.value.hint == "dcnr attach gpt-1"


async def test_an_orchestrator_that_comes_back_is_forgiven() -> None:
    _, last = await run(Script(UnreachableError("no answer"), watched("finished", 10)))
    assert last.state == "finished"


def test_a_failure_names_cause_and_next_step() -> None:
    problem = failure(session("failed", 7, error="fc1 gave inf", hint="lower the rate", committed=5))
    assert problem is not None
    assert problem.message == "gpt-1 failed at step 7: fc1 gave inf; step 5 is saved"
    assert problem.hint == "lower the rate"
    assert failure(session("finished", 10)) is None
