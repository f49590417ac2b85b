"""What reaches the terminal, and in which form; the only place that prints.

Three forms: a real terminal gets colour, tables and moving bars; anything else (a pipe, a file, `TERM=dumb`) gets plain
lines, flushed one by one, without escape codes; `-o json` gets JSON alone on standard output. Text that came from a
peer, a store or a file is shown literally: it is never parsed as markup, and its control characters are escaped.
Errors and waiting notices go to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Format = Literal["text", "json"]

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPES |= {ord("\t"): "    ", ord("\n"): "\\n", ord("\r"): "\\r"}
_UNSEEN = (0x061C, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_ESCAPES |= {code: f"\\u{code:04x}" for code in _UNSEEN}
_ESCAPES |= {code: f"\\U{code:08x}" for code in range(0xE0000, 0xE0080)}
BETWEEN = 3  # columns between two columns of a table
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_UNSEEN)}
_IN_JSON |= {code: f"\\udb40\\udc{code & 0xFF:02x}" for code in range(0xE0000, 0xE0080)}
"""JSON escapes the rest of them itself."""

_BLOCK = {code: text for code, text in _ESCAPES.items() if code != ord("\n")}


def literal(text: object) -> str:
    """One line, safe to print: control characters, bidirectional overrides and letters without a width are visible."""
    return str(text).translate(_ESCAPES)


def literal_block(text: object) -> str:
    """The same for text of several lines."""
    return str(text).translate(_BLOCK)


class Terminal:
    """Standard output and error of this process, in the form asked for."""

    def __init__(self, form: Format = "text", *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.form = form
        self._stdout = stdout
        self._stderr = stderr
        self._console: Console | None = None

    @property
    def json(self) -> bool:
        """JSON alone goes to standard output."""
        return self.form == "json"

    @property
    def out(self) -> TextIO:
        """Standard output."""
        return self._stdout or sys.stdout

    @property
    def err(self) -> TextIO:
        """Standard error."""
        return self._stderr or sys.stderr

    @property
    def live(self) -> bool:
        """Standard output is a terminal that can move its cursor, and text is wanted."""
        return not self.json and moves_cursor(self.out)

    @property
    def console(self) -> Console:
        """rich's console on standard output."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self.out, highlight=False, markup=False, emoji=False, soft_wrap=not self.live)
        return self._console

    def line(self, text: object = "", *, style: str | None = None) -> None:
        """One line of text for a person (nothing with `-o json`)."""
        if self.json:
            return
        self._text(literal(text), style)

    def block(self, text: object, *, style: str | None = None) -> None:
        """Text of several lines."""
        if not self.json:
            self._text(literal_block(text), style)

    def _text(self, text: str, style: str | None) -> None:
        if self.live:
            from rich.text import Text

            self.console.print(Text(in_lines(text, self.console.width), style=style or ""), soft_wrap=True)
        else:
            self.out.write(text + "\n")
            self.out.flush()

    def raw(self, text: str) -> None:
        """Text as it is, without an end of line: generated text that streams."""
        self.out.write(literal_block(text))
        self.out.flush()

    def next(self, *commands: str) -> None:
        """What to do next, after a change of state."""
        if not self.json and commands:
            self._text(literal("next: " + "   ".join(commands)), "dim cyan")

    def record(self, value: Any, *, indent: bool = True) -> None:
        """A value as JSON on standard output: a document, or with `indent=False` one line of a stream."""
        import msgspec

        data = msgspec.json.encode(jsonable(value), enc_hook=str)
        if indent:
            data = msgspec.json.format(data, indent=2)
        self.out.write(data.decode().translate(_IN_JSON) + "\n")
        self.out.flush()

    def render(self, renderable: RenderableType) -> None:
        """Something of rich's; only on a live terminal."""
        self.console.print(renderable)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        empty: str = "",
        styles: Any = None,
        spare: Sequence[str] = (),
    ) -> None:
        """Rows under headings; a heading that ends in ">" is aligned to the right. `empty`: what to say for no rows.

        `styles` maps (row, column) to rich's style name. `spare`: headings of the columns that a narrow terminal leaves
        out, the first one first.
        """
        if self.json:
            return
        if not rows:
            self.line(empty)
            return
        right = [name.endswith(">") for name in columns]
        names = [name.rstrip(">") for name in columns]
        cells = [[literal(cell) for cell in row] for row in rows]
        widths = [max(len(row[index]) for row in [names, *cells]) for index in range(len(names))]
        if self.live:
            self._rich_table(names, right, cells, styles or {}, spare)
            return
        for row in [[name.upper() for name in names], *cells]:
            parts = [
                cell.rjust(width) if flush else cell.ljust(width)
                for cell, width, flush in zip(row, widths, right, strict=True)
            ]
            self.line("  ".join(parts).rstrip())

    def _rich_table(
        self, names: list[str], right: list[bool], cells: list[list[str]], styles: Any, spare: Sequence[str]
    ) -> None:
        """As a table, if need be without the spare columns; where even words would not fit, row by row as a list."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        widths = [max(len(row[index]) for row in [names, *cells]) for index in range(len(names))]
        left_out = narrowed(names, widths, spare, self.console.width)
        shown = [index for index, name in enumerate(names) if name not in left_out]
        least = [max(longest_word(row[index]) for row in [names, *cells]) for index in shown]
        room = self.console.width - BETWEEN * (len(shown) - 1)
        fitting = fitted([widths[index] for index in shown], least, room)
        if fitting is None:
            for y, row in enumerate(cells):
                for x, cell in enumerate(row):
                    if cell:
                        name = f"{names[x]}: " if names[x] else ""
                        style = "bold" if x == 0 else styles.get((y, x), "")
                        self._text(("" if x == 0 else "  ") + name + cell, style)
            return
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for index, width in zip(shown, fitting, strict=True):
            table.add_column(names[index], justify="right" if right[index] else "left", width=width)
        for y, row in enumerate(cells):
            table.add_row(*(Text(row[x], style=styles.get((y, x), "")) for x in shown))
        self.console.print(table)
        if left_out:
            self.line(f"left out: {', '.join(left_out)} (a wider terminal, a pipe or -o json has them)", style="dim")

    def warn(self, text: str) -> None:
        """A warning, on standard error."""
        self._error("warning", text, "", "yellow")

    def error(self, text: str, hint: str = "") -> None:
        """A failure in one or two lines, on standard error."""
        self._error("error", text, hint, "bold red")

    def _error(self, word: str, text: str, hint: str, style: str) -> None:
        text, hint = literal_block(text).rstrip(), literal(hint)
        if moves_cursor(self.err):
            from rich.console import Console
            from rich.text import Text

            console = Console(file=self.err, highlight=False, markup=False, emoji=False)
            shown = in_lines(f"{word}: {text}", console.width)
            message: Text = Text.assemble((shown[: len(word) + 1], style), shown[len(word) + 1 :])
            if hint:
                message.append("\n" + in_lines(f"  hint: {hint}", console.width), style="dim")
            console.print(message, soft_wrap=True)
            return
        self.err.write(f"{word}: {text}\n" + (f"  hint: {hint}\n" if hint else ""))
        self.err.flush()

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show, on a live standard error, what is waited for while the body runs."""
        if self.json or not moves_cursor(self.err):
            yield
            return
        from rich.console import Console

        console = Console(file=self.err, highlight=False, markup=False, emoji=False)
        from rich.text import Text

        with console.status(Text(literal(text), style="dim"), spinner="dots"):
            yield


