"""Entry point of `dcnr`. Nothing but the standard library's smallest is imported before signals are dealt with.

From the first line to the last a signal ends the process with the command's own exit code: before there is anything to
clean up at once, and again once the command is over, for the interpreter's own end would die of the signal.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command; the process exits with its code."""
    _answer_with(130)  # there is nothing to clean up yet
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us; the number must not go to a socket
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    from cli import running
    from cli.terminal import close_quietly, printable_streams
    from cli.tree import app

    printable_streams()
    code = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        running.on_sigterm()
        try:
            app()
        except SystemExit as end:
            code = _code_of(end)
        running.flush()
    except (KeyboardInterrupt, OSError) as problem:
        code = running.report(problem) or 0
    _answer_with(code)
    try:
        running.flush()
    except OSError:
        close_quietly()
    os._exit(code)


def _code_of(end: SystemExit) -> int:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
        return 1
    return end.code or 0


def _answer_with(code: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: os._exit(code))


if __name__ == "__main__":
    main()
