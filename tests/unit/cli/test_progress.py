"""How a run is shown, without a terminal and as JSON."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest

from cli import progress
from cli.progress import JsonView, PlainView, note_lines, sparkline, view
from cli.runstate import Course, RunState
from cli.terminal import Terminal
from wire.messages import StepReport


def step(number: int, loss: float = 2.0) -> StepReport:
    return StepReport(number, loss, 768, 0.5, 1e-3, 0.1, 12, "")


def shown(form: str = "text") -> tuple[io.StringIO, Terminal]:
    out = io.StringIO()
    return out, Terminal("json" if form == "json" else "text", stdout=out)


def test_state_adds_up() -> None:
    state = RunState("gpt-1", 100)
    assert math.isnan(state.eta_s)
    state.take([step(1), step(2)])
    assert state.step == 2
    assert state.rate == pytest.approx(7680)
    assert state.eta_s == pytest.approx(9.8)


def test_plain_lines_come_at_their_interval_and_at_the_end() -> None:
    out, terminal = shown()
    lines, state = PlainView(terminal, 1000.0), RunState("gpt-1", 4)
    lines.begin(state)
    for number in (1, 2, 3, 4):
        state.take([step(number)])
        lines.steps(state, [step(number)])
    lines.end(state, "finished")
    got = out.getvalue().splitlines()
    assert [line.split("  ")[1] for line in got] == ["step 1/4", "step 4/4", "finished at step 4/4"]
    assert "loss 2.0000" in got[0]
    assert "7.68k tokens/s" in got[0]
    assert "\x1b" not in out.getvalue()


def test_the_last_state_is_written_even_between_intervals() -> None:
    out, terminal = shown()
    lines, state = PlainView(terminal, 1000.0), RunState("gpt-1", 100)
    for number in (1, 2, 3):
        state.take([step(number)])
        lines.steps(state, [step(number)])
    lines.end(state, "detached")
    assert "step 3/100" in out.getvalue()
    assert out.getvalue().endswith("detached at step 3/100\n")


def test_a_stall_says_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out, terminal = shown()
    lines, state = PlainView(terminal, 5.0), RunState("gpt-1", 100, state="running")
    state.waiting = ["p2: commit of step 17"]
    lines.idle(state)
    assert out.getvalue() == ""
    now = 112.0
    lines.idle(state)
    lines.idle(state)
    assert out.getvalue() == "gpt-1  no progress for 12 s, waiting for p2: commit of step 17\n"
    now = 123.0
    lines.idle(state)
    assert len(out.getvalue().splitlines()) == 2


def test_json_lines_are_objects_with_stable_keys() -> None:
    out, terminal = shown("json")
    lines, state = view(terminal), RunState("gpt-1", 2)
    assert isinstance(lines, JsonView)
    lines.begin(state)
    state.take([step(1), step(2, math.inf)])
    lines.steps(state, [step(1), step(2, math.inf)])
    lines.note(state, "warning", "x\x1b")
    lines.end(state, "failed")
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "note", "end"]
    assert [event["again"] for event in events[1:3]] == [False, False]
    assert events[1]["loss"] == 2.0
    assert events[2]["loss"] is None
    assert all({"session", "step", "steps"} <= event.keys() for event in events)
    assert "\x1b" not in out.getvalue()


def test_the_keys_of_json_lines_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = page.partition("| event | keys |")[2].partition("\n\n")[0]
    told = {}
    for line in table.splitlines():
        if match := re.match(r"\| `(\w+)` \| (.*) \|$", line):
            told[match[1]] = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", match[2])))
    out, terminal = shown("json")
    lines, state = JsonView(terminal), RunState("gpt-1", 10, state="running", waiting=["p2: hold, for 9 s"])
    lines.begin(state)
    lines.steps(state, state.take([step(1)]))
    lines.note(state, "warning", "x")
    state.moved -= 9
    lines.idle(state)
    lines.end(state, "finished")
    for event in map(json.loads, out.getvalue().splitlines()):
        assert event.keys() - {"event"} == told[event["event"]], event["event"]


def test_the_course_of_a_long_run_stays_bounded() -> None:
    course = Course()
    for number in range(100_000):
        course.add(float(number))
        course.add(math.nan)
    assert len(course.means) < Course.LIMIT
    assert course.means == sorted(course.means)
    assert course.means[0] == pytest.approx((course.each - 1) / 2)


def test_sparkline() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(100)), 10)) == 10


def test_a_run_shows_where_it_runs_and_leaves_the_reasons_to_the_log() -> None:
    assert note_lines("placement", "epoch 1 on p1 (2 VNodes)\nwhy") == ["epoch 1 on p1 (2 VNodes)"]
    assert note_lines("state", "running") == []
    assert note_lines("state", "running: again") == ["running: again"]
    assert note_lines("error", "p2 is lost\nhow") == ["error: p2 is lost", "  how"]


@pytest.mark.parametrize(
    ("state", "waiting", "shown"),
    [
        ("running", ["p2: start, for 3 s"], ["no progress for 9 s, waiting for p2: start, for 3 s"]),
        (
            "running",
            ["p1 waits for p2: activation, for 3 s"],
            ["no progress for 9 s: p1 waits for p2: activation, for 3 s"],
        ),
        (
            "running",
            ["store: commit of step 5, for 3 s", "p1 waits for p2: activation, for 3 s"],
            [
                "no progress for 9 s:",
                "waiting for store: commit of step 5, for 3 s",
                "p1 waits for p2: activation, for 3 s",
            ],
        ),
        ("running", [], ["no progress for 9 s: running; nobody is overdue yet"]),
        ("failed", ["p2: start"], []),
    ],
)
def test_why_nothing_moves_reads_as_a_sentence(state: str, waiting: list[str], shown: list[str]) -> None:
    run = RunState("gpt-1", 10, state=state, waiting=waiting)
    run.moved -= 9
    assert run.stall() == shown


def test_a_silent_orchestrator_is_said_to_be_silent() -> None:
    run = RunState("gpt-1", 10, state="running")
    run.moved -= 9
    run.heard = run.moved
    assert run.stall() == ["orchestrator away for 9 s (at most 15 min); training goes on without it"]
    run.state = "recovering"
    assert run.stall() == ["orchestrator away for 9 s (at most 15 min)"]


def test_a_recovery_says_why_and_who_is_waited_for() -> None:
    cause = "PNode p2 is lost: no sign of life for 15 s (its last report was 16 s ago): its process ended"
    run = RunState("gpt-1", 10, state="recovering", cause=cause)
    run.waiting = ["p1: prepare its VNodes, for 2 s (at most 180 s)"]
    assert run.stall() == [], "the change of state was told just now"
    run.changed -= 4
    assert run.stall() == [
        "recovering for 4 s: PNode p2 is lost: no sign of life for 15 s",
        "waiting for p1: prepare its VNodes, for 2 s (at most 180 s)",
    ]


def test_somebody_else_is_named_soon_but_not_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out, terminal = shown()
    lines, state = PlainView(terminal, 5.0), RunState("gpt-1", 100, state="running", waiting=["p2: hold, for 4 s"])
    for now in (104.0, 105.0, 106.5):  # noqa: B007
        lines.idle(state)
    assert len(out.getvalue().splitlines()) == 1
    state.waiting = ["store: commit of step 7, for 1 s"]
    lines.idle(state)
    assert out.getvalue().splitlines()[1:] == [
        "gpt-1  no progress for 6 s, waiting for store: commit of step 7, for 1 s"
    ]
