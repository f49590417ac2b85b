"""What a person sees while a run is hurt, and the report at its end; with `-o json` one object for each line."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cli import units
from cli.chaos.engine import Outcome, Told, Wound
from cli.terminal import Terminal, literal

if TYPE_CHECKING:
    from cli.chaos.sight import Sight

EVERY_S = 10.0
"""Without a terminal the run itself is shown so often."""
REFRESH_S = 0.25


class Display:
    """Lines for what is done and how long each recovery took, and one line that moves for the run itself."""

    def __init__(self, terminal: Terminal, seconds: float) -> None:
        self.terminal = terminal
        self.seconds = seconds
        self.began = time.monotonic()
        self._shown = 0.0
        self._status: Any = None
        self._faults = 0
        self._runs = False
        self._rate: list[tuple[float, int]] = []

    def told(self) -> Told:
        """What the engine calls."""
        return Told(self.hurt, self.healed, self.tick)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While the body runs, a live terminal has the moving line."""
        self.began = time.monotonic()
        if not self.terminal.live:
            yield
            return
        with self.terminal.console.status("starting", spinner="dots") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def said(self, text: str) -> None:
        """What is being done before the run begins."""
        if self._status is not None:
            self._status.update(text)
        elif not self.terminal.json:
            self._line(text, "dim")

    def hurt(self, wound: Wound) -> None:
        """A fault happened."""
        self._faults += 1
        if self.terminal.json:
            self.terminal.record({"event": "fault", **record(wound)}, indent=False)
        self._line(f"{wound.kind:<12} {wound.target}: {wound.text}", "" if wound.counts else "dim")

    def healed(self, wound: Wound) -> None:
        """The first new step after it."""
        if self.terminal.json:
            self.terminal.record({"event": "new_step", **record(wound)}, indent=False)
        again = f", {units.plural(wound.redone, 'step')} made again" if wound.redone else ""
        took = units.duration(wound.recovered_s or 0.0)
        self._line(f"{'':<12} a new step {took} after {wound.kind} of {wound.target}{again}", "green")

    def tick(self, sight: Sight) -> None:
        """The run was looked at."""
        now = time.monotonic()
        if sight.highest and not self._runs:
            self._runs, self.began = True, now
        if now - self._shown < (REFRESH_S if self._status is not None else EVERY_S):
            return
        self._shown = now
        text = self.numbers(sight, now)
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(literal(text), style="cyan"))
        elif not self.terminal.json:
            self._line(text, "")

    def numbers(self, sight: Sight, now: float) -> str:
        """The run in one line."""
        info = sight.info
        if info is None:
            return "waiting for the orchestrator"
        self._rate = [(at, step) for at, step in self._rate if now - at < 15.0] + [(now, sight.highest)]
        span = now - self._rate[0][0]
        rate = (sight.highest - self._rate[0][1]) / span if span > 1 else 0.0
        left = max(0.0, self.seconds - (now - self.began)) if self._runs else 0.0
        parts = [
            info.state, f"step {sight.highest}", f"saved {info.committed}", f"epoch {info.epoch}",
            f"loss {sight.losses[sight.highest]:.4f}" if sight.highest in sight.losses else "",
            f"{rate:.1f} steps/s" if span > 1 else "", units.plural(self._faults, "fault"),
            f"still {units.duration(sight.still_s(now))}" if sight.still_s(now) > 2 else "",
            f"{units.duration(left)} left" if left >= 1 else "",
        ]  # fmt: skip
        waits = f"; waits for {info.waiting[0]}" if info.waiting and sight.still_s(now) > 2 else ""
        return "  ".join(part for part in parts if part) + waits

    def _line(self, text: str, style: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        self.terminal.line(f"{minutes}:{seconds:02d}  {text}", style=style or None)


def record(wound: Wound) -> dict[str, Any]:
    """A fault for JSON."""
    names = ("number", "kind", "at_s", "step", "target", "text", "counts", "recovered_s", "redone")
    return {name: getattr(wound, name) for name in names}


def rows(wounds: Sequence[Wound]) -> list[tuple[object, ...]]:
    """By kind: how many hit, median and longest time to a new step, steps made again."""
    found: list[tuple[object, ...]] = []
    for kind in sorted({wound.kind for wound in wounds}):
        mine = [wound for wound in wounds if wound.kind == kind and wound.counts]
        times = [wound.recovered_s for wound in mine if wound.recovered_s is not None]
        middle = units.duration(statistics.median(times)) if times else "-"
        longest = units.duration(max(times)) if times else "-"
        found.append((str(kind), len(mine), middle, longest, sum(wound.redone for wound in mine)))
    return found


def report(terminal: Terminal, outcome: Outcome, problems: Sequence[str], compared: int) -> None:
    """Table and verdict. `problems`: all that must not be, also against the undisturbed run of `compared` steps."""
    good = not problems
    if terminal.json:
        terminal.record(
            {
                "event": "verdict", "good": good, "step": outcome.step, "final_hash": outcome.final_hash,
                "compared": compared, "faults": dict(outcome.counts()), "redone": outcome.redone,
                "epochs": outcome.epochs, "problems": list(problems), "seconds": round(outcome.seconds, 1),
            },
            indent=False,
        )  # fmt: skip
        return
    terminal.line()
    headings = ("fault", "times>", "new step after (median)>", "longest>", "steps made again>")
    terminal.table(headings, rows(outcome.wounds), empty="nothing was done to it")
    terminal.line()
    if compared:
        same = f"step {compared}: hash {outcome.final_hash[:16]} and all losses equal those of an undisturbed process"
        terminal.line(same if good else "NOT as an undisturbed run:", style="green" if good else "bold red")
    for problem in problems:
        terminal.line(f"  {problem}", style="red")
