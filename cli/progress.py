"""How a run that goes on is shown: moving bars on a terminal, plain lines elsewhere, JSON lines for programs.

All three take the same calls, so what a run tells is decided once. Every line is flushed when it is written; the last
state is always written, also after SIGTERM.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from cli import units
from cli.runstate import STALLED_S, RunState
from cli.terminal import Terminal, literal
from cli.waits import about

if TYPE_CHECKING:
    from rich.text import Text

    from wire.messages import StepReport

CHANGED_S = 2.0
_BARS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """One way to show a run. `begin` and `end` surround all else."""

    tells_failure: ClassVar[bool]
    """The error that ends a run is a note here too; elsewhere the command's last lines say it, and nothing before."""

    def begin(self, state: RunState) -> None:
        """The run is about to be shown."""

    def steps(self, state: RunState, reports: Sequence[StepReport]) -> None:
        """Steps were applied; `state` has taken them."""

    def note(self, state: RunState, kind: str, text: str) -> None:
        """Something happened: a state change, a warning, a checkpoint."""

    def idle(self, state: RunState) -> None:
        """Nothing happened for a moment."""

    def end(self, state: RunState, verdict: str) -> None:
        """The last call: finished, failed, paused, detached, terminated."""


def view(terminal: Terminal, *, every_s: float = 0.0) -> View:
    """The view that fits this output. `every_s`: least time between plain lines (0: 5 s)."""
    if terminal.json:
        return JsonView(terminal)
    if terminal.live:
        return LiveView(terminal)
    return PlainView(terminal, every_s or 5.0)


class PlainView:
    """One line per interval, for logs and pipes."""

    tells_failure: ClassVar[bool] = False

    def __init__(self, terminal: Terminal, every_s: float) -> None:
        self._terminal = terminal
        self._every_s = every_s
        self._next = 0.0
        self._said_step = -1
        self._said_stall = 0.0
        self._said_about = ""

    def begin(self, state: RunState) -> None:
        """Nothing to say yet."""

    def steps(self, state: RunState, reports: Sequence[StepReport]) -> None:
        """A line, if one is due."""
        now = time.monotonic()
        if now >= self._next or state.step >= state.target:
            self._next = now + self._every_s
            self._line(state)

    def _line(self, state: RunState) -> None:
        if state.step == self._said_step:
            return
        self._said_step = state.step
        eta = f"  ETA {units.duration(state.eta_s)}" if state.step < state.target else ""
        again = f" ({state.remaking})" if state.remaking else ""
        self._terminal.line(f"{state.name}  step {state.step}/{state.target}{again}  {state.numbers()}{eta}")

    def note(self, state: RunState, kind: str, text: str) -> None:
        """A line."""
        if kind == "committed":
            return
        for line in note_lines(kind, text):
            self._terminal.line(f"{state.name}  {line}")

    def idle(self, state: RunState) -> None:
        """At 3 s, then every 10 s, who is waited for; within `CHANGED_S` when that is somebody else."""
        stall, now = state.stall(), time.monotonic()
        if not stall:
            return
        whom, since = about("".join(stall)), now - self._said_stall
        if self._said_stall < state.moved or since > 10 or (whom != self._said_about and since > CHANGED_S):
            self._said_stall, self._said_about = now, whom
            first, *rest = stall
            for line in (first, *(f"  {line}" for line in rest)):
                self._terminal.line(f"{state.name}  {line}")

    def end(self, state: RunState, verdict: str) -> None:
        """The last state."""
        if state.recent:
            self._line(state)
        self._terminal.line(f"{state.name}  {verdict} at step {state.step}/{state.target}")


