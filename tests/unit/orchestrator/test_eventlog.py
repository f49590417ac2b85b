"""The event log: numbered, bounded, thinned."""

from __future__ import annotations

import itertools

from orchestrator.eventlog import MAX_EVENTS, MAX_STEPS, MAX_TEXT, WHOLE_STEPS, EventLog
from wire.messages import StepReport


def reports(first: int, count: int) -> list[StepReport]:
    return [StepReport(step, 1.0, 1, 1.0, 0.1, 0.1, 1, "") for step in range(first, first + count)]


def test_events_are_numbered_and_read_from_a_place() -> None:
    log = EventLog()
    for step in range(10):
        log.append("note", f"line {step}", step, float(step))
    assert [event.seq for event in log.after(0, 3)] == [1, 2, 3]
    assert [event.seq for event in log.after(8, 100)] == [9, 10]
    assert log.after(10, 100) == []
    assert log.last == 10
    again = EventLog(log.after(0, 100))
    assert again.append("note", "", 0, 0.0).seq == 11


def test_only_what_is_new_is_saved() -> None:
    log = EventLog()
    log.append("note", "a", 0, 0.0)
    assert [event.text for event in log.unsaved()[1]] == ["a"]
    assert log.unsaved() == (False, [])
    log.append("note", "b", 0, 0.0)
    assert [event.text for event in log.unsaved()[1]] == ["b"]


def test_a_long_run_keeps_its_whole_course_and_its_newest_steps() -> None:
    log = EventLog()
    step = 1
    log.append("state", "running", 0, 0.0)
    while step < 100_000:
        log.append("progress", "", step + 9, 0.0, reports(step, 10))
        step += 10
    log.append("state", "finished", step, 0.0)
    events = log.after(0, 10**6)
    seen = [report.step for event in events for report in event.steps]
    assert seen == sorted(set(seen))
    assert len(seen) <= MAX_STEPS
    assert seen[-WHOLE_STEPS:] == list(range(step - WHOLE_STEPS, step))
    assert seen[0] < 100
    assert max(after - before for before, after in itertools.pairwise(seen)) < 150
    assert [event.text for event in events if event.kind == "state"] == ["running", "finished"]
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    assert len(events) < 1000
    rewrite, all_events = log.unsaved()
    assert rewrite
    assert all_events == events


def test_two_thousand_steps_are_kept_whole() -> None:
    log = EventLog()
    for step in range(1, 2001):
        log.append("progress", "", step, 0.0, reports(step, 1))
    assert sum(len(event.steps) for event in log.after(0, 10**6)) == 2000


def test_other_events_are_bounded_too() -> None:
    log = EventLog()
    for step in range(5 * MAX_EVENTS):
        log.append("warning", "x" * (2 * MAX_TEXT), step, 0.0)
    assert len(log) <= MAX_EVENTS
    assert log.after(0, 1)[0].seq > 3 * MAX_EVENTS
    assert len(log.after(0, 1)[0].text) == MAX_TEXT
