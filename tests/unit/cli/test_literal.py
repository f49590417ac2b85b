"""Text from peers, stores and files: whatever it holds, the terminal shows it and does nothing. Every way to print."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.asking import agreed
from cli.bars import bar
from cli.notices import Notice
from cli.terminal import Terminal

CLI = Path(__file__).parents[3] / "cli"

HOSTILE = [
    "\x1b[2J\x1b[31mgone", "\x1b]0;title\x07", "\x9b31mred", "a\rb", "\x08\x08\x08", "[bold red]x[/]", "[/]",
    "[link=x]y[/link]", "\\[bold]x", "x\\", "\u202etxt.exe", "\u2066x", "\ufeffx", "\u2028x", "\u200bx", "\U000e0041x",
    ":skull:", "{task}", "%s", "\x00", "\x7f",
]  # fmt: skip
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
OURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""What rich itself writes: colours, and the cursor of bars that move."""


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def ways(terminal: Terminal) -> dict[str, Callable[[str], None]]:
    def moving(text: str) -> None:
        with bar(terminal) as moved:
            moved(text, 1, 2)

    def noticed(text: str) -> None:
        notice = Notice(terminal)
        notice.show(text)
        notice.over(text)

    def waited(text: str) -> None:
        with terminal.waiting(text):
            pass

    return {
        "line": terminal.line,
        "block": terminal.block,
        "raw": terminal.raw,
        "next": terminal.next,
        "warn": terminal.warn,
        "error": lambda text: terminal.error(text, text),
        "table": lambda text: terminal.table(["a", "b>"], [[text, 1], ["x", text]]),
        "narrow table": lambda text: terminal.table(["a"] * 30, [[text + "x" * 30] * 30]),
        "waiting": waited,
        "bar": moving,
        "notice": noticed,
        "record": lambda text: terminal.record({text: [text]}),
    }


WAYS = list(ways(Terminal()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("live", [False, True])
def test_every_way_to_print_shows_it_literally(way: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("cli.bars.EVERY_S", 0.0)
    for text in HOSTILE:
        out, err = (Screen(), Screen()) if live else (io.StringIO(), io.StringIO())
        ways(Terminal(stdout=out, stderr=err))[way](text)
        written = out.getvalue() + err.getvalue()
        escapes = OURS.sub("", written) if live else written
        assert not UNSEEN.search(escapes), (text, written)
        for piece in ("\x1b[2J", "\x1b[31m", "\x1b]0"):
            assert piece not in written
        if text.isprintable() and way not in ("record", "narrow table", "waiting"):
            assert text in escapes, (text, written)


def test_json_is_the_same_text_when_it_is_read() -> None:
    out = io.StringIO()
    Terminal("json", stdout=out).record({"all": HOSTILE})
    assert json.loads(out.getvalue()) == {"all": HOSTILE}


def test_a_question_shows_it_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    err = io.StringIO()
    agreed(Terminal(stderr=err), "stop \x1b[2J?")
    assert "\x1b" not in err.getvalue()


def test_nothing_else_prints() -> None:
    """Outside cli/terminal.py text goes through its methods, or through `literal` on its way to rich."""
    wrong: list[str] = []
    for path in sorted(CLI.rglob("*.py")):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            shown = [ast.unparse(argument) for argument in node.args]
            place = f"{path.relative_to(CLI.parent)}:{node.lineno}: {ast.unparse(node)[:100]}"
            if called == "print" and path.name != "main.py":
                wrong.append(place)
            if called in ("Text.from_markup", "rich.print", "Markdown", "Text.from_ansi"):
                wrong.append(place)
            if called.endswith((".err.write", ".out.write", "stdout.write", "stderr.write")):
                constant = isinstance(node.args[0], ast.Constant)
                wrong += [] if constant or "literal" in shown[0] else [place]
            if called == "Text" and shown and "literal(" not in shown[0]:
                wrong += [] if re.fullmatch(r"''|f'\{state\.step\}/.*'", shown[0]) else [place]
    assert not wrong
