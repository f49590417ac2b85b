"""The mass campaign: `python -m tests.chaos --kills 300 --orchestrator-kills 100 --pauses 100 --doubles 50 --cli 50`.

Real processes on this machine, three small networks, many faults in each run; each run has to end with the hash and the
losses of the undisturbed run. With `--state FILE` it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from pathlib import Path

from cli.chaos.faults import Kind
from tests.chaos.campaign import LINE, Campaign, Wanted, table

NAMES = {
    "kills": Kind.KILL, "orchestrator_kills": Kind.ORCHESTRATOR, "pauses": Kind.PAUSE, "doubles": Kind.DOUBLE,
    "cli": Kind.CLI, "usurps": Kind.USURP, "stores": Kind.STORE, "disks": Kind.DISK, "lines": LINE,
}  # fmt: skip


def main() -> int:
    """Run it; 1 if a run ended otherwise than the undisturbed one, 75 if there is more to be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in NAMES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, metavar="N", help=f"faults: {kind}")
    parser.add_argument("--state", type=Path, default=None, help="where what was done is kept, to go on later")
    parser.add_argument("--store", choices=("local", "seaweed", "both"), default="local")
    parser.add_argument("--lease", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=25, help="at most so many in a run")
    parser.add_argument("--pnodes", type=int, default=6)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--gap", type=float, default=0.7, metavar="SECONDS", help="mean time between two faults")
    parser.add_argument("--no-forks", action="store_true", help="start each daemon anew (slow)")
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--folder", type=Path, default=None, help="for homes and logs; those of failed runs stay")
    parser.add_argument("--table", action="store_true", help="only print what was done so far")
    options = parser.parse_args()
    counts = {str(kind): count for name, kind in NAMES.items() if (count := getattr(options, name))}
    wanted = Wanted(
        counts, options.seed, options.lease, options.store, options.pnodes, options.members, options.faults,
        options.gap, not options.no_forks,
    )  # fmt: skip
    folder = options.folder or Path(tempfile.mkdtemp(prefix="dcnr-campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored: all processes are to be ended
        signal.signal(number, signal.default_int_handler)
    campaign = Campaign(wanted, options.state, folder, lambda text: print(text, flush=True))
    good = True
    if not options.table:
        print(f"seed {options.seed}, lease {options.lease:g} s, homes in {folder}", flush=True)
        try:
            good = campaign.run(max_failures=options.max_failures, seconds=60 * options.minutes)
        except KeyboardInterrupt:
            print(f"interrupted; --state {options.state} goes on after the last whole run", file=sys.stderr)
            return 130
    print("\n" + table(campaign.state, wanted))
    return 1 if not good else 0 if options.table or not campaign.state.left(wanted) else 75


if __name__ == "__main__":
    sys.exit(main())
