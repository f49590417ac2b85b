"""The command reference in docs/cli.md, made from the commands themselves: `python -m cli.reference docs/cli.md`.

The hand-written part of the page ends at the marker; all below it is made here. A test checks that nothing is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKER = "<!-- made by python -m cli.reference; don't edit below -->"


def commands(command: Any, path: tuple[str, ...] = ("dcnr",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its path."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from commands(child, (*path, name))


def reference() -> str:
    """The generated part of the page."""
    import typer

    from cli.tree import app

    root = typer.main.get_command(app)
    sections = [section(path, command) for path, command in commands(root)]
    return MARKER + "\n\n" + "\n".join(sections)


def section(path: tuple[str, ...], command: Any) -> str:
    """One command: usage, what it does, arguments and options."""
    from cli.help import usage_of

    ctx = command.context_class(command, info_name=" ".join(path))
    lines = [f"### {' '.join(path)}", "", "```", usage_of(command, ctx), "```", ""]
    lines += [" ".join(part.split()) + "\n" for part in (command.help or "").split("\n\n") if part.strip()]
    records = [param.get_help_record(ctx) for param in command.get_params(ctx) if param.name != "help"]
    rows = [(cell(record[0].replace(" range>", ">")), cell(record[1])) for record in records if record]
    if rows:
        lines += ["| | |", "| --- | --- |"]
        lines += [f"| `{left}` | {right} |" for left, right in rows]
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def page(current: str) -> str:
    """The page with its generated part made anew."""
    return current.partition(MARKER)[0].rstrip() + "\n\n" + reference()


def main() -> None:
    """Rewrite the file named on the command line."""
    target = Path(sys.argv[1])
    target.write_text(page(target.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
