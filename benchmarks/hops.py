"""One hop of N bytes from process to process and a flood of them: our whole stack against gRPC and a raw socket.

    python benchmarks/hops.py [--rounds 5] [--sizes 1024 65536 1048576 16777216] [--json]

One-way time is half the median round trip; the flood rate counts messages one way with one answer at the end. The
transports take turns, round by round, and ratios are taken within a round; what is printed is the median over rounds.
Ours is the real bus: typed `Hop` messages, links with acknowledgements, a digest per frame. Needs grpcio (extra bench).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.hop_bus import BusClient
from benchmarks.hop_peers import GrpcClient, SocketClient
from wire.loop import run

MODES = ("socket", "grpc", "dcnr")
LARGE = 64 << 20


def spawn(mode: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and what it printed: its port or address."""
    module = ["benchmarks.hop_bus"] if mode == "dcnr" else ["benchmarks.hop_peers", mode]
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-m", *module], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@dataclass
class Results:
    """Medians over rounds, and of ratios within a round."""

    values: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)

    def add(self, what: str, mode: str, size: int, value: float) -> None:
        """One measurement."""
        self.values.setdefault((what, mode, size), []).append(value)

    def median(self, what: str, mode: str, size: int) -> float:
        """Over rounds."""
        return statistics.median(self.values[(what, mode, size)])

    def ratio(self, what: str, size: int, other: str) -> float:
        """Ours / the other's, median over rounds."""
        ours, theirs = self.values[(what, "dcnr", size)], self.values[(what, other, size)]
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


async def measure(rounds: int, sizes: list[int], say: Callable[[str], None]) -> Results:
    """All measurements, transports taking turns."""
    servers = {mode: spawn(mode) for mode in MODES}
    results = Results()
    clients: dict[str, Any] = {}
    try:
        clients["socket"] = SocketClient(int(servers["socket"][1]))
        clients["grpc"] = GrpcClient(int(servers["grpc"][1]))
        clients["dcnr"] = await BusClient.connect(servers["dcnr"][1])
        for number in range(rounds):
            for size in sizes:
                for mode in _turns(number):
                    results.add("hop_s", mode, size, await clients[mode].hop(size))
                    results.add("flood_bytes_s", mode, size, await clients[mode].flood(size))
            for mode in ("socket", "dcnr") if number % 2 else ("dcnr", "socket"):
                results.add("flood_bytes_s", mode, LARGE, await clients[mode].flood(LARGE))
            results.add("small_per_s", "dcnr", 100, await clients["dcnr"].small_messages())
            waits = sorted(await clients["dcnr"].heartbeats_beside_bulk())
            results.add("heartbeat_p99_s", "dcnr", 8, waits[int(len(waits) * 0.99)])
            say(f"round {number + 1} of {rounds} done")
    finally:
        for client in clients.values():
            await client.close()
        for process, _ in servers.values():
            process.terminate()
        for process, _ in servers.values():
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return results


def _turns(number: int) -> tuple[str, ...]:
    shift = number % len(MODES)
    return (*MODES[shift:], *MODES[:shift])


def goals(results: Results, sizes: list[int]) -> list[tuple[str, float, str, bool]]:
    """(what, value, bound, whether it holds)."""
    found: list[tuple[str, float, str, bool]] = []
    if 1 << 20 in sizes:
        hop = results.ratio("hop_s", 1 << 20, "grpc")
        flood = results.ratio("flood_bytes_s", 1 << 20, "grpc")
        found.append(("hop of 1 MiB, time / gRPC's", hop, "<= 0.5", hop <= 0.5))
        found.append(("flood of 1 MiB, rate / gRPC's", flood, ">= 1.8", flood >= 1.8))
    large = results.ratio("flood_bytes_s", LARGE, "socket")
    small = results.median("small_per_s", "dcnr", 100)
    heartbeat = results.median("heartbeat_p99_s", "dcnr", 8) * 1e3
    found.append(("64 MiB in chunks, rate / raw socket's", large, ">= 1.0", large >= 1.0))
    found.append(("small messages per second", small, ">= 20000", small >= 20_000))
    found.append(("heartbeat beside bulk, p99 in ms", heartbeat, "<= 10", heartbeat <= 10))
    return found


def report(results: Results, sizes: list[int]) -> None:
    """A table for people."""
    columns = f"{'hop us':>10} {'flood MB/s':>11} {'hop/gRPC':>9} {'flood/gRPC':>11} {'flood/socket':>13}"
    print(f"{'bytes':>10} {'':8} {columns}")
    for size in sizes:
        for mode in MODES:
            hop_us = results.median("hop_s", mode, size) * 1e6
            flood = results.median("flood_bytes_s", mode, size) / 1e6
            ratios = ""
            if mode == "dcnr":
                ratios = (
                    f" {results.ratio('hop_s', size, 'grpc'):9.2f} {results.ratio('flood_bytes_s', size, 'grpc'):11.2f}"
                    f" {results.ratio('flood_bytes_s', size, 'socket'):13.2f}"
                )
            print(f"{size:>10} {mode:8} {hop_us:10.1f} {flood:11.1f}{ratios}")
    for mode in ("socket", "dcnr"):
        print(f"{LARGE:>10} {mode:8} {'':10} {results.median('flood_bytes_s', mode, LARGE) / 1e6:11.1f}")
    print()
    for what, value, bound, holds in goals(results, sizes):
        print(f"{'holds ' if holds else 'FAILS '} {what}: {value:.2f} ({bound})")


def main() -> int:
    """Measure and print; 1 if a goal is missed and `--strict` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 64 << 10, 1 << 20, 16 << 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="JSON lines only")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a goal is missed")
    a = parser.parse_args()
    measured: Coroutine[Any, Any, Results] = measure(a.rounds, a.sizes, lambda text: print(text, file=sys.stderr))
    results = run(measured)
    for (what, mode, size), values in results.values.items():
        print(
            json.dumps({"what": what, "mode": mode, "bytes": size, "median": statistics.median(values), "all": values})
        )
    for what, value, bound, holds in goals(results, a.sizes):
        print(json.dumps({"goal": what, "value": value, "bound": bound, "holds": holds}))
    if not a.json:
        print()
        report(results, a.sizes)
    return int(a.strict and not all(holds for *_, holds in goals(results, a.sizes)))


if __name__ == "__main__":
    sys.exit(main())
