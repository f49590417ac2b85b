"""`python -m tests.sim`: campaigns of simulated runs, single runs as a story, smallest schedules, planted bugs.

python -m tests.sim --seeds 10000 --jobs 2        a campaign; what was run before is not run again
python -m tests.sim --replay 17 --trace           one run, told
python -m tests.sim --shrink 17                   the fewest faults that break it
python -m tests.sim --planted                     bugs planted into the shipped code, and what finds them
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.sim.campaign import Campaign, breach_line, print_json, print_lines, replay_command
from tests.sim.results import default_state

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    told = argparse.ArgumentParser(prog="python -m tests.sim", description=(__doc__ or "").partition("\n")[0])
    what = told.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=int, metavar="N", help="run N seeds")
    what.add_argument("--replay", type=int, metavar="SEED", help="run one seed and judge it")
    what.add_argument("--shrink", type=int, metavar="SEED", help="leave out what the breach doesn't need")
    what.add_argument("--planted", nargs="*", metavar="BUG", help="plant bugs (all), and see them found")
    what.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    told.add_argument("--start", type=int, default=0, metavar="SEED", help="first seed (0)")
    told.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes (2)")
    told.add_argument("--state", default="", metavar="FILE", help="where results are kept; 'none': nowhere")
    told.add_argument("--trace", action="store_true", help="with --replay: tell what happens")
    told.add_argument("--keep", default="", metavar="PLACES", help="with --replay: only these faults, as in 0,3,4")
    told.add_argument("--plant", default="", metavar="BUG", help="with a bug planted into the shipped code")
    told.add_argument("--limit", type=int, default=2000, metavar="N", help="with --planted: seeds per bug (2000)")
    told.add_argument("--stop-after", type=int, default=0, metavar="N", help="end after N seeds with breaches")
    told.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing was broken; 1: something was; 130: Ctrl-C."""
    arguments = parser().parse_args(argv)
    if arguments.worker:
        from tests.sim import worker

        worker.main(arguments.plant)
        return 0
    if arguments.plant:
        from tests.sim.worker import PLANTED

        PLANTED.append(arguments.plant)
    try:
        if arguments.replay is not None:
            return _replay(arguments)
        if arguments.shrink is not None:
            return _shrink(arguments)
        if arguments.planted is not None:
            return _planted(arguments)
        return _campaign(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _campaign(arguments: argparse.Namespace) -> int:
    state = None if arguments.state == "none" else Path(arguments.state) if arguments.state else default_state()
    live = arguments.output == "text" and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    campaign = Campaign(
        range(arguments.start, arguments.start + arguments.seeds), jobs=arguments.jobs, state=state, live=live,
        stop_after=arguments.stop_after, quiet=arguments.output == "json",
    )  # fmt: skip
    campaign.run()
    if arguments.output == "json":
        print_json(campaign.as_json())
    else:
        print_lines(campaign.lines())
    if campaign.interrupted:
        return INTERRUPTED
    return 1 if campaign.totals.breached else 0


def _replay(arguments: argparse.Namespace) -> int:
    from tests.sim.worker import run_seed
    from tests.sim.world import plan_of, story

    keep = [int(place) for place in arguments.keep.split(",")] if arguments.keep else None
    lines: list[str] = []
    history, breaches = run_seed(arguments.replay, keep, trace=lines)
    if arguments.output == "json":
        print_json({"seed": arguments.replay, "breaches": [asdict(breach) for breach in breaches]})
    else:
        told = story(history, lines if arguments.trace else [], plan_of(arguments.replay))
        print_lines([told, *(str(breach) for breach in breaches), f"{len(breaches)} breaches"])
    return 1 if breaches else 0


def _shrink(arguments: argparse.Namespace) -> int:
    from tests.sim.shrink import shrink
    from tests.sim.worker import judged
    from tests.sim.world import plan_of

    seed = arguments.shrink
    faults = plan_of(seed).faults
    plant = f" --plant {arguments.plant}" if arguments.plant else ""

    def broken(places: Sequence[int]) -> set[str]:
        return {breach["invariant"] for breach in judged(seed, places)["breaches"]}

    found = shrink(len(faults), broken, lambda text: print(text, file=sys.stderr, flush=True))
    command = f"{replay_command(seed)} --keep {','.join(map(str, found.places))}{plant}"
    if arguments.output == "json":
        print_json({"seed": seed, **asdict(found), "invariants": sorted(found.invariants), "command": command})
        return 1 if found.invariants else 0
    if not found.invariants:
        print_lines([f"seed {seed} breaks nothing"])
        return 0
    print_lines(
        [
            f"seed {seed} breaks: {', '.join(sorted(found.invariants))}",
            f"{len(found.places)} of {len(faults)} faults are needed ({found.runs} runs):",
            *(f"  {place}: {faults[place]}" for place in found.places),
            *(breach_line(seed, breach) for breach in judged(seed, found.places)["breaches"][:3]),
            f"  {command}",
        ]
    )
    return 1


def _planted(arguments: argparse.Namespace) -> int:
    from tests.sim.planted.table import hunt_all, table

    found = hunt_all(arguments.planted, start=arguments.start, limit=arguments.limit, jobs=arguments.jobs)
    if arguments.output == "json":
        print_json([asdict(catch) for catch in found])
    else:
        print_lines(table(found))
    return 0 if all(catch.seeds for catch in found) else 1


if __name__ == "__main__":
    sys.exit(main())
