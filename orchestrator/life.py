"""What every part of a session's core shares: its record, states, waits and story; see `sessions`.

`_go` and `_stage` are the only places where state and stage change, each by its table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from networks.codecs import CodedGroup, summary_of
from orchestrator.events import Command, Log, Record
from orchestrator.lifecycle import ACTIVE, STAGES, TRANSITIONS, Deployment, Limits, SessionBug, Stage, State
from orchestrator.pace import Pace
from orchestrator.records import SessionRecord
from orchestrator.waits import Waits
from wire.messages import CodedEdges


class Life:
    """A session's record and where it stands. `record` is what is stored of it."""

    def __init__(
        self, record: SessionRecord, *, term: int, new_id: Callable[[], str], limits: Limits | None = None
    ) -> None:
        self.record = record
        self.limits = limits or Limits()
        self.stage = Stage.DOWN
        """Changed by `_stage` alone, as `record.state` by `_go`."""
        self.deployment: Deployment | None = None
        """The present one; while a session is placed anew, the one before."""
        self.waits = Waits()
        self.pace = Pace()
        self._term = term
        self._new_id = new_id
        self._asked = 0
        self._story: deque[str] = deque(maxlen=60)
        self._retry_at = float("inf")
        """When a placement is tried again."""

    # ------------------------------------------------------------ questions

    @property
    def id(self) -> str:
        """Session id."""
        return self.record.session

    @property
    def state(self) -> State:
        """Where its life stands."""
        return State(self.record.state)

    @property
    def deployed(self) -> bool:
        """Its VNodes are on PNodes and answer."""
        return self.stage is Stage.UP

    @property
    def in_use(self) -> bool:
        """It is deployed, being deployed, or running."""
        return self.stage is not Stage.DOWN or self.state in ACTIVE

    @property
    def pnodes(self) -> list[str]:
        """The PNodes of the present deployment."""
        return self.deployment.pnodes if self.deployment is not None else []

    def waiting(self, now: float) -> list[str]:
        """Who is awaited, for what and since when, as sentences."""
        return self.waits.sentences(now)

    def next_deadline(self) -> float:
        """When `Ticked` next has something to do."""
        return min(self.waits.deadline(), self._retry_at)

    def eta_s(self) -> float:
        """Seconds until the run holds next, as far as is known."""
        goal = self.record.until or self.record.steps
        return max(0, goal - self.record.step) * self.pace.step_s if self.state is State.RUNNING else 0.0

    @property
    def _goal(self) -> int:
        return self.record.until or self.record.steps

    # ------------------------------------------------------------ changes

    def _warn(self, text: str, out: list[Command]) -> None:
        out.append(Log("warning", text, self.record.step))

    def _key(self, kind: str, who: str) -> str:
        """A key that no earlier request has, so that a late answer to that one means nothing."""
        self._asked += 1
        return f"{kind} {who} {self._asked}"

    def _stage(self, stage: Stage) -> None:
        if stage not in STAGES[self.stage]:
            story = "\n".join(self._story)
            raise SessionBug(f"the deployment of {self.id} can't go from {self.stage.value} to {stage.value}\n{story}")
        self.stage = stage

    def _go(self, state: State, out: list[Command], text: str = "", *, run: bool = False) -> None:
        """Change the state. `run`: say when that is durable, for a run waits for it."""
        if state not in TRANSITIONS[self.state]:
            story = "\n".join(self._story)
            raise SessionBug(f"{self.id} can't go from {self.record.state} to {state.value}\n{story}")
        self.record.state = state.value
        if state not in ACTIVE:
            self.waits.only("commit")
        out.append(Log("state", f"{state.value}" + (f": {text}" if text else ""), self.record.step))
        out.append(Record(run=run))


def vnodes_text(count: int) -> str:
    """ "1 VNode", "3 VNodes"."""
    return f"{count} VNode{'' if count == 1 else 's'}"


def codecs_text(codecs: Sequence[CodedEdges]) -> str:
    """ "int8 on 4 edges"; "" without any."""
    return summary_of([CodedGroup(coded.codec, tuple(coded.edges)) for coded in codecs])
