"""Sessions, events and step reports as an orchestrator would tell them."""

from __future__ import annotations

import math
from typing import Any

from wire.messages import SessionEvent, SessionInfo, StepReport


def session(state: str, step: int = 0, **more: Any) -> SessionInfo:
    """A session of 10 steps."""
    fields = {"loss": math.nan, "tokens_s": 0.0, "committed": 0, "error": "", "hint": "", "waiting": [], **more}
    fields = {"epoch": 1, "deployed": True, "bit_exact": "", "final_hash": "", "steps": 10, "until": 0, **fields}
    return SessionInfo(
        session="gpt-1", network="gpt", state=state, step=step, pnodes=["p1"], created=0.0, eta_s=0.0, **fields
    )


def report(step: int) -> StepReport:
    """A step."""
    return StepReport(step, 1.0, 10, 0.1, 1e-3, 0.1, 1, "")


def event(seq: int, kind: str, text: str = "", *steps: int, time: float = 0.0, step: int | None = None) -> SessionEvent:
    """An event; `step` is the last of `steps` unless given."""
    last = max(steps, default=0) if step is None else step
    return SessionEvent(seq, time or float(seq), kind, text, last, [report(number) for number in steps])
