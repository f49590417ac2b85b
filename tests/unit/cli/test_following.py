"""Following a session, against a client that answers from a script."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from cli import following, runstate
from cli.client import Client
from cli.following import failure, follow
from cli.progress import JsonView, PlainView, view
from cli.terminal import Terminal
from tests.unit.cli.sessions import event, session
from wire.errors import UnreachableError
from wire.messages import SessionEvent, SessionInfo, WatchInfo


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


def watched(state: str, step: int, events: Sequence[SessionEvent] = (), term: int = 0, **more: Any) -> WatchInfo:
    return WatchInfo(session(state, step, **more), list(events), term)


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
    monkeypatch.setattr(runstate, "GIVE_UP_S", -1.0)
    with pytest.raises(UnreachableError, match="the run may go on without it") as caught:
        await run(Script(UnreachableError("no answer")))
    assert caught.value.hint == "dcnr attach gpt-1, once it is back"


async def test_an_orchestrator_that_comes_back_is_forgiven() -> None:
    _, last = await run(Script(UnreachableError("no answer"), watched("finished", 10)))
    assert last.state == "finished"


def test_a_failure_names_cause_and_next_step() -> None:
    problem = failure(session("failed", 7, error="fc1 gave inf", hint="lower the rate", committed=5))
    assert problem is not None
    assert problem.message == "gpt-1 failed at step 7: fc1 gave inf; step 5 is saved"
    assert problem.hint == "lower the rate"
    assert failure(session("finished", 10)) is None


async def test_a_loss_shows_what_is_made_again() -> None:
    script = Script(
        watched("running", 7, [event(1, "progress", "", *range(1, 8))]),
        watched("recovering", 7, [event(2, "state", "recovering: PNode p2 is lost")], error="PNode p2 is lost"),
        watched("starting", 5, [event(3, "placement", "epoch 2 on p1, from step 5", step=5)]),
        watched("running", 6, [event(4, "progress", "", 6)]),
        watched("finished", 10, [event(5, "progress", "", *range(7, 11)), event(6, "state", "finished")]),
    )
    text, _ = await run(script)
    lines = text.splitlines()
    assert lines[0].startswith("gpt-1  step 7/10  loss")
    assert "gpt-1  recovering: PNode p2 is lost" in lines
    assert any(line.startswith("gpt-1  step 6/10 (again, up to 7)  loss") for line in lines)
    assert any(line.startswith("gpt-1  step 10/10  loss") for line in lines)


async def test_json_marks_the_steps_that_are_made_again() -> None:
    out = io.StringIO()
    script = Script(
        watched("running", 7, [event(1, "progress", "", *range(1, 8))]),
        watched("running", 7, [event(1, "note", "taken over"), event(2, "progress", "", *range(4, 9))], term=2),
        watched("running", 7, [event(1, "note", "taken over"), event(2, "progress", "", *range(4, 9))], term=2),
        watched("running", 7, [], term=2),
        watched("recovering", 5, [event(3, "placement", "", step=5)], term=2, recoveries=1),
        watched("finished", 10, [event(4, "progress", "", *range(6, 11))], term=2, recoveries=1),
    )
    script.answers[0] = watched("running", 7, [event(1, "progress", "", *range(1, 8), time=99.0)], term=1)
    await follow(cast(Client, script), session("running"), JsonView(Terminal("json", stdout=out)))
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    steps = [(entry["step"], entry["again"]) for entry in told if entry["event"] == "step"]
    assert steps == [(n, False) for n in range(1, 9)] + [(6, True), (7, True), (8, True), (9, False), (10, False)]
    assert [entry["text"] for entry in told if entry["event"] == "note"] == ["taken over", ""]
    assert told[-1]["recoveries"] == 1


async def test_an_orchestrator_that_is_away_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "WAIT_S", 0.01)
    monkeypatch.setattr(runstate, "STALLED_S", 0.03)

    class Slow(Script):
        async def watch(self, name: str, after: int, wait_s: float, limit: int = 500) -> WatchInfo:
            if len(self.answers) == 2:
                await asyncio.sleep(0.1)
            return await super().watch(name, after, wait_s, limit)

    script = Slow(watched("running", 2), watched("running", 3), watched("finished", 10))
    text, last = await run(script)
    assert text.splitlines()[0] == "gpt-1  orchestrator away for 0 s (at most 15 min); training goes on without it"
    assert last.state == "finished"


@pytest.mark.parametrize("form", ["text", "json"])
async def test_the_failure_is_left_to_the_end(form: str) -> None:
    """It is said once: by the command's last lines, and in JSON by its note."""
    out = io.StringIO()
    terminal = Terminal("json" if form == "json" else "text", stdout=out)
    events = [
        event(1, "error", "an old one"),
        event(2, "state", "failed"),
        event(3, "error", "fc1 gave inf (lower it)"),
    ]
    await follow(
        cast(Client, Script(watched("failed", 7, events, error="fc1 gave inf"))), session("running"), view(terminal)
    )
    assert out.getvalue().count("fc1 gave inf") == (form == "json")
    assert out.getvalue().count("an old one") == 1
