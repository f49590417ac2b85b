"""Entry point of `dcnr`. Signals are dealt with before anything else is imported.

From the first line to the last a signal ends the process with the command's own exit code: before there is anything to
clean up at once, and again once the command is over, for the interpreter's own end would die of the signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself takes long enough for one to come
import os


def _answer_with(code: int | None) -> None:
    """A signal ends the process at once, with this exit code or the signal's own."""
    for number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(number, lambda number, _frame: os._exit(128 + number if code is None else code))


_answer_with(None)  # nobody imports this module but to run it

import sys  # noqa: E402


def main() -> None:
    """Run the command; the process exits with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us; the number must not go to a socket
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    from cli import interrupts, running
    from cli.terminal import close_quietly, printable_streams
    from cli.tree import app

    printable_streams()
    code = 0
    try:
        interrupts.raise_on_signals()
        try:
            app()
        except SystemExit as end:
            code = _code_of(end)
        running.flush()
    except (KeyboardInterrupt, OSError) as problem:
        code = running.report(problem) or 0
    code = interrupts.came() or code
    _answer_with(code)
    interrupts.dealt_with()
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


if __name__ == "__main__":
    main()
