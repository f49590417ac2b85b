"""One PNode slowed tenfold: who else feels it?

Network A ("alone") runs on p1, network B ("pair") on p2 and p3. Then p3 is throttled to a tenth (SIGSTOP and SIGCONT,
90 ms of each 100 ms stopped). Printed: A's rate during the throttling against before (target: at least 0.95), B's rate,
and the growth of each process's memory (bounded queues: nothing piles up before the slow one).

    python -m benchmarks.slow_pnode [--seconds 20]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.local_cluster import LocalCluster
from networks.load import load

PERIOD_S = 0.1


def throttle(process: psutil.Process, share: float, stop: threading.Event) -> None:
    """Let a process run only this share of the time."""
    try:
        while not stop.is_set():
            process.send_signal(signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            process.send_signal(signal.SIGCONT)
            time.sleep(PERIOD_S * share)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def rate(cluster: LocalCluster, name: str, seconds: float) -> float:
    """Steps per second over a while."""
    before, start = cluster.session(name)["step"], time.monotonic()
    time.sleep(seconds)
    after = cluster.session(name)["step"]
    return float(after - before) / (time.monotonic() - start)


def pinned(folder: Path, name: str, source: str, pnodes: list[str]) -> Path:
    """A copy of a shipped network with its nodes pinned to these PNodes, in equal parts."""
    text = (Path(__file__).parent.parent / "networks" / f"{source}.yaml").read_text()
    nodes = [str(node.id) for node in load(source, vars={"vocab": 96} if "gpt" in source else {}).graph.nodes]
    places = {node: pnodes[place * len(pnodes) // len(nodes)] for place, node in enumerate(nodes)}
    path = folder / f"{name}.yaml"
    path.write_text(text.replace(f"name: {source}", f"name: {name}") + f"\nplace: {json.dumps(places)}\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalCluster(3) as cluster:
        for name, pnodes in (("alone", ["p1"]), ("pair", ["p2", "p3"])):
            path = pinned(Path(folder), name, "mlp-digits", pnodes)
            cluster.dcnr("train", str(path), "--steps", "1000000", "-d")
            cluster.wait(f"{name}-1", 50)
        processes = cluster.processes()
        before = {name: rate(cluster, f"{name}-1", options.seconds) for name in ("alone", "pair")}
        memory = {name: process.memory_info().rss for name, process in processes.items()}
        stop = threading.Event()
        thread = threading.Thread(target=throttle, args=(processes["p3"], 0.1, stop))
        thread.start()
        try:
            time.sleep(2)
            during = {name: rate(cluster, f"{name}-1", options.seconds) for name in ("alone", "pair")}
            grown = {name: process.memory_info().rss / memory[name] - 1 for name, process in processes.items()}
        finally:
            stop.set()
            thread.join()
        after = {name: rate(cluster, f"{name}-1", options.seconds) for name in ("alone", "pair")}
        for name in ("alone-1", "pair-1"):
            cluster.dcnr("stop", name)
    for name in before:
        print(
            f"{name:<6} {before[name]:8.1f} steps/s before, {during[name]:8.1f} while p3 runs a tenth "
            f"({during[name] / before[name]:.2f}), {after[name]:8.1f} after"
        )
    print("memory while throttled:", {name: f"{share:+.1%}" for name, share in grown.items()})
    print(f"alone keeps {during['alone'] / before['alone']:.2f} of its rate (target 0.95)")


if __name__ == "__main__":
    main()
