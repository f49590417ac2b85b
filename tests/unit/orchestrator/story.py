"""A session's core under test: feeds events, keeps what it asked for, moves time."""

from __future__ import annotations

import itertools
from typing import Any

from orchestrator import events
from orchestrator.events import Command, Event, Log, Send
from orchestrator.lifecycle import Limits, State
from orchestrator.records import SessionRecord
from orchestrator.sessions import Session
from wire.messages import SessionBeat, StepReport


def make_record(**changes: Any) -> SessionRecord:
    fields: dict[str, Any] = {
        "session": "gpt-1",
        "network": "gpt",
        "network_digest": "a" * 64,
        "data_digest": "b" * 64,
        "tokenizer_digest": "",
        "data": "text",
        "steps": 40,
        "seed": 0,
        "checkpoint_every": 0,
        "keep": 3,
        "trace": False,
        "tag": "",
        "created": 0.0,
        "until": 40,
    }
    return SessionRecord(**{**fields, **changes})


def report(step: int, seconds: float = 0.5) -> StepReport:
    return StepReport(step, 2.0 / step, 100, 1.0, 0.1, seconds, 4, "")


INCARNATIONS = {"p1": 1, "p2": 4, "p3": 7, "p4": 2}


class Story:
    """A session under test: feeds events, keeps what it asked for, moves time."""

    def __init__(self, *, limits: Limits | None = None, **changes: Any) -> None:
        ids = itertools.count()
        self.session = Session(make_record(**changes), term=3, new_id=lambda: f"id{next(ids)}", limits=limits)
        self.now = 0.0
        self.commands: list[Command] = []

    def feed(self, event: Event, after: float = 0.0) -> list[Command]:
        self.now += after
        new = self.session.handle(event, self.now)
        self.commands += new
        return new

    def act(self, action: str, **more: Any) -> list[Command]:
        return self.feed(events.Acted(action, **more))

    def sent(self, commands: list[Command], kind: type | None) -> list[Send]:
        found = [command for command in commands if isinstance(command, Send)]
        return [one for one in found if (one.message is None if kind is None else type(one.message) is kind)]

    def place(self, step: int = 0, where: dict[str, str] | None = None) -> list[Command]:
        """Placed, and the epoch is durable. `where`: VNode -> PNode."""
        where = where or {"a": "p1", "b": "p1", "loss": "p2"}
        incarnations = {pnode: INCARNATIONS[pnode] for pnode in where.values()}
        self.feed(events.Placed(where, incarnations, where["loss"], step, ("why",), step_s=0.025, hash=f"hash{step}"))
        return self.feed(events.Recorded(self.session.record.epoch))

    def texts(self, *kinds: str) -> list[str]:
        """What was logged."""
        return [one.text for one in self.commands if isinstance(one, Log) and (not kinds or one.kind in kinds)]

    def asked(self, kind: type[Any]) -> list[Any]:
        """All commands of a kind."""
        return [one for one in self.commands if isinstance(one, kind)]

    def lose(self, pnode: str, reason: str = "silence") -> list[Command]:
        """That PNode is lost."""
        return self.feed(events.MemberLost(pnode, INCARNATIONS[pnode], reason))

    def beat(
        self, pnode: str, state: str = "running", *, epoch: int | None = None, moved: int = 0, waiting: str = "",
        uncommitted: tuple[int, ...] = (), incarnation: int | None = None,
    ) -> list[Command]:  # fmt: skip
        """A PNode reports that it has the session."""
        of = self.session.record.epoch if epoch is None else epoch
        line = SessionBeat("gpt-1", of, 0, state, waiting, 0.0, moved, list(uncommitted))
        return self.feed(events.Beat(pnode, incarnation or INCARNATIONS[pnode], line))

    def answer(self, commands: list[Command]) -> list[Command]:
        out: list[Command] = []
        for command in commands:
            if isinstance(command, Send):
                out += self.feed(events.Answered(command.key))
        return out

    def run(self, step: int = 0) -> Story:
        self.act("start")
        self.answer(self.answer(self.place(step)))
        assert self.session.state is State.RUNNING
        return self

    def hold(self, step: int, *, commit: bool = True) -> None:
        for pnode in ("p1", "p2"):
            self.feed(events.Held(pnode, self.session.record.epoch, step))
        if commit:
            self.commit(step)

    def commit(self, step: int) -> list[Command]:
        epoch = self.session.record.epoch
        self.feed(events.PartsArrived(epoch, step))
        return self.feed(events.Committed(epoch, step, f"hash{step}"))
