"""Speed of a two-PNode pipeline against what a user would run instead, in one sitting.

Each round runs, one after the other: plain torch in one process with two threads; torch.distributed.pipelining (1F1B,
gloo) over two ranks with one thread each; two independent plain processes with one thread each (what the machine can
give: times M / (M + P - 1) it is the bubble bound); and DCNR on two PNodes with one thread each. All train the same
GPT (4 layers, 256 wide, context 128, untied head, batch 8 x 4). Quoted are medians of the ratios within a round.

    python -m benchmarks.pipeline [--rounds 5] [--steps 30]
    python -m benchmarks.pipeline --profile         # where the time of a step goes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.local_cluster import LocalCluster
from benchmarks.pipeline_profile import table

HERE = Path(__file__).parent
NETWORK = HERE / "gpt-4x256.yaml"
PEERS = HERE / "pipeline_peers.py"
MICROBATCHES, PNODES = 8, 2
TOKENS = 32 * 128
WARM_STEPS = 5


def peer(*arguments: str) -> float:
    """Tokens per second of one peer run."""
    out = subprocess.run([sys.executable, PEERS, *arguments], check=True, capture_output=True, text=True).stdout
    return float(json.loads(out.splitlines()[-1])["tokens_per_s"])


def independent(steps: int) -> float:
    """Tokens per second of two plain processes, one thread each, at the same time."""
    command = [sys.executable, str(PEERS), "single", "--threads", "1", "--steps", str(steps)]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in pair]
    return sum(float(json.loads(out.splitlines()[-1])["tokens_per_s"]) for out in outputs)


def ours(cluster: LocalCluster, network: Path, steps: int) -> float:
    """Tokens per second of DCNR: the median step after warm-up."""
    records = cluster.train(network, "--pnodes", str(PNODES), "--steps", str(steps))
    return TOKENS / statistics.median(record["seconds"] for record in records[WARM_STEPS:])


def profile(network: Path, steps: int) -> str:
    """Where the time goes, as Markdown; the stop watches themselves cost about 1 %."""
    with tempfile.TemporaryDirectory(prefix="dcnr-profile-") as folder:
        files = {f"p{number + 1}": Path(folder) / f"p{number + 1}.json" for number in range(PNODES)}
        with LocalCluster(0) as cluster:
            for name, file in files.items():
                program = ("benchmarks.profiled_pnode", str(file))
                cluster.add_pnode(name, "--threads", "1", program=program)
            rate = ours(cluster, network, steps)
        raws = {name: json.loads(file.read_text()) for name, file in files.items()}
    return f"{rate:.0f} tokens per second\n\n{table(raws, MICROBATCHES)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--network", type=Path, default=NETWORK)
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes; nothing else")
    options = parser.parse_args()
    if options.profile:
        print(profile(options.network, options.steps))
        return
    steps = str(options.steps)
    rows = []
    with LocalCluster(PNODES) as cluster:
        for number in range(options.rounds):
            row = {
                "two_threads": peer("single", "--threads", "2", "--steps", steps),
                "torch_1f1b": peer("pipeline", "--ranks", str(PNODES), "--steps", steps),
                "bubble_bound": independent(options.steps) * MICROBATCHES / (MICROBATCHES + PNODES - 1),
                "dcnr": ours(cluster, options.network, options.steps),
            }
            rows.append(row)
            print(json.dumps({"round": number, **{name: round(rate) for name, rate in row.items()}}), flush=True)
    print(f"{'against':<14} {'target':>6} {'median':>7}   min    max")
    for name, target in (("two_threads", 1.0), ("torch_1f1b", 1.0), ("bubble_bound", 0.88)):
        ratios = [row["dcnr"] / row[name] for row in rows]
        print(f"{name:<14} {target:>6.2f} {statistics.median(ratios):>7.3f} {min(ratios):>6.3f} {max(ratios):>6.3f}")


if __name__ == "__main__":
    main()
