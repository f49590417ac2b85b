"""Nothing waits for ever.

- After the last fault is over, the run finishes within `FINISH_S` virtual seconds.
- Every wait that is shown says how long it lasts and how long at most, and no wait outlasts its deadline.
- No exception was raised that nobody foresaw.
"""

from __future__ import annotations

import re

from tests.sim.checks.breach import Check
from tests.sim.checks.model import Model
from tests.sim.history import Event, Fault, History, Told

FINISH_S = 600.0
LATE_S = 10.0

WAIT = re.compile(r"[^:]+: .+, for (\d+) s \(at most (\d+) s\)", re.DOTALL)


class Liveness(Check):
    """See the module."""

    def told(self, event: Told, model: Model) -> None:
        """Waits that the client is shown."""
        if event.what == "waiting":
            self._wait(event.text, event.t, [event])

    def _wait(self, text: str, t: float, events: list[Event]) -> None:
        found = WAIT.fullmatch(text)
        if found is None:
            self.breach("every wait has a deadline", t, f"this wait has none: {text!r}", events=events)
        elif int(found[1]) > int(found[2]) + LATE_S:
            self.breach("every wait has a deadline", t, f"this wait is too late: {text!r}", events=events)

    def end(self, history: History, model: Model) -> None:
        """See the module."""
        faults = [event for event in history.events if isinstance(event, Fault)][-3:]
        for text in history.waiting:
            self._wait(text, history.end_s, [])
        if history.ended != "finished":
            waits = "; ".join(history.waiting) or "nothing that is shown"
            self.breach(
                "the run finishes", history.end_s,
                f"it had not finished {history.end_s - history.healed_s:.0f} s after the last fault was over: "
                f"{history.ended}; waiting for {waits}", events=faults,
            )  # fmt: skip
        elif history.end_s > history.healed_s + FINISH_S:
            self.breach(
                "the run finishes", history.end_s,
                f"it finished {history.end_s - history.healed_s:.0f} s after the last fault was over, "
                f"at most {FINISH_S:.0f} s are allowed", events=faults,
            )  # fmt: skip
        for error in history.errors:
            self.breach("nothing unforeseen", history.end_s, error)
