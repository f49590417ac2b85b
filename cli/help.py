"""Help pages: two columns in the terminal's width, with colour where there is a terminal.

Written by hand instead of with rich, whose import alone would take half of what `dcnr --help` may take.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

BOLD, CYAN, DIM, YELLOW = "1", "36", "2", "33"
_NAME_COLUMNS = 30


def width() -> int:
    """Columns to fill: the terminal's, between 60 and 110."""
    return max(60, min(110, shutil.get_terminal_size((96, 24)).columns))


def coloured(text: str, code: str) -> str:
    """`text` in a colour, where colours can be shown."""
    wanted = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "") and "NO_COLOR" not in os.environ
    return f"\x1b[{code}m{text}\x1b[0m" if wanted else text


def page(command: Any, ctx: typer.Context) -> str:
    """The whole help page of a command."""
    lines = [f"{coloured('Usage:', YELLOW)} {coloured(usage_of(command, ctx), BOLD)}", ""]
    lines += [*paragraphs(command.help or ""), ""]
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            record = (record[0].replace(" range>", ">"), record[1])
            (arguments if param.param_type_name == "argument" else options).append(record)
    for title, records in (("Arguments", arguments), ("Options", options)):
        if records:
            lines += section(title, records)
    if isinstance(command, TyperGroup):
        for title, names in panels(command, ctx).items():
            lines += section(title, names)
    if command.epilog:
        lines += [*paragraphs(command.epilog), ""]
    return "\n".join(lines).rstrip() + "\n"


def usage_of(command: Any, ctx: Any) -> str:
    """How the command is called, in one line."""
    return " ".join([ctx.command_path, *(_plain(piece) for piece in command.collect_usage_pieces(ctx))])


def _plain(piece: str) -> str:
    """`{NAME…}...` of something needed and repeatable as NAME…; `[[NAME]...]` as [NAME]."""
    return piece.removesuffix("...")[1:-1] if piece.startswith(("{", "[[")) else piece


def panels(group: TyperGroup, ctx: typer.Context) -> dict[str, list[tuple[str, str]]]:
    """The sub-commands with the first sentence of their help, by panel, in the order of the program."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command: Any = group.get_command(ctx, name)
        if command is None or command.hidden:
            continue
        title = getattr(command, "rich_help_panel", None)
        about = (command.help or "").split("\n\n")[0].replace("\n", " ")
        found.setdefault(title if isinstance(title, str) else "Commands", []).append((name, about))
    return found


def paragraphs(text: str) -> list[str]:
    """Paragraphs, wrapped."""
    parts = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    return "\n\n".join("\n".join(wrapped(part, width())) for part in parts).split("\n")


def wrapped(text: str, columns: int) -> list[str]:
    """Lines of whole words; one that is longer than a line has a line of its own."""
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)


def section(title: str, records: Iterable[tuple[str, str]]) -> list[str]:
    """A heading and two columns."""
    rows = list(records)
    column = min(_NAME_COLUMNS, max(len(name) for name, _ in rows)) + 4
    lines = [coloured(f"{title}:", YELLOW)]
    for name, about in rows:
        about_lines = wrapped(about, width() - column) or [""]
        head = "  " + coloured(name, CYAN)
        if len(name) + 4 > column:
            lines.append(head)
        else:
            lines.append((head + " " * (column - 2 - len(name)) + about_lines.pop(0)).rstrip())
        lines += [" " * column + line for line in about_lines]
    return [*lines, ""]


class Command(TyperCommand):
    """A command with our help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write it."""
        formatter.write(page(self, ctx))


class Group(TyperGroup):
    """A group with our help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write it."""
        formatter.write(page(self, ctx))
