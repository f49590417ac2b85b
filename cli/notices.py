"""Who is awaited while a command that shows something else goes on: on standard error, for as long as it lasts.

A live terminal has one line that moves and goes away; anything else gets a line when the wait begins, when somebody
else is awaited, and every ten seconds. With `-o json` nothing is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cli.terminal import Terminal, literal, moves_cursor
from cli.waits import about

EVERY_S = 10.0


class Notice:
    """One wait at a time. `before` and `after` surround it: what is printed there must not mix with the moving line."""

    def __init__(
        self,
        terminal: Terminal,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._terminal = terminal
        self._before, self._after = before, after
        self._shown = False
        self._status: Any = None
        self._said = 0.0
        self._about = ""

    def show(self, text: str) -> None:
        """This is awaited now; called again and again while it is."""
        if self._terminal.json:
            return
        if not self._shown:
            self._shown, self._about = True, ""
            self._before()
        if moves_cursor(self._terminal.err):
            self._draw(text)
            return
        whom, now = about(text), time.monotonic()
        if whom != self._about or now - self._said >= EVERY_S:
            self._about, self._said = whom, now
            self._line(text)

    def over(self, text: str = "") -> None:
        """It came, or will not; `text` says what there is to say of that."""
        if not self._shown:
            return
        self._shown = False
        if self._status is not None:
            self._status.stop()
            self._status = None
        if text:
            self._line(text)
        self._after()

    def _line(self, text: str) -> None:
        self._terminal.err.write(literal(text) + "\n")
        self._terminal.err.flush()

    def _draw(self, text: str) -> None:
        from rich.text import Text

        shown = Text(literal(text), style="dim")
        if self._status is not None:
            self._status.update(shown)
            return
        from rich.console import Console

        console = Console(file=self._terminal.err, highlight=False, markup=False, emoji=False)
        self._status = console.status(shown, spinner="dots")
        self._status.start()
