"""`python -m tests.fuzz`: campaigns of broken and hostile input against one reader, or all.

python -m tests.fuzz header --cases 20000000 --jobs 2     changed at random from valid inputs, by seed
python -m tests.fuzz yaml --seconds 60 --engine atheris   guided by coverage (pip install -e '.[fuzz]')
python -m tests.fuzz live --cases 100000                  whole messages to a PNode, over a real socket
python -m tests.fuzz --list                               the targets
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.engine import Figures, campaign, keep_seed

CURRENT_BYTES = 2 << 20
FOR_EVER = 1 << 60
ROOT = Path(__file__).parent.parent.parent


def parser() -> argparse.ArgumentParser:
    """The command line."""
    told = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    told.add_argument("target", nargs="?", default="", help="one of --list, `live`, or `all`")
    told.add_argument("--list", action="store_true", help="name the targets")
    told.add_argument("--cases", type=int, default=0, metavar="N", help="end after N cases")
    told.add_argument("--seconds", type=float, default=0.0, metavar="S", help="end after S seconds (10)")
    told.add_argument("--seed", default="0", help="another seed gives other cases")
    told.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    told.add_argument("--engine", choices=("mutation", "atheris"), default="mutation")
    told.add_argument("-o", "--output", choices=("text", "json"), default="text")
    told.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing broke; 1: something did."""
    given = parser().parse_args(argv)
    if not given.cases and not given.seconds:
        given.seconds = 10.0
    if given.worker:
        return _work(given)
    from tests.fuzz.targets import TARGETS

    if given.list or not given.target:
        for target in TARGETS.values():
            print(f"{target.name:12} {target.what}")
        print(f"{'live':12} whole messages to a PNode, over a real socket")
        return 0
    good = True
    for name in [*TARGETS] if given.target == "all" else [given.target]:
        if name not in TARGETS and name != "live":
            print(f"no target {name!r}; python -m tests.fuzz --list", file=sys.stderr)
            return 2
        found = _spread(name, given)
        good &= found.good
        if given.output == "json":
            print(json.dumps({"target": name, **asdict(found)}), flush=True)
        else:
            print("\n".join(found.lines(name)), flush=True)
    return 0 if good else 1


def _spread(name: str, given: argparse.Namespace) -> Figures:
    """The campaign in processes of its own: what kills one of them is found by the case that it was at."""
    whole = Figures()
    with tempfile.TemporaryDirectory() as folder:
        running = [_start(name, number, given, Path(folder)) for number in range(given.jobs)]
        for process, current in running:
            said = process.communicate()[0].decode()
            lines = [line for line in said.splitlines() if line.startswith("{")]
            if lines:
                whole.add(Figures(**json.loads(lines[-1])))
            else:
                size = int.from_bytes(current.read_bytes()[:8], "little")
                why = f"the process ended with {process.returncode}"
                whole.count(why)
                if size:
                    whole.saved.append(keep_seed(name, current.read_bytes()[8 : 8 + size], why))
    return whole


def _start(name: str, number: int, given: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    current = folder / str(number)
    current.write_bytes(bytes(CURRENT_BYTES))
    cases = -(-given.cases // given.jobs)
    command = [
        sys.executable, "-m", "tests.fuzz", name, "--worker", str(current), "--cases", str(cases), "--seconds",
        str(given.seconds), "--seed", f"{given.seed}.{number}", "--engine", given.engine,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment), current


def _work(given: argparse.Namespace) -> int:
    """One process of a campaign; its figures are the last line on standard output."""
    cases, seconds = given.cases or FOR_EVER, given.seconds or float(FOR_EVER)
    if given.target == "live":
        from tests.fuzz import live

        found = live.campaign(cases=cases, seconds=seconds, seed=given.seed)
    elif given.engine == "atheris":
        from tests.fuzz import guided

        guided.campaign(given.target, cases=cases, seconds=seconds, seed=given.seed)
        return 0
    else:
        from tests.fuzz.targets import TARGETS

        with open(given.worker, "r+b") as file, mmap.mmap(file.fileno(), CURRENT_BYTES) as current:
            found = campaign(
                TARGETS[given.target], cases=cases, seconds=seconds, seed=given.seed, current=current, keep=keep_seed
            )
    print(json.dumps(asdict(found)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
