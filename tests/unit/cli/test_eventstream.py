"""Events come once and in order, also when another orchestrator counts them, with its disk or without."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cli.eventstream import PAGE, EventStream, Steps
from tests.unit.cli.sessions import event, report, session
from wire.messages import SessionEvent, WatchInfo


@dataclass
class Orchestrator:
    """The log of one session, and what of it is on the disk."""

    term: int = 1
    events: list[SessionEvent] = field(default_factory=list)
    flushed: int = 0
    clock: float = 0.0
    everything: list[SessionEvent] = field(default_factory=list)
    asked: int = 0

    def log(self, kind: str = "note", *steps: int) -> SessionEvent:
        self.clock += 1.0
        number = self.events[-1].seq + 1 if self.events else 1
        made = event(number, kind, f"at {self.clock}", *steps, time=self.clock)
        self.events.append(made)
        self.everything.append(made)
        return made

    def restart(self, *, wiped: bool = False) -> None:
        """Another one takes over from what is on the disk."""
        self.term += 1
        self.events = [] if wiped else self.events[: self.flushed]
        self.flushed = len(self.events)

    async def watch(self, name: str, after: int, wait_s: float, limit: int = PAGE) -> WatchInfo:
        self.asked += 1
        found = [entry for entry in self.events if entry.seq > after]
        return WatchInfo(session("running"), found[:limit], self.term)


async def test_a_count_that_goes_on_is_read_on() -> None:
    orchestrator = Orchestrator()
    stream = EventStream(orchestrator, "gpt-1")
    first = [orchestrator.log(), orchestrator.log()]
    assert (await stream.next(0))[1] == first
    assert (await stream.next(0))[1] == []
    later = orchestrator.log()
    orchestrator.flushed = 3
    orchestrator.restart()
    assert (await stream.next(0))[1] == [later]


async def test_numbers_that_are_used_again_are_other_events() -> None:
    """What the last one had not flushed is gone, and its numbers are given to other events."""
    orchestrator = Orchestrator()
    stream = EventStream(orchestrator, "gpt-1")
    for _ in range(5):
        orchestrator.log()
    await stream.next(0)
    orchestrator.flushed = 3
    orchestrator.restart()
    fresh = [orchestrator.log(), orchestrator.log()]
    assert [entry.seq for entry in fresh] == [4, 5]
    assert (await stream.next(0))[1] == fresh


@pytest.mark.parametrize("before", [1, 700, 2000])
async def test_a_wiped_disk_counts_from_one(before: int) -> None:
    orchestrator = Orchestrator()
    stream = EventStream(orchestrator, "gpt-1")
    for _ in range(before):
        orchestrator.log()
    await stream.past()
    orchestrator.restart(wiped=True)
    fresh = [orchestrator.log() for _ in range(3)]
    assert (await stream.next(0))[1] == fresh
    fresh = [orchestrator.log() for _ in range(3)]
    assert (await stream.next(0))[1] == fresh


@pytest.mark.parametrize("seed", range(100))
async def test_each_event_once_whatever_is_killed(seed: int) -> None:
    draw = random.Random(seed)
    print("seed", seed)
    orchestrator = Orchestrator()
    stream = EventStream(orchestrator, "gpt-1")
    got: list[SessionEvent] = []
    for _ in range(60):
        match draw.choice(("log", "log", "flush", "read", "read", "restart", "wipe" if draw.random() < 0.3 else "log")):
            case "log":
                for _ in range(draw.choice((1, 3, 200))):
                    orchestrator.log()
            case "flush":
                orchestrator.flushed = len(orchestrator.events)
            case "read":
                got += (await stream.next(0))[1]
            case other:
                lost = orchestrator.events[orchestrator.flushed if other == "restart" else 0 :]
                orchestrator.restart(wiped=other == "wipe")
                gone = {entry.time for entry in lost} - {entry.time for entry in got}
                orchestrator.everything = [entry for entry in orchestrator.everything if entry.time not in gone]
    got += (await stream.past())[1]
    assert got == orchestrator.everything


def test_steps_that_are_told_twice_count_once() -> None:
    steps = Steps()
    assert [one.step for one in steps.fresh([report(4), report(5)])] == [4, 5]
    assert [one.step for one in steps.fresh([report(4), report(5), report(6)])] == [6]
    assert steps.again_to == 0


def test_steps_made_again_are_told_again() -> None:
    steps = Steps()
    steps.fresh([report(number) for number in range(1, 18)])
    steps.back_to(10)
    assert [one.step for one in steps.fresh([report(11), report(12)])] == [11, 12]
    assert steps.again_to == 17
    steps.back_to(10)
    assert steps.again_to == 17
    assert [one.step for one in steps.fresh([report(11)])] == [11]
