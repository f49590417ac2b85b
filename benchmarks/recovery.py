"""Time from the loss of a PNode to the first step that had not been made before, and steps made again.

    python -m benchmarks.recovery [--how kill|stop] [--kills 20] [--lease 10] [--out FILE]

A network trains on three PNodes, a fourth is the spare. A PNode that computes is lost at a random moment and comes back
only after the run has recovered. `kill`: kill -9, whose connections close. `stop`: SIGSTOP, as a machine without power
or network: nothing closes, so that only its silence shows. With `--out` the losses of several calls are put together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.fire import Progress, append, burning, machine, network, percentile
from cli.chaos.engine import Engine
from cli.chaos.trial import join

HOW = {"kill": "kill -9", "stop": "SIGSTOP"}
ROWS = {
    "loss to noticed, s": "noticed_s",
    "noticed to first new step, s": "rest_s",
    "loss to first new step, s": "new_step_s",
    "steps made again": "redone",
}


async def one_loss(engine: Engine, draw: random.Random, how: str) -> dict[str, float]:
    """Lose one member; how long each part took."""
    fleet, sight = engine.fleet, engine.sight
    mark = sight.highest
    await engine.until(lambda: sight.highest > mark + 5 and len(fleet.able()) == len(fleet.pnodes()), "calm")
    await join(fleet)
    await engine.sleep(draw.uniform(1.0, 4.0))
    victim = draw.choice(sorted(name for name in sight.members if name in fleet.able()))
    epoch, redone, began = sight.epoch, sight.redone, time.monotonic()
    (fleet.kill if how == "kill" else fleet.pause)(victim)
    await engine.until(lambda: sight.state == "recovering" or sight.epoch > epoch, "the loss to be noticed")
    noticed = time.monotonic() - began
    await engine.until(lambda: sight.epoch > epoch, "a new placement")
    mark = sight.highest
    await engine.until(lambda: sight.highest > mark, "a new step")
    seconds = time.monotonic() - began
    if how == "kill":
        fleet.start(victim)
    else:
        fleet.go_on(victim)
    return {"noticed_s": noticed, "new_step_s": seconds, "redone": float(sight.redone - redone)}


async def measure(
    how: str, kills: int, lease_s: float, name: str, sets: list[str], every: int, seed: int
) -> list[dict[str, float]]:
    """All losses of one call."""
    draw, progress, found = random.Random(seed), Progress("losses"), []
    async with burning(network(name, sets, every), pnodes=4, members=3, lease_s=lease_s, seed=seed) as engine:
        for number in range(kills):
            found.append(await one_loss(engine, draw, how))
            progress(
                number + 1,
                kills,
                f"noticed after {found[-1]['noticed_s']:.1f} s, new step {found[-1]['new_step_s']:.1f} s",
            )
    return found


def table(entries: list[dict[str, Any]]) -> str:
    """All losses of one kind so far, as Markdown."""
    kills = [kill for entry in entries for kill in entry["kills"]]
    last = entries[-1]
    lines = [
        f"{len(kills)} times {HOW[last['how']]}, lease {last['lease_s']:g} s, {last['network']}, saved every "
        f"{last['every']} steps; {last['machine']}", "",
        "| | median | p95 | longest |", "|---|---|---|---|",
    ]  # fmt: skip
    for kill in kills:
        kill["rest_s"] = kill["new_step_s"] - kill["noticed_s"]
    for label, key in ROWS.items():
        values = [kill[key] for kill in kills]
        middle, high = statistics.median(values), percentile(values, 0.95)
        lines.append(f"| {label} | {middle:.1f} | {high:.1f} | {max(values):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=tuple(HOW), default="kill")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--network", default="gpt-char")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    kills = asyncio.run(
        measure(options.how, options.kills, options.lease, options.network, options.sets, options.every, options.seed)
    )
    entry = {
        "how": options.how, "kills": kills, "lease_s": options.lease, "network": options.network,
        "every": options.every, "sets": options.sets, "seed": options.seed, "machine": machine(),
    }  # fmt: skip
    entries = append(options.out, entry)
    for how in HOW:
        if same := [entry for entry in entries if entry["how"] == how]:
            print(table(same), end="\n\n")


if __name__ == "__main__":
    main()
