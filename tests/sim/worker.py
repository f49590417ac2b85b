"""A process that runs seeds and says what came of each: JSON lines in, JSON lines out.

Asked `{"first": 10, "count": 25}` or `{"first": 10, "count": 1, "keep": [0, 3]}` (only these faults of the seed's
plan), it answers `{"begin": 10}`, `{"result": {...}}` for each seed, and `{"done": true}`. A planted bug is applied
once, before anything else.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import IO, Any

from tests.sim.checker import Breach, check
from tests.sim.history import Computed, Delivered, Fault, History

PLANTED: list[str] = []
"""Names of the bugs that are planted in this process."""


def run_seed(
    seed: int, keep: Sequence[int] | None = None, trace: list[str] | None = None
) -> tuple[History, list[Breach]]:
    """Run and judge one seed; of its faults only those at the places `keep`, if given."""
    from tests.sim.planted import patch_of
    from tests.sim.world import plan_of, run

    plan = plan_of(seed)
    if keep is not None:
        plan = replace(plan, faults=tuple(plan.faults[place] for place in keep))
    history = run(seed, plan=plan, patches=[patch_of(name) for name in PLANTED], trace=trace)
    return history, check(history)


def summary_of(history: History, breaches: Sequence[Breach], wall_s: float) -> dict[str, Any]:
    """What is kept of a run."""
    events = history.events
    epochs = {event.epoch for event in events if isinstance(event, Computed)}
    return {
        "seed": history.seed,
        "faults": dict(Counter(event.kind for event in events if isinstance(event, Fault))),
        "steps": sum(1 for event in events if isinstance(event, Computed) and event.samples),
        "recoveries": max(0, max(epochs, default=1) - 1),
        "messages": sum(1 for event in events if isinstance(event, Delivered)),
        "virtual_s": round(history.end_s, 3),
        "after_s": round(history.end_s - history.healed_s, 3),
        "wall_s": round(wall_s, 3),
        "visited": sorted(history.visited),
        "breaches": [asdict(breach) for breach in breaches],
    }


def failure(seed: int, invariant: str, text: str, wall_s: float = 0.0) -> dict[str, Any]:
    """What is kept of a run that gave no history."""
    breach = {"invariant": invariant, "t": 0.0, "text": text, "processes": [], "step": 0, "records": []}
    return {
        "seed": seed, "faults": {}, "steps": 0, "recoveries": 0, "messages": 0, "virtual_s": 0.0, "after_s": 0.0,
        "wall_s": round(wall_s, 3), "visited": [], "breaches": [breach],
    }  # fmt: skip


def judged(seed: int, keep: Sequence[int] | None = None) -> dict[str, Any]:
    """The summary of a seed, whatever happens."""
    began = time.perf_counter()
    try:
        history, breaches = run_seed(seed, keep)
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        return failure(seed, "the world runs", " | ".join(lines[-6:])[-2000:], time.perf_counter() - began)
    return summary_of(history, breaches, time.perf_counter() - began)


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer until the requests end."""

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for line in requests:
        request = json.loads(line)
        for seed in range(request["first"], request["first"] + request["count"]):
            say({"begin": seed})
            say({"result": judged(seed, request.get("keep"))})
        say({"done": True})


def main(planted: str = "") -> None:
    """Serve on standard input and output; whatever else is printed goes to standard error."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    if planted:
        PLANTED.append(planted)
    serve(sys.stdin, answers)
