"""Where the time of a step goes on each PNode of a pipeline: from the files that `benchmarks.profiled_pnode` writes.

The compute thread's time from the end of one update to the end of another is split without rest:

    forward, backward, report, update, other jobs    inside jobs, copies apart
    copies                                           packing, unpacking and aligning tensors, inside jobs
    hand-over                                        gaps after which the PNode's own last job led to the next
    wake-up                                          from a job's submission to its start, the thread being idle
    the other's compute                              gaps that end with a hop, up to the end of the job that made it
    link                                             the same gaps from there to the hop's arrival: loop, codec, sockets
    end of step                                      gaps for norms and verdict

Of the other's compute, (P - 1) / (M + P - 1) of the step is the pipeline's own: filling and draining.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JOB = re.compile(r": ([A-Za-z]+?)(\d*) of step (\d+)(?: in stage (\d+))?")
KINDS = {"F": "forward", "B": "backward", "report": "report", "U": "update"}
WARM_STEPS = 5
OFF = "off"
"""Inside jobs, but not on a core."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the compute thread."""

    start: float
    end: float
    cpu_s: float
    kind: str
    microbatch: int
    step: int
    key: str


def key_of(name: str) -> str:
    """What tells a job from all others of its session; "" for what is none of the run's jobs."""
    match = JOB.search(name)
    return match.group() if match else ""


def jobs_of(raw: dict[str, Any]) -> list[Job]:
    """In order; `step` counts from 0 as in hops."""
    found = []
    for start, end, cpu_s, name in raw["jobs"]:
        if match := JOB.search(name):
            kind, microbatch, step, _ = match.groups()
            found.append(Job(start, end, cpu_s, kind, int(microbatch or -1), int(step) - 1, match.group()))
    return found


def window(jobs: Sequence[Job]) -> tuple[float, float, int]:
    """From the end of the last warm-up step's update to the end of the last one's, and how many steps."""
    ends = [job.end for job in jobs if job.kind == "U"]
    return ends[WARM_STEPS], ends[-2], len(ends) - 2 - WARM_STEPS


def split(raw: dict[str, Any], jobs: Sequence[Job], others: Sequence[Sequence[Job]]) -> Counter[str]:
    """Seconds by what they went into, over the window."""
    begin, end, _ = window(jobs)
    seconds: Counter[str] = Counter()
    copies = sorted((a, b) for a, b, _ in raw["copies"])
    submits = [(at, key_of(name), event) for at, name, event in raw["submits"]]
    hops = sorted(raw["hops"])
    arrivals = [hop[0] for hop in hops]
    made = {(job.step, job.microbatch, job.kind == "B"): job.end for other in others for job in other}
    inside = [job for job in jobs if begin < job.end <= end]
    starts = [at for at, _ in copies]
    for job in inside:
        copied = sum(b - a for a, b in copies[bisect_left(starts, job.start) : bisect_right(starts, job.end)])
        seconds["copies"] += copied
        seconds[KINDS.get(job.kind, "other jobs")] += job.end - job.start - copied
        seconds[OFF] += job.end - job.start - job.cpu_s
    why = {name: (at, event) for at, name, event in submits}
    last = begin
    for job in inside:
        submitted, event = why[job.key]
        gap_end = max(last, min(submitted, job.start))
        seconds["wake-up"] += job.start - gap_end
        if gap_end > last:
            place = bisect_right(arrivals, submitted) - 1
            if event == "HopArrived" and place >= 0:
                _, _, step, microbatch, backward = hops[place]
                ready = min(max(made.get((step, microbatch, backward), last), last), gap_end)
                seconds["the other's compute"] += ready - last
                seconds["link"] += gap_end - ready
            elif event == "JobDone":
                seconds["hand-over"] += gap_end - last
            else:
                seconds["end of step"] += gap_end - last
        last = job.end
    return seconds


def threads_of(raw: dict[str, Any], begin: float, end: float) -> dict[str, float]:
    """CPU seconds by thread over the window."""
    marks = [(at, found) for at, found in raw["threads"] if begin - 1e-3 <= at <= end + 1e-3]
    first, last = marks[0][1], marks[-1][1]
    return {name: last[name] - first.get(name, 0.0) for name in last}


ORDER = (
    "forward", "backward", "report", "update", "other jobs", "copies", "hand-over", "wake-up", "the other's compute",
    "link", "end of step",
)  # fmt: skip


def table(raws: dict[str, dict[str, Any]], microbatches: int) -> str:
    """Markdown: milliseconds of a step and its share, by PNode."""
    columns = [column(name, raws, microbatches) for name in raws]
    lines = ["| ms a step (share) | " + " | ".join(raws) + " |", "|---" * (len(raws) + 1) + "|"]
    for what in columns[0]:
        lines.append(f"| {what} | " + " | ".join(cells[what] for cells in columns) + " |")
    return "\n".join(lines)


def column(name: str, raws: dict[str, dict[str, Any]], microbatches: int) -> dict[str, str]:
    """One PNode's cells."""
    raw, jobs = raws[name], jobs_of(raws[name])
    seconds = split(raw, jobs, [jobs_of(other) for key, other in raws.items() if key != name])
    begin, end, count = window(jobs)
    step_s = (end - begin) / count
    cells = {what: f"{seconds[what] / count * 1e3:.1f} ({seconds[what] / count / step_s:.1%})" for what in ORDER}
    cells["a step"] = f"{step_s * 1e3:.1f}"
    bubble = (len(raws) - 1) / (microbatches + len(raws) - 1)
    cells["of it filling and draining, at best"] = f"{bubble * step_s * 1e3:.1f} ({bubble:.1%})"
    cells["jobs without a core or the interpreter"] = f"{seconds[OFF] / count * 1e3:.1f}"
    threads = threads_of(raw, begin, end)
    for label, what in (("loop", "CPU of the event loop"), ("ZMQbg/IO/0", "CPU of ZeroMQ's thread")):
        cells[what] = f"{threads.get(label, 0.0) / count * 1e3:.1f}"
    for label in ("digest, out", "socket, out", "receive"):
        spent = sum(b - a for a, b, what in raw["wire"] if what == label and begin < a <= end)
        cells[f"in the loop: {label}"] = f"{spent / count * 1e3:.2f}"
    sent = {tuple(entry[2:]): entry[0] for other in raws.values() for entry in other["sends"]}
    times = [hop[0] - sent[tuple(hop[1:])] for hop in raw["hops"] if tuple(hop[1:]) in sent]
    cells["a hop from send to arrival, median"] = f"{statistics.median(times) * 1e3:.2f}" if times else "-"
    return cells
