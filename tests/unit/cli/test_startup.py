"""`dcnr --help` is quick, and the reference page leaves nothing out."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import typer

from cli.reference import MARKER, commands
from cli.tree import app

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
HEAVY = ("torch", "pydantic", "numpy", "asyncio", "rich", "zmq", "aioboto3", "yaml", "msgspec", "psutil")


def test_start_up_imports_nothing_heavy() -> None:
    code = f"import sys, cli.tree; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_help_takes_less_than_a_third_of_a_cpu_second() -> None:
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "cli.main", "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.3, taken


def test_help_works_in_any_locale_and_width() -> None:
    for extra in ({"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, {"COLUMNS": "20"}, {"TERM": "dumb"}):
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", "train", "--help"],
            capture_output=True,
            env={**os.environ, **extra},
            timeout=60,
            check=True,
        )
        assert b"--local" in done.stdout
        assert b"\x1b" not in done.stdout


def test_the_reference_page_has_every_command_and_option() -> None:
    page = PAGE.read_text(encoding="utf-8").partition(MARKER)[2]
    assert page, "docs/cli.md has no generated part"
    for path, command in commands(typer.main.get_command(app)):
        heading = f"### {' '.join(path)}\n"
        assert heading in page, f"{heading.strip()} is missing: python -m cli.reference docs/cli.md"
        part = page.partition(heading)[2].partition("\n### ")[0]
        for param in command.params:
            if param.name != "help" and param.param_type_name == "option":
                assert all(name in part for name in param.opts), f"{' '.join(path)} {param.opts} is missing"


def test_every_command_is_explained() -> None:
    for path, command in commands(typer.main.get_command(app)):
        assert command.help, path
        for param in command.params:
            assert getattr(param, "help", "there"), f"{' '.join(path)}: {param.name} has no help"
