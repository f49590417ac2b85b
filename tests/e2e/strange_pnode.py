"""A PNode that does something strange once, in its compute thread, in a forward pass: when a file appears.

    python -m tests.e2e.strange_pnode HOW SECONDS FLAG [options of dcnr-pnode]

It is the shipped daemon; only what a VNode's forward pass costs is another, as with a node that nobody has seen yet.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from pnode.executor import Forwarded, StageExecutor


def release(seconds: float) -> None:
    """A long operation that lets go of the interpreter lock, as torch's do."""
    ctypes.CDLL(None).usleep(int(seconds * 1e6))


def hold(seconds: float) -> None:
    """A long operation that holds it: no other thread of the process runs a line of Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def vanish(seconds: float) -> None:
    """The compute thread is taken away, and Python does not know."""
    ctypes.CDLL(None).pthread_exit(0)


HOW: dict[str, Callable[[float], None]] = {"release": release, "hold": hold, "vanish": vanish}


def main() -> None:
    how, seconds, flag, *options = sys.argv[1:]
    train, infer = StageExecutor.forward, StageExecutor.infer

    def strange() -> None:
        if os.path.exists(flag):
            os.unlink(flag)
            HOW[how](float(seconds))

    def forward(self: StageExecutor, *given: Any) -> Forwarded:
        strange()
        return train(self, *given)

    def answer(self: StageExecutor, *given: Any) -> Any:
        strange()
        return infer(self, *given)

    StageExecutor.forward, StageExecutor.infer = forward, answer  # type: ignore[assignment, method-assign]
    from pnode.main import main as pnode

    pnode(options)


if __name__ == "__main__":
    main()
