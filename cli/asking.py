"""A question to the person at the terminal, before something is done that can't be taken back."""

from __future__ import annotations

import sys

from cli.terminal import Terminal, literal
from wire.errors import DCNRError, UsageError


def confirm(terminal: Terminal, question: str) -> None:
    """Ask whether to delete. Raises `UsageError` if nobody is there to answer, `DCNRError` if the answer is no."""
    if not anybody():
        raise UsageError("this deletes something, and nobody is here to ask", hint="--yes says it is meant")
    if not agreed(terminal, question):
        raise DCNRError("nothing was deleted")


def anybody() -> bool:
    """Whether a person can answer."""
    return sys.stdin is not None and sys.stdin.isatty()


def agreed(terminal: Terminal, question: str) -> bool:
    """Ask on standard error; only y or yes is a yes."""
    terminal.err.write(f"{literal(question)} [y/N] ")
    terminal.err.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        terminal.err.write("\n")
        raise
