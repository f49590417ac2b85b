"""What is known of a run at one moment, and what is said of it: its numbers, and why nothing moves."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from cli import units
from cli.eventstream import Steps
from cli.waits import limit, readable, waits_for

if TYPE_CHECKING:
    from wire.messages import SessionInfo, StepReport

STALLED_S = 3.0
GIVE_UP_S = 900.0
"""How long an orchestrator may be away before a watcher goes away too."""


@dataclass(slots=True)
class Course:
    """How a value went, from the first to the last, in a bounded number of means over equally many."""

    LIMIT: ClassVar[int] = 128

    means: list[float] = field(default_factory=list)
    each: int = 1
    _open: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """One more value; what isn't finite is left out."""
        if not math.isfinite(value):
            return
        self._open.append(value)
        if len(self._open) == self.each:
            self.means.append(sum(self._open) / self.each)
            self._open.clear()
        if len(self.means) == self.LIMIT:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(left + right) / 2 for left, right in pairs]
            self.each *= 2


@dataclass(slots=True)
class RunState:
    """What is known of a run at one moment."""

    name: str
    target: int
    step: int = 0
    loss: float = math.nan
    lr: float = math.nan
    gradient_norm: float = math.nan
    committed: int = 0
    state: str = ""
    unit: str = "tokens"
    waiting: Sequence[str] = ()
    cause: str = ""  # why it recovers
    recoveries: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=40))  # targets, seconds of a step
    course: Course = field(default_factory=lambda: Course())
    line: Steps = field(default_factory=lambda: Steps())
    moved: float = field(default_factory=lambda: time.monotonic())
    changed: float = field(default_factory=lambda: time.monotonic())  # when `state` last became another
    heard: float | None = None  # when the orchestrator last answered; None: there is none
    give_up_s: float = field(default_factory=lambda: GIVE_UP_S)  # for how long it may not answer

    def adopt(self, session: SessionInfo) -> None:
        """The session as the orchestrator knows it now; steps are told by events."""
        self.target = session.until or session.steps
        self.unit = "tokens" if session.tokenizer_digest else "samples"
        if session.state != self.state:
            self.state, self.changed = session.state, time.monotonic()
        self.committed, self.waiting = session.committed, session.waiting
        self.cause, self.recoveries = session.error, session.recoveries
        if self.line.at is None:
            self.step = session.step

    def back_to(self, step: int) -> None:
        """The run was placed anew and goes on from this step."""
        self.line.back_to(step)
        self.step = step

    def take(self, reports: Sequence[StepReport]) -> list[StepReport]:
        """Steps were applied. Returns those that were not known yet."""
        fresh = self.line.fresh(reports)
        for report in fresh:
            self.step, self.loss, self.lr = report.step, report.loss, report.lr
            self.gradient_norm = report.gradient_norm
            self.recent.append((report.count, report.seconds))
            if not self.again(report.step):
                self.course.add(report.loss)
            self.moved = time.monotonic()
        return fresh

    def again(self, step: int) -> bool:
        """This step was made before, and is made again after a loss."""
        return step <= self.line.again_to

    @property
    def rate(self) -> float:
        """Targets (tokens) per second over the last steps; 0 if unknown."""
        seconds = sum(seconds for _, seconds in self.recent)
        return sum(count for count, _ in self.recent) / seconds if seconds > 0 else 0.0

    @property
    def eta_s(self) -> float:
        """Seconds to the target; nan if unknown."""
        if not self.recent:
            return math.nan
        return (self.target - self.step) * sum(seconds for _, seconds in self.recent) / len(self.recent)

    @property
    def rests(self) -> bool:
        """Nothing is expected to move."""
        return self.state in ("finished", "failed", "paused", "stopped", "created")

    @property
    def still_s(self) -> float:
        """Seconds since the last step."""
        return time.monotonic() - self.moved

    def numbers(self) -> str:
        """Loss, rate and the rest in one line."""
        parts = [f"loss {units.loss(self.loss)}"] if self.recent else []
        if self.rate:
            parts.append(f"{units.compact(self.rate)} {self.unit}/s")
        if math.isfinite(self.gradient_norm):
            parts.append(f"norm {self.gradient_norm:.3g}")
        if math.isfinite(self.lr):
            parts.append(f"lr {self.lr:.2e}")
        if self.committed:
            parts.append(f"saved {self.committed}")
        return "  ".join(parts)

    @property
    def away_s(self) -> float:
        """For how long the orchestrator has not answered."""
        return 0.0 if self.heard is None else time.monotonic() - self.heard

    def stall(self) -> list[str]:
        """Why nothing moves: "no progress for 12 s, waiting for p2: …"; several who wait have lines of their own.

        Empty while it moves.
        """
        if self.rests:
            return []
        if self.away_s > STALLED_S:
            goes_on = "; training goes on without it" if self.state in ("running", "pausing") else ""
            return [f"orchestrator away for {self.away_s:.0f} s (at most {limit(round(self.give_up_s))}){goes_on}"]
        whom = [waits_for(sentence) for sentence in readable(self.waiting)]
        if self.state == "recovering":
            since = time.monotonic() - self.changed
            cause = self.cause.partition(" (")[0]
            still = f"recovering for {since:.0f} s" + (f": {cause}" if cause else "")
            return [still, *whom] if since >= STALLED_S else []
        if self.still_s < STALLED_S:
            return []
        still = f"no progress for {self.still_s:.0f} s"
        if not whom:
            return [f"{still}: {self.state}; nobody is overdue yet" if self.state else still]
        if len(whom) > 1:
            return [f"{still}:", *whom]
        return [f"{still}{', ' if whom[0].startswith('waiting') else ': '}{whom[0]}"]

    @property
    def remaking(self) -> str:
        """ "again, up to 17" while steps are made once more after a loss."""
        return f"again, up to {self.line.again_to}" if 0 < self.step < self.line.again_to else ""
