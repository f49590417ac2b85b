"""Does a step take as long as the planner says? Three placements of one GPT on two PNodes with one thread each.

    python -m benchmarks.placement [--steps 20]

Printed for each placement: predicted and measured step time and their ratio (target: within 25 %).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.local_cluster import LocalCluster
from networks.load import load

SOURCE = Path(__file__).parent / "gpt-4x256.yaml"
CUTS = {"balanced": "h.2.ln1", "a quarter first": "h.1.ln1", "all but the head first": "ln_f"}


def pinned(folder: Path, name: str, first_of_p2: str) -> Path:
    """A copy of the network with every node from `first_of_p2` on pinned to p2, those before to p1."""
    nodes = [str(node.id) for node in load(SOURCE, vars={"vocab": 512}).graph.nodes]
    cut = nodes.index(first_of_p2)
    places = {node: "p1" if place < cut else "p2" for place, node in enumerate(nodes)}
    path = folder / f"{name}.yaml"
    path.write_text(SOURCE.read_text().replace("name: gpt-4x256", f"name: {name}") + f"\nplace: {json.dumps(places)}\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, LocalCluster(2) as cluster:
        for number, (what, first) in enumerate(CUTS.items()):
            path = pinned(Path(folder), f"cut-{number}", first)
            predicted = float(cluster.json("plan", str(path), "--pnodes", "2")["step_s"])
            records = cluster.train(path, "--pnodes", "2", "--steps", str(options.steps))
            measured = statistics.median(record["seconds"] for record in records[5:])
            worst = max(worst, abs(predicted / measured - 1))
            print(
                f"{what:<24} predicted {predicted * 1e3:7.1f} ms  measured {measured * 1e3:7.1f} ms  "
                f"ratio {predicted / measured:.2f}",
                flush=True,
            )
    print(f"largest difference {worst:.0%} (target 25 %)")


if __name__ == "__main__":
    main()
