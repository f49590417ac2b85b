"""The quiet numbers: idle CPU of a PNode, lag of its event loop while computing, memory, `dcnr --help`.

python -m benchmarks.steady [--steps 2000]
"""

from __future__ import annotations

import argparse
import resource
import socket
import subprocess
import sys
import time

from benchmarks.local_cluster import LocalCluster, metric

IDLE_S = 30.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def help_cpu_s(runs: int = 5) -> float:
    """CPU seconds of `dcnr --help`, the smallest of some runs."""
    found = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "cli.main", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    print(f"dcnr --help: {help_cpu_s():.3f} CPU-seconds (target under 0.3)", flush=True)
    with LocalCluster(0) as cluster:
        ports = [free_port(), free_port()]
        processes = [
            cluster.add_pnode(f"p{number}", "--threads", "1", "--metrics-port", str(port))
            for number, port in enumerate(ports, 1)
        ]
        time.sleep(3)
        before = [process.cpu_times() for process in processes]
        time.sleep(IDLE_S)
        after = [process.cpu_times() for process in processes]
        for number, (a, b) in enumerate(zip(before, after, strict=True), 1):
            share = (b.user + b.system - a.user - a.system) / IDLE_S
            print(f"p{number} idle: {share:.2%} of a core (target under 1 %)", flush=True)
        cluster.dcnr("train", "gpt-char", "--pnodes", "2", "--steps", str(options.steps), "-d")
        memory: list[list[int]] = []
        for step in range(200, options.steps + 1, 200):
            cluster.wait("gpt-char-1", min(step, options.steps))
            memory.append([process.memory_info().rss for process in processes])
            lags = [metric(port, "dcnr_loop_lag_p99_seconds") for port in ports]
            sizes = " ".join(f"{rss / 1e6:.1f}" for rss in memory[-1])
            print(
                f"step {step}: MB {sizes}, loop lag p99 ms {' '.join(f'{lag * 1e3:.1f}' for lag in lags)}", flush=True
            )
    for number in range(2):
        first, last = memory[1][number], memory[-1][number]
        print(f"p{number + 1}: memory {last / first - 1:+.2%} from step 400 to {options.steps} (target within 2 %)")
    print(f"loop lag p99 while computing: {max(lags) * 1e3:.1f} ms (target under 20 ms)")


if __name__ == "__main__":
    main()
