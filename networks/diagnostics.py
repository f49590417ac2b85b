"""Errors of a network file: all of them in one run, each with its place, the offending line, a caret and a hint.

Whatever comes from the file is shown literally: control characters, terminal escapes and invisible letters are
written as `\\x1b` or `\\u202e`, and long lines are cut around the fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from wire.errors import BadFileError

MAX_SHOWN = 50
"""How many errors the text of a `NetworkFileError` shows; `.diagnostics` always has all."""

MAX_LINE = 160
MAX_QUOTE = 60
MAX_SUGGESTIONS = 20
MAX_CANDIDATES = 1000


class Source(Protocol):
    """A text that errors can point into."""

    @property
    def name(self) -> str:
        """What errors call it: a path, or the `--set` option."""

    def line_text(self, line: int) -> str:
        """The text of a line, counted from 1; empty beyond the end."""


class Place(Protocol):
    """Anything that knows where it was written (the nodes of a YAML tree do)."""

    @property
    def source(self) -> Source:
        """The text it is in."""

    @property
    def line(self) -> int:
        """Line, from 1."""

    @property
    def column(self) -> int:
        """Column in characters, from 1."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place that is given by numbers."""

    source: Source
    line: int
    column: int


def literal(text: str) -> str:
    """`text` with everything that is not a printable character escaped, so that a terminal shows what is there."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def quote(value: object) -> str:
    """A value from a file in single quotes, escaped and cut to a bearable length."""
    text = str(value)
    cut = text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 1] + "…"
    return f"'{literal(cut)}'"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error of a file. `line` and `column` count from 1; `hint` says what to change."""

    file: str
    line: int
    column: int
    text: str
    source_line: str = ""
    hint: str = ""

    def __str__(self) -> str:
        rows = [f"{literal(self.file)}:{self.line}:{self.column}: {self.text}"]
        if self.source_line.strip():
            shown, caret = _excerpt(self.source_line, self.column)
            rows += [f"    {shown}", f"    {' ' * caret}^"]
        if self.hint:
            rows.append(f"    hint: {self.hint}")
        return "\n".join(rows)


def _excerpt(line: str, column: int) -> tuple[str, int]:
    """A printable part of `line` around `column`, and where the caret goes under it."""
    start = 0
    at = min(max(column - 1, 0), len(line))
    if len(line) > MAX_LINE:
        start = max(0, min(at - MAX_LINE // 2, len(line) - MAX_LINE))
    before, after = line[start:at], line[at : start + MAX_LINE]
    head = "…" if start else ""
    tail = "…" if start + MAX_LINE < len(line) else ""
    shown_before = head + literal(before)
    return shown_before + literal(after) + tail, len(shown_before)


class NetworkFileError(BadFileError):
    """A network file can't be used; `diagnostics` has every error that was found, in file order."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=lambda found: (found.file, found.line, found.column)))
        shown = [str(found) for found in self.diagnostics[:MAX_SHOWN]]
        if len(self.diagnostics) > MAX_SHOWN:
            shown.append(f"… and {len(self.diagnostics) - MAX_SHOWN} more errors")
        super().__init__("\n".join(shown))


class Diagnostics:
    """Collects errors while a file is read; `finish` raises them all."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []
        self._suggestions = 0

    def add(self, place: Place, text: str, hint: str = "") -> None:
        """Note an error at `place`; reading goes on."""
        line_text = place.source.line_text(place.line)
        self.found.append(Diagnostic(place.source.name, place.line, place.column, text, line_text, hint))

    def suggest(self, word: str, known: Iterable[str]) -> str:
        """ "did you mean 'relu'?" when a known word is close, else "". Bounded in time however long the lists are."""
        if self._suggestions >= MAX_SUGGESTIONS or len(word) > MAX_QUOTE:
            return ""
        self._suggestions += 1
        near: list[str] = []
        for candidate in known:
            if abs(len(candidate) - len(word)) <= 3:
                near.append(candidate)
                if len(near) >= MAX_CANDIDATES:
                    break
        best = difflib.get_close_matches(word, near, n=1, cutoff=0.6)
        return f"did you mean {quote(best[0])}?" if best else ""

    def finish(self) -> None:
        """Raise `NetworkFileError` if anything was found."""
        if self.found:
            raise NetworkFileError(self.found)


def one_error(source: Source, line: int, column: int, text: str, hint: str = "") -> NetworkFileError:
    """The error for a fault after which reading can't go on."""
    collector = Diagnostics()
    collector.add(Spot(source, line, column), text, hint)
    return NetworkFileError(collector.found)
