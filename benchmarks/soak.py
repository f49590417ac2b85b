"""An hour of training with one PNode restart a minute: do memory and open files of those that live on stay flat?

    python -m benchmarks.soak [--minutes 60] [--out FILE.json]

Three of four PNodes compute. Each minute p3 or p4, whichever computes, is killed with -9 and started again, once the
other one is back (without it the run would go on with two, and stay there); the orchestrator, p1, p2 and a
`dcnr attach` live all the time and are measured. Flat: the mean over the last ten minutes is within 5 % of that over
minutes 10 to 20 (for short trials: of the last and of the second sixth).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fire import Progress, burning, machine, network
from cli.chaos.engine import Engine
from cli.chaos.trial import join

SAMPLE_S = 10.0
LIMIT = 0.05
SMALL = ["vars.d=64", "vars.layers=2", "vars.ctx=32", "train.batch=8"]


def sample(engine: Engine, watcher: psutil.Process) -> dict[str, tuple[int, int]]:
    """RSS in bytes and open descriptors, by process."""
    found: dict[str, tuple[int, int]] = {}
    for name in ("orchestrator", "p1", "p2"):
        process = engine.fleet.seats[name].process
        assert process is not None
        one = psutil.Process(process.pid)
        found[name] = (one.memory_info().rss, one.num_fds())
    found["dcnr attach"] = (watcher.memory_info().rss, watcher.num_fds())
    return found


def spare_parts(engine: Engine) -> list[str]:
    """Which of p3 and p4 compute."""
    return [name for name in ("p3", "p4") if name in engine.sight.members and name in engine.fleet.able()]


async def soak(minutes: float, seed: int, lease_s: float, out: Path | None) -> dict[str, Any]:
    """All of it."""
    progress = Progress("minutes", every_s=60.0)
    samples: list[tuple[float, dict[str, tuple[int, int]]]] = []
    restarts = 0
    logs = out.with_suffix(".logs") if out is not None else None
    prepared = network("gpt-char", SMALL, 20)
    async with burning(prepared, pnodes=4, members=3, lease_s=lease_s, seed=seed, keep=logs) as engine:
        watcher = engine.fleet.command("attach", engine.session, "-o", "json")
        attached = psutil.Process(watcher.pid)
        began = due = time.monotonic()
        due += 30.0
        while (past := time.monotonic() - began) < 60 * minutes:
            if time.monotonic() >= due:
                due += 60.0
                await join(engine.fleet, 300.0)
                if chosen := spare_parts(engine):
                    engine.fleet.kill(chosen[0])
                    engine.fleet.start(chosen[0])
                    restarts += 1
            samples.append((past, sample(engine, attached)))
            if out is not None:
                out.with_suffix(".samples").write_text(json.dumps(samples) + "\n")
            progress(
                past / 60, minutes, f"step {engine.sight.highest}, {restarts} restarts, {describe(samples[-1][1])}"
            )
            mark = engine.sight.highest
            await engine.sleep(SAMPLE_S)
            if engine.sight.highest == mark:
                await engine.until(lambda: engine.sight.highest > mark, "a new step")  # noqa: B023
        steps, breaches = engine.sight.highest, list(engine.sight.breaches)
    return {
        "minutes": minutes, "restarts": restarts, "steps": steps, "breaches": breaches,
        "lease_s": lease_s, "machine": machine(), "samples": [(round(at, 1), found) for at, found in samples],
    }  # fmt: skip


def describe(found: dict[str, tuple[int, int]]) -> str:
    """A sample in one line."""
    return ", ".join(f"{name} {rss / 1e6:.0f} MB {fds} files" for name, (rss, fds) in found.items())


def part_s(result: dict[str, Any]) -> float:
    """How long each of the two stretches is that are compared, in seconds."""
    return min(600.0, 10.0 * float(result["minutes"]))


def verdict(result: dict[str, Any]) -> list[tuple[str, str, float, float, float]]:
    """By process and quantity: mean early, mean late, and how much that is."""
    end = 60 * result["minutes"]
    part = part_s(result)
    found = []
    for name in result["samples"][0][1]:
        for index, what in enumerate(("RSS, MB", "open files")):
            scale = 1e6 if index == 0 else 1.0
            early = [s[name][index] / scale for at, s in result["samples"] if part <= at < 2 * part]
            late = [s[name][index] / scale for at, s in result["samples"] if at >= end - part]
            before, after = statistics.mean(early), statistics.mean(late)
            found.append((name, what, before, after, after / before - 1))
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rows, part = verdict(result), part_s(result) / 60
    lines = [
        f"{result['minutes']:g} minutes, {result['restarts']} restarts of a PNode, {result['steps']} steps; "
        f"{result['machine']}",
        "", f"| process | | minutes {part:g} to {2 * part:g} | last {part:g} minutes | change |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {name} | {what} | {early:.1f} | {late:.1f} | {change:+.1%} |" for name, what, early, late, change in rows
    ]
    worst = max(abs(change) for *_, change in rows)
    lines += ["", f"largest change {worst:.1%} (goal {LIMIT:.0%}): {'flat' if worst <= LIMIT else 'NOT flat'}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    result = asyncio.run(soak(options.minutes, options.seed, options.lease, options.out))
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
