"""A worker for tests of the campaign: no world, but seeds that die, hang, break promises and talk too much.

Seed 13 dies, 14 hangs, 15 breaks a promise, 16 prints; all others are clean.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time

from tests.sim.worker import failure


def main() -> None:
    """Answer on standard output as a real one."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin if isinstance(sys.stdin, io.TextIOBase) else []:
        request = json.loads(line)
        for seed in range(request["first"], request["first"] + request["count"]):
            print(json.dumps({"begin": seed}), file=answers, flush=True)
            if seed == 13:
                print("this is the end", file=sys.stderr, flush=True)
                os._exit(3)
            if seed == 14:
                time.sleep(600)
            if seed == 16:
                print("{ not an answer", flush=True)
            result = failure(seed, "a promise", "broken for the test")
            if seed != 15:
                result["breaches"] = []
            result |= {"faults": {"drop": 2}, "steps": 8, "messages": 100, "visited": ["session created>starting"]}
            print(json.dumps({"result": result}), file=answers, flush=True)
        print(json.dumps({"done": True}), file=answers, flush=True)


if __name__ == "__main__":
    main()