def narrowed(names: Sequence[str], widths: Sequence[int], spare: Sequence[str], columns: int) -> list[str]:
    """Which of `spare`, in its order, a table of these widths has to leave out to fit into `columns`."""
    need = sum(widths) + BETWEEN * (len(widths) - 1)
    left_out: list[str] = []
    for name in spare:
        if need <= columns:
            break
        left_out.append(name)
        need -= widths[names.index(name)] + BETWEEN
    return left_out


def in_lines(text: str, columns: int) -> str:
    """Broken between words; a word that is longer than a line has one of its own, and stays whole to be copied."""
    import textwrap

    lines = [
        textwrap.wrap(
            line, max(1, columns), break_long_words=False, break_on_hyphens=False, replace_whitespace=False,
            expand_tabs=False,
        ) if len(line) > columns else [line]
        for line in text.split("\n")
    ]  # fmt: skip
    return "\n".join(line for parts in lines for line in parts or [""])


def longest_word(text: str) -> int:
    """Columns that the longest word needs."""
    return max(map(len, text.split()), default=0)


def fitted(widths: Sequence[int], least: Sequence[int], columns: int) -> list[int] | None:
    """Widths that together fit into `columns`: the widest are narrowed first, none below `least`. None: they can't."""
    found = list(widths)
    while sum(found) > columns:
        wider = [index for index, width in enumerate(found) if width > least[index]]
        if not wider:
            return None
        index = max(wider, key=found.__getitem__)
        found[index] -= 1
    return found


def jsonable(value: Any) -> Any:
    """Structs as objects with their field names, also those that travel as arrays; the rest as it is."""
    names = getattr(value, "__struct_fields__", None)
    if names is not None:
        return {name: jsonable(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def moves_cursor(stream: TextIO) -> bool:
    """Whether escape codes may be written to `stream`."""
    try:
        if not stream.isatty():
            return False
    except ValueError:  # closed
        return False
    return os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown", "")


def printable_streams() -> None:
    """Let no locale turn a character that it can't show into a failure."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def close_quietly() -> None:
    """After a closed pipe: let nothing be written any more, not even by the interpreter's last flush."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(devnull, stream.fileno())
        except (OSError, ValueError):
            continue
    os.close(devnull)
