"""`dcnr rebalance` against an orchestrator that answers from a script."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import client as client_module
from cli.terminal import Terminal
from cli.tree import app
from tests.unit.cli.sessions import event, session
from wire.messages import PlanInfo, RebalanceInfo, SessionInfo, WatchInfo

PRESENT = PlanInfo({"a": "p1", "b": "p1", "c": "p2"}, 0.012, {"p1": 0.012, "p2": 0.004}, {}, {"p1": 10, "p2": 5}, [])
BEST = PlanInfo({"a": "p1", "b": "p3", "c": "p3"}, 0.008, {"p1": 0.008, "p3": 0.008}, {}, {"p1": 5, "p3": 10}, ["b"])


class Orchestrator:
    """Stands for a client of one."""

    def __init__(self, moved: dict[str, str], *later: tuple[str, int]) -> None:
        self.moved = moved
        self.later = [*later] or [("running", 1)]
        self.applied = 0
        self.terminal = Terminal()

    async def __aenter__(self) -> Orchestrator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    async def session(self, name: str) -> SessionInfo:
        return session("running", 5)

    async def rebalance(self, name: str, *, apply: bool = False) -> RebalanceInfo:
        self.applied += apply
        return RebalanceInfo("gpt-1", PRESENT, BEST, 1.5, self.moved, 3_000_000, apply)

    async def watch(self, name: str, after: int, wait_s: float, limit: int = 500) -> WatchInfo:
        if not self.applied:
            return WatchInfo(session("running", 5), [event(1, "note", "an old note")] if not after else [], 1)
        state, epoch = self.later.pop(0) if len(self.later) > 1 else self.later[0]
        info = session(state, 5, epoch=epoch, error="p3 is full" if state == "failed" else "", waiting=["p3: room"])
        return WatchInfo(info, [event(after + 1, "note", f"now {state}")], 1)


def call(monkeypatch: pytest.MonkeyPatch, orchestrator: Orchestrator, *arguments: str, code: int = 0) -> str:
    def to(given: str | None, home: str | None, terminal: Terminal, **_: Any) -> Orchestrator:
        orchestrator.terminal = terminal
        return orchestrator

    monkeypatch.setattr(client_module.Client, "to", staticmethod(to))
    done = CliRunner().invoke(app, ["rebalance", "gpt-1", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_without_yes_it_only_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = Orchestrator({"b": "p3", "c": "p3"})
    shown = call(monkeypatch, orchestrator)
    assert "gpt-1 now: 12 ms for each step on 2 PNodes" in shown
    assert "gpt-1 at best: 8 ms for each step on 2 PNodes" in shown
    assert "1.50 times as fast; 2 VNodes would move, 3.0 MB would be fetched" in shown
    assert "nothing was moved" in shown
    assert "next: dcnr rebalance gpt-1 --yes" in shown
    found = json.loads(call(monkeypatch, orchestrator, "-o", "json"))
    assert found["moved"] == {"b": "p3", "c": "p3"}
    assert found["applied"] is False
    assert orchestrator.applied == 0


def test_the_best_placement_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = Orchestrator({})
    assert "nothing would move" in call(monkeypatch, orchestrator, "--yes")
    assert orchestrator.applied == 0


def test_it_is_watched_until_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = Orchestrator({"b": "p3"}, ("pausing", 1), ("starting", 2), ("running", 2))
    shown = call(monkeypatch, orchestrator, "--yes")
    assert "an old note" not in shown
    assert shown.index("now pausing") < shown.index("now starting") < shown.index("now running")
    assert "gpt-1 is running: epoch 2 on p1" in shown
    assert orchestrator.applied == 1
    orchestrator = Orchestrator({"b": "p3"}, ("running", 2))
    assert json.loads(call(monkeypatch, orchestrator, "--yes", "-o", "json"))["after"]["epoch"] == 2


def test_a_move_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = call(monkeypatch, Orchestrator({"b": "p3"}, ("pausing", 1), ("failed", 2)), "--yes", code=1)
    assert "p3 is full" in shown


def test_a_move_that_never_ends_says_who_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = call(monkeypatch, Orchestrator({"b": "p3"}), "--yes", "--timeout", "0.1", code=69)
    assert "gpt-1 is running and has not moved after 0 s, waiting for p3: room" in shown
