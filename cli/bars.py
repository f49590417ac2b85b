"""A bar for work that this process does itself: packing data, evaluating, comparing. Written to standard error.

Without a terminal there is at most one line every ten seconds; with `-o json` nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli import units
from cli.terminal import Terminal, literal, moves_cursor

EVERY_S = 10.0


@contextmanager
def counting(terminal: Terminal, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with how much is done; `total` 0: not known yet."""
    with bar(terminal) as moved:
        yield lambda done: moved(text, done, total)


@contextmanager
def bar(terminal: Terminal) -> Iterator[Callable[[str, int, int], None]]:
    """Yields `moved(text, done, total)`, for work in several phases."""
    if terminal.json:
        yield lambda text, done, total: None
        return
    if moves_cursor(terminal.err):
        with _live(terminal) as moved:
            yield moved
        return
    began = said = time.monotonic()

    def plain(text: str, done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < EVERY_S:
            return
        said = now
        whole = f" of {units.count(total)}" if total else ""
        left = f", {units.duration((now - began) / done * (total - done))} left" if 0 < done < total else ""
        terminal.err.write(f"{literal(text)}: {units.count(done)}{whole}{left}\n")
        terminal.err.flush()

    yield plain


@contextmanager
def _live(terminal: Terminal) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(file=terminal.err, highlight=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def moved(text: str, done: int, total: int) -> None:
            progress.update(task, description=literal(text), completed=done, total=total or None)

        yield moved