class JsonView:
    """One JSON object per line: `event` is start, step, note, waiting or end."""

    tells_failure: ClassVar[bool] = True

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._said = 0.0

    def _write(self, event: str, state: RunState, **fields: Any) -> None:
        record = {"event": event, "session": state.name, "step": state.step, "steps": state.target, **fields}
        self._terminal.record(record, indent=False)

    def begin(self, state: RunState) -> None:
        """event: start."""
        self._write("start", state, phase=state.state)

    def steps(self, state: RunState, reports: Sequence[StepReport]) -> None:
        """One event for each step."""
        for report in reports:
            record = {
                "event": "step", "session": state.name, "step": report.step, "steps": state.target,
                "loss": _finite(report.loss), "gradient_norm": _finite(report.gradient_norm), "lr": report.lr,
                "targets": report.count, "seconds": report.seconds,
                "tokens_s": report.count / report.seconds if report.seconds > 0 else None,
                "again": state.again(report.step),
            }  # fmt: skip
            self._terminal.record(record, indent=False)

    def note(self, state: RunState, kind: str, text: str) -> None:
        """event: note."""
        self._write("note", state, kind=kind, text=text)

    def idle(self, state: RunState) -> None:
        """event: waiting, at most every 5 s."""
        if state.stall() and time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            away = round(state.away_s, 1) if state.away_s > STALLED_S else 0.0
            fields = {"phase": state.state, "cause": state.cause, "orchestrator_away_s": away}
            self._write("waiting", state, seconds=round(state.still_s, 1), waiting=list(state.waiting), **fields)

    def end(self, state: RunState, verdict: str) -> None:
        """event: end."""
        fields = {"loss": _finite(state.loss), "committed": state.committed, "recoveries": state.recoveries}
        self._write("end", state, verdict=verdict, **fields)


class LiveView:
    """A bar that moves, the numbers, a line of the loss's course, and why it stands still."""

    tells_failure: ClassVar[bool] = False

    def __init__(self, terminal: Terminal) -> None:
        from rich.live import Live

        self._terminal = terminal
        self._state: RunState | None = None
        self._live = Live(
            console=terminal.console, get_renderable=self._picture, refresh_per_second=8, transient=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._bar: Any = None

    def begin(self, state: RunState) -> None:
        """Start to draw."""
        self._state = state
        self._live.start()

    def steps(self, state: RunState, reports: Sequence[StepReport]) -> None:
        """Drawn at the next refresh."""

    def note(self, state: RunState, kind: str, text: str) -> None:
        """A line above the bar."""
        if kind == "committed":
            return
        from rich.text import Text

        style = {"warning": "yellow", "error": "red"}.get(kind, "dim")
        for line in note_lines(kind, text):
            self._live.console.print(Text(literal(line), style=style))

    def idle(self, state: RunState) -> None:
        """Drawn at the next refresh."""

    def end(self, state: RunState, verdict: str) -> None:
        """Draw the last state and stop."""
        self._live.refresh()
        self._live.stop()
        self._terminal.line(f"{state.name} {verdict} at step {state.step}/{state.target}")

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state = self._state
        if state is None:
            return Text("")
        bar = ProgressBar(total=max(1, state.target), completed=state.step, pulse=not state.recent)
        eta = f"ETA {units.duration(max(1.0, state.eta_s))}" if state.recent else state.state or "starting"
        eta = "" if state.step >= state.target or state.rests else eta
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(literal(state.name), style="bold"), bar, Text(f"{state.step}/{state.target}  {eta}", style="cyan")
        )
        lines: list[Text] = []
        if state.recent:
            lines.append(Text.assemble((sparkline(state.course.means, 32), "green"), "  ", state.numbers()))
        if state.remaking:
            lines.append(Text(literal(f"made {state.remaking}"), style="dim"))
        lines += [Text(literal(line), style="yellow") for line in state.stall()]
        return Group(row, *lines)


def note_lines(kind: str, text: str) -> list[str]:
    """What happened, in one line or several; warnings and errors say what they are."""
    first, *rest = text.splitlines() or [""]
    if kind == "placement":  # the reasons are for `dcnr logs` and `dcnr plan`
        return [first]
    if kind == "state" and first in ("created", "running", "failed", "paused", "stopped"):  # what is shown says so
        return []
    return [f"{kind}: {first}" if kind in ("warning", "error") else first, *(f"  {line}" for line in rest)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` block characters, oldest first."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    size = max(1, math.ceil(len(finite) / width))
    means = [sum(chunk) / len(chunk) for chunk in (finite[at : at + size] for at in range(0, len(finite), size))]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 7.999))] for value in means)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
