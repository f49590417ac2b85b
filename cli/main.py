"""Entry point of `dcnr`. Nothing but the standard library is imported before signals are dealt with."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command; the process exits with its code."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))  # there is nothing to clean up yet
    from cli import running
    from cli.terminal import printable_streams
    from cli.tree import app

    printable_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running.on_sigterm()
    try:
        app()
    except (KeyboardInterrupt, BrokenPipeError) as problem:
        sys.exit(running.report(problem))


if __name__ == "__main__":
    main()
