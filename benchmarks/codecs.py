"""Loss after some steps, and bytes between PNodes per step, without codec, with bf16 and with int8.

    python -m benchmarks.codecs [--steps 100] [--network gpt-char]

One process trains, rounding on the edges that a run on three equal PNodes codes (50 Mbit/s, 10 ms): the numbers are
those of the distributed run. The bytes are those of the planner's forecast, which counts coded frames without headers.
"""

from __future__ import annotations

import argparse

import torch

from cli.local import batches
from cli.preparing import Overrides, prepare
from cli.starting import data_cache
from cli.terminal import Terminal
from orchestrator.placement import plan
from orchestrator.work import Machine, work_of
from pnode.reference import Reference

PNODES = [Machine(f"p{number}", 2e10, 8 << 30, 50e6 / 8, 0.01) for number in (1, 2, 3)]
LAST = 10


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--network", default="gpt-char")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| codec | loss of step {options.steps} | mean of the last {LAST} | bytes a step | predicted step |")
    print("|---|---|---|---|---|")
    for codec in ("none", "bf16", "int8"):
        prepared = prepare(
            options.network, Overrides.of([f"train.codec={codec}"]), Terminal("text"), cache=data_cache()
        )
        recipe, graph = prepared.network.recipe, prepared.network.graph
        work = work_of(graph, batch=recipe.batch, microbatches=recipe.microbatches, codec=recipe.codec)
        forecast = plan(work, PNODES, pnodes=len(PNODES)).forecast
        reference = Reference(prepared.network, batches(prepared), groups=forecast.coded)
        losses = [reference.step(step).loss for step in range(options.steps)]
        mean = sum(losses[-LAST:]) / len(losses[-LAST:])
        size, step_ms = forecast.total_wire_bytes, forecast.step_s * 1e3
        print(f"| {codec} | {losses[-1]:.4f} | {mean:.4f} | {size:,} | {step_ms:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
