"""What is printed: literal text, no escape codes away from a terminal, JSON alone with `-o json`."""

from __future__ import annotations

import io
import json
import re

import pytest
import typer

from cli.help import page
from cli.reference import commands
from cli.running import report
from cli.terminal import Terminal, fitted, literal, literal_block, moves_cursor, narrowed
from cli.tree import app
from wire.errors import BadFileError, UnreachableError, UsageError

ESCAPE = "\x1b"


class FakeTTY(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain() -> tuple[Terminal, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Terminal(stdout=out, stderr=err), out, err


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("p1", "p1"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\tc", "a\\nb    c"),
        ("\u202eevil", "\\u202eevil"),
        ("\x9b2J", "\\x9b2J"),
        ("[bold]x[/]", "[bold]x[/]"),
        ("é 漢", "é 漢"),
    ],
)
def test_text_is_shown_literally(given: str, shown: str) -> None:
    assert literal(given) == shown


def test_a_block_keeps_its_lines() -> None:
    assert literal_block("a\nb\x07") == "a\nb\\x07"


def test_plain_table_is_aligned_and_has_no_escape_codes() -> None:
    terminal, out, _ = plain()
    terminal.table(("name", "size>"), [("a", 5), ("long\x1b[1m", 12345)])
    assert out.getvalue() == "NAME          SIZE\na                5\nlong\\x1b[1m  12345\n"
    assert ESCAPE not in out.getvalue()


def test_an_empty_table_says_so() -> None:
    terminal, out, _ = plain()
    terminal.table(("name",), [], empty="no sessions")
    assert out.getvalue() == "no sessions\n"


def test_markup_in_a_name_is_not_markup_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = FakeTTY()
    terminal = Terminal(stdout=out)
    terminal.table(("name",), [("[bold red]x[/bold red]",)])
    terminal.line("[link=http://evil]y[/link]")
    assert "[bold red]x[/bold red]" in out.getvalue()
    assert "[link=http://evil]y[/link]" in out.getvalue()


def test_json_is_alone_on_standard_output() -> None:
    out = io.StringIO()
    terminal = Terminal("json", stdout=out)
    terminal.line("a note")
    terminal.next("dcnr ps")
    terminal.table(("a",), [("b",)])
    terminal.record({"a": 1, "inf": float("inf")})
    assert json.loads(out.getvalue()) == {"a": 1, "inf": None}


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    out = FakeTTY()
    assert not moves_cursor(out)
    Terminal(stdout=out).line("x", style="red")
    assert out.getvalue() == "x\n"


def test_errors_are_one_or_two_lines() -> None:
    terminal, out, err = plain()
    terminal.error("it is broken\x1b", "mend it")
    assert err.getvalue() == "error: it is broken\\x1b\n  hint: mend it\n"
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (UsageError("x"), 2),
        (BadFileError("x"), 65),
        (UnreachableError("x"), 69),
        (KeyboardInterrupt(), 130),
        (FileNotFoundError(2, "No such file", "f"), 1),
        (ExceptionGroup("g", [UnreachableError("x")]), 69),
    ],
)
def test_exit_codes(problem: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(problem) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="odd") as caught:
        raise ValueError("odd")
    assert report(caught.value) == 1
    shown = capsys.readouterr().err
    assert "a bug in DCNR: ValueError: odd (test_terminal.py:" in shown
    assert len(shown.splitlines()) == 2


def test_a_narrow_terminal_leaves_columns_out_one_by_one() -> None:
    names, widths, spare = ["name", "shape", "note"], [10, 20, 5], ["shape", "note"]
    assert narrowed(names, widths, spare, 41) == []
    assert narrowed(names, widths, spare, 40) == ["shape"]
    assert narrowed(names, widths, spare, 17) == ["shape", "note"]


def words(text: str) -> set[str]:
    return set(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", " ", text).split())


NAMES = ("session", "state", "step>", "loss>", "saved>", "note")
ROWS = [
    (
        "transformer-language-model-17",
        "recovering",
        "123456/200000",
        "1.2345",
        123400,
        "PNode desktop-upstairs is lost",
    ),
    ("gpt-char-1", "running", "7/10", "2.5", 5, "waits for laptop: activation of microbatch 3"),
]


@pytest.mark.parametrize("columns", [30, 45, 60, 80, 200])
def test_words_stay_whole_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    out, err = FakeTTY(), FakeTTY()
    terminal = Terminal(stdout=out, stderr=err)
    terminal.table(NAMES, ROWS, spare=("saved",))
    for row in ROWS:
        for cell in row:
            if cell not in (123400, 5):
                assert words(str(cell)) <= words(out.getvalue()), cell
    text = (
        "the quick brown fox jumps over /a/very/long/path/that/no/line/of/thirty/columns/holds and the lazy dog again"
    )
    terminal.line(text)
    terminal.error(text, "and a hint that is longer than thirty columns are")
    for shown in (out.getvalue(), err.getvalue()):
        assert words(text) <= words(shown)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in (out.getvalue() + err.getvalue()).splitlines()]
    assert all(len(line.rstrip()) <= columns or "/very/long" in line for line in lines), lines


def test_help_keeps_words_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    group = typer.main.get_command(app)
    for path, command in commands(group):
        context = typer.Context(command, info_name=" ".join(path))
        for param in command.get_params(context):
            record = param.get_help_record(context)
            assert record is None or words(record[1]) <= words(page(command, context)), (path, param.name)


def test_columns_are_narrowed_from_the_widest() -> None:
    assert fitted([10, 20, 5], [4, 6, 5], 40) == [10, 20, 5]
    assert fitted([10, 20, 5], [4, 6, 5], 25) == [10, 10, 5]
    assert fitted([10, 20, 5], [4, 15, 5], 25) == [5, 15, 5]
    assert fitted([10, 20, 5], [4, 15, 5], 23) is None


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["trian"], "error: no such command 'trian'. Did you mean 'train'?\n  hint: dcnr --help\n"),
        (["--nope"], "error: no such option: --nope\n  hint: dcnr --help\n"),
        (["train"], "error: missing argument 'NETWORK'\n  hint: dcnr train --help\n"),
        (["generate", "a", "b", "c"], "error: unexpected extra argument(s) (c)\n  hint: dcnr generate --help\n"),
    ],
)
def test_wrong_arguments_are_two_lines(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["dcnr", *arguments])
    with pytest.raises(SystemExit) as ended:
        app(prog_name="dcnr")
    assert ended.value.code == 2
    assert capsys.readouterr().err == shown
