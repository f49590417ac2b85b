"""What a watcher sees of a run, and what of it can't be right. Pure: time is passed in.

Kept true by what it is told: the loss of a step is the same however often the step is made; a committed step stays
committed, with its hash; an epoch never falls. Whatever speaks against that is a breach, in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wire.messages import SessionEvent, SessionInfo


@dataclass(slots=True)
class Sight:
    """Everything seen of one session so far."""

    now: float = 0.0
    info: SessionInfo | None = None
    losses: dict[int, float] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    """By committed step."""
    committed: int = 0
    highest: int = 0
    moved: float = 0.0
    """When a step was last seen that had not been seen before."""
    redone: int = 0
    """Steps that were made again after a placement."""
    placements: dict[int, int] = field(default_factory=dict)
    """By number of the event: the step that a placement started from."""
    breaches: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The session's state; "" before anything was seen."""
        return self.info.state if self.info is not None else ""

    @property
    def epoch(self) -> int:
        """The session's epoch."""
        return self.info.epoch if self.info is not None else 0

    @property
    def members(self) -> list[str]:
        """The PNodes that hold its VNodes now."""
        return list(self.info.pnodes) if self.info is not None else []

    def take(self, info: SessionInfo, events: Sequence[SessionEvent], now: float, *, replay: bool = False) -> None:
        """What a look gave. `replay`: the events may be old ones, told again by an orchestrator just come up."""
        self.now = now
        self.moved = self.moved or now
        before, self.info = self.info, info
        if before is not None and info.epoch < before.epoch:
            self._breach(f"epoch {info.epoch} after epoch {before.epoch}")
        for event in events:
            if event.kind == "placement" and not replay:
                self.placements[event.seq] = event.step
                self.redone += max(0, self.highest - event.step)
            for report in event.steps:
                self._made(report.step, report.loss, now)
        self._committed(info)

    def _made(self, step: int, loss: float, now: float) -> None:
        known = self.losses.setdefault(step, loss)
        if known != loss and not (known != known and loss != loss):
            self._breach(f"step {step} had loss {known!r}, then {loss!r}")
        if step > self.highest:
            self.highest, self.moved = step, now

    def _committed(self, info: SessionInfo) -> None:
        if info.committed < self.committed:
            self._breach(f"step {self.committed} was committed, now it is step {info.committed}")
        self.committed = max(self.committed, info.committed)
        if info.final_hash and info.committed:
            known = self.hashes.setdefault(info.committed, info.final_hash)
            if known != info.final_hash:
                self._breach(f"step {info.committed} had hash {known[:12]}, then {info.final_hash[:12]}")

    def _breach(self, text: str) -> None:
        if text not in self.breaches:
            self.breaches.append(text)

    def still_s(self, now: float) -> float:
        """Seconds without a new step."""
        return now - self.moved if self.moved else 0.0

    def compare(self, losses: Sequence[float], final_hash: str, step: int) -> list[str]:
        """All breaches, also those against the undisturbed run: its losses from step 1 on and its hash at `step`."""
        found = list(self.breaches)
        if self.info is None:
            return [*found, "nothing was seen of the run"]
        if self.info.committed != step:
            found.append(f"it ended at step {self.info.committed}, not at step {step}")
        if self.info.final_hash != final_hash:
            found.append(f"final hash {self.info.final_hash[:16] or 'none'}, undisturbed {final_hash[:16]}")
        if self.info.bit_exact:
            found.append(self.info.bit_exact)
        wrong = [at for at, loss in self.losses.items() if at <= len(losses) and losses[at - 1] != loss]
        if wrong:
            at = min(wrong)
            found.append(
                f"{len(wrong)} losses differ, the first in step {at}: {self.losses[at]!r}, not {losses[at - 1]!r}"
            )
        return found

    def missing(self, step: int) -> list[int]:
        """Steps up to `step` whose loss was never told: their report was lost with an orchestrator and its disk."""
        return [at for at in range(1, step + 1) if at not in self.losses]
