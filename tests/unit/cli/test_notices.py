"""Who is awaited while text streams: on a terminal, in a file, for a program."""

from __future__ import annotations

import io

import pytest

from cli import notices
from cli.notices import Notice
from cli.terminal import Terminal
from cli.using import _Shown


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_line_at_first_for_somebody_else_and_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(notices.time, "monotonic", lambda: now)
    err = io.StringIO()
    notice = Notice(Terminal(stderr=err))
    for now, who in ((100, "p2"), (101, "p2"), (104, "the store"), (110, "the store"), (114.5, "the store")):
        notice.show(f"waiting for {who}, for {now - 100:.0f} s")
    notice.over("goes on")
    notice.over("goes on")
    assert err.getvalue().splitlines() == [
        "waiting for p2, for 0 s", "waiting for the store, for 4 s", "waiting for the store, for 14 s", "goes on",
    ]  # fmt: skip


def test_a_program_gets_nothing() -> None:
    out, err = io.StringIO(), io.StringIO()
    notice = Notice(Terminal("json", stdout=out, stderr=err))
    notice.show("waiting for p2")
    notice.over("goes on")
    assert out.getvalue() + err.getvalue() == ""


def test_on_a_terminal_the_line_moves_and_the_text_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()  # a person sees both streams on it
    terminal = Terminal(stdout=screen, stderr=screen)
    shown = _Shown(terminal, "def ")
    notice = Notice(terminal, before=shown.interrupt, after=shown.go_on)
    shown.add("f(x):\n  ret")
    notice.show("waiting for p2, for 0 s")
    notice.show("waiting for p2, for 1 s")
    notice.over("goes on in epoch 2")
    shown.add("urn x")
    text = screen.getvalue()
    assert shown.text == "f(x):\n  return x"
    assert text.startswith("def f(x):\n  ret\n"), "the line is ended before the moving one is drawn"
    assert "waiting for p2" in text
    assert text.endswith("goes on in epoch 2\n  return x"), "the line is shown once more, and goes on"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden and shown once"


def test_a_text_in_a_file_is_not_disturbed() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(stdout=out, stderr=err)
    shown = _Shown(terminal, "def ")
    notice = Notice(terminal, before=shown.interrupt, after=shown.go_on)
    shown.add("f(")
    notice.show("waiting for p2, for 0 s")
    notice.over("goes on")
    shown.add("x)")
    assert out.getvalue() == "def f(x)"
