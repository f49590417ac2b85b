"""The order in which a stage works, as data: `F0 F1 B0 F2 B1 B2 U`. Pure.

`F3` is the forward pass of microbatch 3, `B3` its backward pass, `U` the update that ends the step. Invariants:

- Each kind runs in ascending order of microbatch; `U` is last and there is one.
- At most `window` microbatches are between their F and their B (1F1B). The window of a stage is
  min(M, levels - level + 1), which keeps P + 1 microbatches in flight so that the wire's time is hidden, and 1 on the
  last level. Levels grow along every channel, so windows never grow along one: no stage can ask for a forward that
  its source holds back, and the schedules can't deadlock. `prove` checks exactly that by carrying them out.
- A stage without gradients runs forward only; its window then bounds the hops that are not answered yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from networks.stages import Channel, StagePlan
from pnode.flow import GradientFlow
from wire.errors import MisuseError


class Kind(Enum):
    """What a stage does next."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a schedule; `microbatch` is -1 for the update."""

    kind: Kind
    microbatch: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.kind is Kind.UPDATE else f"{self.kind.value}{self.microbatch}"


Schedule = tuple[Action, ...]


class ScheduleError(MisuseError):
    """A schedule that can't be read or can't end."""


def window(level: int, levels: int, microbatches: int) -> int:
    """Microbatches in flight at a stage of this level."""
    return 1 if level >= levels - 1 else min(microbatches, levels - level + 1)


def one_forward_one_backward(microbatches: int, window: int) -> Schedule:
    """`window` forwards, then a backward and a forward in turn, then the rest of the backwards, then the update."""
    if not 1 <= window <= microbatches:
        raise ScheduleError(f"a window of {window} does not fit {microbatches} microbatches")
    actions = [Action(Kind.FORWARD, m) for m in range(window)]
    for m in range(microbatches):
        actions.append(Action(Kind.BACKWARD, m))
        if m + window < microbatches:
            actions.append(Action(Kind.FORWARD, m + window))
    return (*actions, Action(Kind.UPDATE))


def forward_only(microbatches: int) -> Schedule:
    """All forwards, then the update: for a stage that no gradient reaches."""
    return (*(Action(Kind.FORWARD, m) for m in range(microbatches)), Action(Kind.UPDATE))


def make_schedules(plan: StagePlan, flow: GradientFlow, microbatches: int) -> dict[int, Schedule]:
    """The schedule of every stage of a plan."""
    return {
        stage.index: one_forward_one_backward(microbatches, window(stage.level, plan.levels, microbatches))
        if stage.index in flow.stages
        else forward_only(microbatches)
        for stage in plan.stages
    }


def format_schedule(schedule: Iterable[Action]) -> str:
    """`F0 F1 B0 …`; read back by `parse_schedule`."""
    return " ".join(str(action) for action in schedule)


def parse_schedule(text: str) -> Schedule:
    """Read a printed schedule and check its rules.

    Raises `ScheduleError` naming the entry and its position.
    """
    found: list[Action] = []
    following = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
    for place, word in enumerate(text.split(), 1):
        match = re.fullmatch(r"([FB])(0|[1-9][0-9]{0,8})|U", word)
        if match is None:
            raise ScheduleError(f"entry {place} {word!r}: expected F<n>, B<n> or U")
        if found and found[-1].kind is Kind.UPDATE:
            raise ScheduleError(f"entry {place} {word!r} comes after U, which ends the step")
        if word == "U":
            found.append(Action(Kind.UPDATE))
            continue
        kind, microbatch = Kind(match[1]), int(match[2])
        if microbatch != following[kind]:
            raise ScheduleError(f"entry {place}: expected {kind.value}{following[kind]}, got {word}")
        if kind is Kind.BACKWARD and microbatch >= following[Kind.FORWARD]:
            raise ScheduleError(f"entry {place}: {word} comes before F{microbatch}")
        following[kind] += 1
        found.append(Action(kind, microbatch))
    if not found or found[-1].kind is not Kind.UPDATE:
        raise ScheduleError("a schedule ends with U")
    if following[Kind.BACKWARD] not in (0, following[Kind.FORWARD]):
        raise ScheduleError(f"{following[Kind.FORWARD]} forwards but {following[Kind.BACKWARD]} backwards")
    return tuple(found)


def in_flight(schedule: Iterable[Action]) -> int:
    """The most microbatches that are between forward and backward at one time (0: no backward at all)."""
    now = most = 0
    backward = False
    for action in schedule:
        now += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}[action.kind]
        most = max(most, now)
        backward = backward or action.kind is Kind.BACKWARD
    return most if backward else 0


def prove(
    plan: StagePlan, flow: GradientFlow, schedules: Mapping[int, Schedule], windows: Mapping[int, int] | None = None
) -> list[list[str]]:
    """Carry out one step of all schedules in rounds of one action per stage and show that every one ends.

    Returns the grid: for each stage, what it did in each round ("" for idle). Raises `ScheduleError` with the grid
    and what each stage waits for if no stage can go on.
    """
    microbatches = 1 + max(action.microbatch for schedule in schedules.values() for action in schedule)
    limits = windows or {s.index: window(s.level, plan.levels, microbatches) for s in plan.stages}
    ins = {stage.index: plan.ins(stage.index) for stage in plan.stages}
    outs = {stage.index: plan.outs(stage.index) for stage in plan.stages}
    at = {stage.index: 0 for stage in plan.stages}
    done: set[tuple[int, Kind, int]] = set()
    grid: list[list[str]] = [[] for _ in plan.stages]

    def missing(stage: int) -> str:
        action = schedules[stage][at[stage]]
        m = action.microbatch
        if action.kind is Kind.UPDATE:
            return ""
        if action.kind is Kind.FORWARD:
            for channel in ins[stage]:
                if (channel.src, Kind.FORWARD, m) not in done:
                    return f"F{m} of stage {channel.src}"
            last = m - limits[stage]
            if stage in flow.stages or last < 0:
                return ""
            m = last
        for channel in outs[stage]:
            kind = answered_by(channel, flow)
            if (channel.dst, kind, m) not in done:
                return f"{kind.value}{m} of stage {channel.dst}"
        return ""

    while any(at[stage] < len(schedules[stage]) for stage in at):
        ready = [stage for stage in at if at[stage] < len(schedules[stage]) and not missing(stage)]
        if not ready:
            waits = [
                f"  stage {s.index} on {s.pnode}: {schedules[s.index][at[s.index]]} waits for {missing(s.index)}"
                for s in plan.stages
                if at[s.index] < len(schedules[s.index])
            ]
            raise ScheduleError("the schedules can't end:\n" + "\n".join(waits) + "\n" + format_grid(grid))
        for stage in at:
            grid[stage].append(str(schedules[stage][at[stage]]) if stage in ready else "")
        for stage in ready:
            action = schedules[stage][at[stage]]
            done.add((stage, action.kind, action.microbatch))
            at[stage] += 1
    return grid


def answered_by(channel: Channel, flow: GradientFlow) -> Kind:
    """The action of the reading stage that answers a hop on this channel."""
    return Kind.BACKWARD if channel.index in flow.channels else Kind.FORWARD


def format_grid(grid: Sequence[Sequence[str]]) -> str:
    """One line per stage, one column per round."""
    width = max((len(cell) for row in grid for cell in row), default=1)
    return "\n".join(
        f"  stage {index:>3} | " + " ".join(f"{cell or '.':<{width}}" for cell in row) for index, row in enumerate(grid)
    )
