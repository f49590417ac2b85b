"""100 tiny VNodes in one process against a plain nn.Sequential: forward, backward and update, one thread.

Both train the same model (50 linear layers of 32, 50 activations, cross entropy) with torch's fused AdamW; the plain
side neither clips nor measures gradients. Steps alternate A B A B …; the figure is the median of the ratios of CPU
time (of one thread), so that other work on the machine counts little.

    python -m benchmarks.tiny_vnodes [--pairs 400] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from networks.load import load
from networks.network import Network
from pnode.reference import Reference

LAYERS, WIDTH, ROWS = 50, 32, 8
TARGET = 0.9


def network_of(layers: int) -> Network:
    """`layers` linear layers, each followed by an activation."""
    nodes, names = [], []
    for layer in range(layers):
        nodes.append(f"  - {{id: fc{layer}, type: linear, in: {WIDTH}, out: {WIDTH}}}")
        nodes.append(f"  - {{id: act{layer}, type: tanh}}")
        names += [f"fc{layer}", f"act{layer}"]
    text = "\n".join(
        [
            "version: 1",
            "name: tiny",
            "inputs:",
            f"  x: {{dtype: float32, shape: [batch, {WIDTH}]}}",
            "  targets: {dtype: int64, shape: [batch]}",
            "nodes:",
            *nodes,
            "  - {id: loss, type: cross_entropy}",
            "edges:",
            f"  - x -> {' -> '.join(names)} -> loss.logits",
            "  - targets -> loss.targets",
            f"outputs: {{logits: {names[-1]}, loss: loss}}",
            "train:",
            f"  batch: {ROWS}",
            "  steps: 10",
            "  optimizer: {type: adamw, lr: 1e-4}",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.yaml"
        path.write_text(text)
        return load(path)


class Source:
    """The same batch every time."""

    def __init__(self) -> None:
        self.tensors = {"x": torch.randn(ROWS, WIDTH), "targets": torch.randint(WIDTH, (ROWS,))}

    def batch(self, split: str, step: int, microbatch: int, replica: int = 0) -> dict[str, Tensor]:
        """One microbatch."""
        return self.tensors


def plain(source: Source) -> Callable[[int], None]:
    """A step of the same model as a user would write it."""
    parts: list[nn.Module] = []
    for _ in range(LAYERS):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model, criterion = nn.Sequential(*parts), nn.CrossEntropyLoss(ignore_index=-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step(number: int) -> None:
        loss = criterion(model(source.tensors["x"]), source.tensors["targets"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def main() -> None:
    """Measure and print one JSON object; exit code 1 below the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="also print where our step spends its time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = Source()
    reference = Reference(network_of(LAYERS), source)  # type: ignore[arg-type]
    theirs, ours = plain(source), reference.step
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(arguments.pairs + 30):
        for side, step in zip(times, (ours, theirs), strict=True):
            start = time.process_time()
            step(number)
            side.append(time.process_time() - start)
    ratios = [b / a for a, b in zip(times[0][30:], times[1][30:], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    result = {
        "vnodes": 2 * LAYERS,
        "ours_us": round(statistics.median(times[0][30:]) * 1e6),
        "plain_us": round(statistics.median(times[1][30:]) * 1e6),
        "speed_against_plain": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "target": TARGET,
    }
    print(json.dumps(result))
    if arguments.profile:
        profile = cProfile.Profile()
        profile.enable()
        for number in range(200):
            ours(number)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    sys.exit(0 if middle >= TARGET else 1)


if __name__ == "__main__":
    main()
