"""Many seeds: run, judged, kept, and what they come to.

`0 in N`: with no breach in N independent runs, the true rate of breaches is below about 3/N with 95 % confidence, since
(1 - 3/N)^N is about e^-3 = 0.05; the exact bound, 1 - 0.05^(1/N), is what is printed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sim.coverage import NO_FAULT_LEADS_THERE, coverage
from tests.sim.pool import HANG_S, Pool, ranges
from tests.sim.results import PRODUCT, StateFile, Totals, code_digest

PLAIN_EVERY_S = 15.0
SHOWN = 10


class Campaign:
    """Runs what is not done yet of a range of seeds; `run` says whether everything was clean."""

    def __init__(
        self, seeds: range, *, jobs: int, state: Path | None, live: bool, chunk: int = 10, hang_s: float = HANG_S,
        stop_after: int = 0, quiet: bool = False, command: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.seeds = seeds
        self.live, self.quiet = live, quiet
        self.state = StateFile(state, code_digest())
        self.fresh = Totals()
        self.stop_after = stop_after
        self.seconds = 0.0
        self.interrupted = False
        self._pool = Pool(jobs, hang_s=hang_s, command=command)
        self._todo = [seed for seed in seeds if seed not in self.state.done]
        self._chunk = max(1, min(chunk, len(self._todo) // max(1, jobs)))

    def run(self) -> None:
        """Do them; Ctrl-C ends it in good order."""
        began = time.monotonic()
        show = _Bar(len(self._todo)) if self.live else _Lines(len(self._todo), quiet=self.quiet)
        results = self._pool.results(ranges(self._todo, self._chunk))
        try:
            with show:
                for result in results:
                    if result is not None:
                        self.fresh.add(result)
                        self.state.add(result)
                        for breach in result["breaches"][:1]:
                            show.say(breach_line(result["seed"], breach))
                    show.update(self.fresh)
                    if self.stop_after and self.fresh.breached >= self.stop_after:
                        break
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            results.close()  # type: ignore[attr-defined]
            self.state.close()
            self.seconds = time.monotonic() - began

    @property
    def totals(self) -> Totals:
        """Of all runs of this code that are kept, these among them."""
        return self.state.totals

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "code": self.state.code, "now": self.fresh.as_json(), "all": self.totals.as_json(),
            "runs_of_other_code": self.state.other, "seconds": round(self.seconds, 2),
            "runs_per_second": round(self.fresh.runs / self.seconds, 3) if self.seconds else 0.0,
            "bound_95": bound(self.totals), "coverage": [
                {
                    "machine": found.machine, "states": [found.states_seen, found.states],
                    "transitions": [found.transitions_seen, found.transitions], "never": list(found.never),
                    "barred": list(found.barred), "strange": list(found.strange),
                }
                for found in coverage(self.totals.visited)
            ],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        fresh, totals = self.fresh, self.totals
        rate = fresh.runs / self.seconds if self.seconds else 0.0
        found = [
            f"seeds {self.seeds.start} to {self.seeds.stop - 1}",
            f"code        {self.state.code}: of {', '.join(PRODUCT)} and tests/sim, less what no run loads",
            f"runs        {fresh.runs} now in {self.seconds:.0f} s ({rate:.2f} a second), {totals.runs} in all"
            + (f"; {self.state.other} of other code are not counted" if self.state.other else ""),
            f"steps       {totals.steps}, recoveries {totals.recoveries}, messages {totals.messages}",
            f"time        {totals.virtual_s / 3600:.1f} virtual hours; slowest end after the last fault: "
            f"{totals.slowest_s:.0f} s",
            f"faults      {totals.faults.total()}: "
            + ", ".join(f"{kind} {count}" for kind, count in sorted(totals.faults.items())),
        ]
        for part in coverage(totals.visited):
            found.append(
                f"{part.machine:<11} {part.states_seen} of {part.states} states, "
                f"{part.transitions_seen} of {part.transitions} transitions"
                + (f"; never: {', '.join(part.never)}" if part.never else "")
                + (f"; not in its table: {', '.join(part.strange)}" if part.strange else "")
            )
            found += [
                f"            no fault leads to {move}: {NO_FAULT_LEADS_THERE[f'{part.machine} {move}']}"
                for move in part.barred
            ]
        found.append(f"breaches    {totals.breached} runs of {totals.runs}")
        for breach in totals.breaches[:SHOWN]:
            found.append(breach_line(breach["seed"], breach))
            found.append(f"            {replay_command(breach['seed'])}")
        found.append(verdict(totals))
        return found


def bound(totals: Totals) -> float | None:
    """The rate that the true rate of breaches is below with 95 % confidence; None if there was one."""
    return None if totals.breached or not totals.runs else 1 - 0.05 ** (1 / totals.runs)


def verdict(totals: Totals) -> str:
    """What the figure means."""
    limit = bound(totals)
    if limit is not None:
        return f"0 in {totals.runs}: the true rate is below {limit:.2e} (about 3/{totals.runs}) with 95 % confidence"
    if not totals.runs:
        return "nothing was run"
    return f"{totals.breached} in {totals.runs} runs broke a promise"


def replay_command(seed: int) -> str:
    """How to see it again."""
    return f"python -m tests.sim --replay {seed} --trace"


def breach_line(seed: int, breach: dict[str, Any]) -> str:
    """A breach on one line."""
    who = f" [{', '.join(breach['processes'])}]" if breach["processes"] else ""
    step = f" step {breach['step']}" if breach["step"] else ""
    text = " ".join(str(breach["text"]).split())
    return f"seed {seed}: {breach['t']:.3f} {breach['invariant']}:{who}{step} {text}"[:400]


class _Lines:
    """Plain lines, for logs."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self._total = total
        self._quiet = quiet
        self._at = self._began = time.monotonic()

    def __enter__(self) -> _Lines:
        self.say(f"{self._total} seeds to run")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def update(self, totals: Totals) -> None:
        now = time.monotonic()
        if now - self._at >= PLAIN_EVERY_S:
            self._at = now
            rate = totals.runs / (now - self._began)
            left = f"{(self._total - totals.runs) / rate:.0f} s left" if rate else ""
            self.say(
                f"{totals.runs}/{self._total} runs, {rate:.2f} a second, {totals.faults.total()} faults, "
                f"{totals.breached} with breaches; {left}"
            )


class _Bar(_Lines):
    """A moving bar, on a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        super().__init__(total)
        self._progress = Progress(
            TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(), TextColumn("left"), Remaining(), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, text="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        from rich.markup import escape

        self._progress.console.print(escape(text), style="red", highlight=False)

    def update(self, totals: Totals) -> None:
        text = f"{totals.faults.total()} faults, {totals.breached} with breaches"
        self._progress.update(self._task, completed=totals.runs, text=text)


def print_lines(lines: Sequence[str]) -> None:
    """To standard output; a closed pipe ends quietly."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()


def print_json(value: object) -> None:
    """One JSON object."""
    print_lines([json.dumps(value, indent=1)])
