"""B05 and B65: whatever ends a command, its exit code is its own, and no traceback is shown."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, signal, sys
from cli import running, terminal, tree
import cli.main as entry

def app():
    {body}

tree.app = app
entry.main()
"""
STRIKE = "os.kill(os.getpid(), signal.{name})"


def run(body: str, before: str = "", shell: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + PROGRAM.format(body=body.replace("\n", "\n    "))]
    if shell:
        command = ["bash", "-c", f'"$0" "$@" {shell}', *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("sys.exit(None)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('words')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise BrokenPipeError", 0),
        ("raise OSError(28, 'No space left on device')", 1),
        (STRIKE.format(name="SIGINT"), 130),
        (STRIKE.format(name="SIGTERM"), 143),
    ],
)
def test_exit_codes(body: str, code: int) -> None:
    """Field case B05."""
    done = run(body)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    "then",
    [
        "time.sleep(20)",
        "return",
        "sys.exit(running.report(ImportError('numpy could not be imported, for somebody pressed Ctrl-C')))",
        "for _ in range(10**6):\n        try: time.sleep(20)\n        except BaseException: pass",
    ],
)
def test_an_interrupt_that_is_swallowed_ends_the_command_all_the_same(name: str, code: int, then: str) -> None:
    """Field case B05: an import, a destructor or a callback may swallow what a signal raises."""
    body = f"""
import time
try:
    {STRIKE.format(name=name)}
    time.sleep(5)
except BaseException:
    pass
{then}
"""
    began = time.monotonic()
    done = run(body)
    assert (done.returncode, done.stderr) == (code, "")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_in_a_destructor_is_raised_again_at_once(name: str, code: int) -> None:
    """Field case B05: so it was found, in the callback of an import's lock; Python would print it and go on."""
    body = f"""
import time
class Destroyed:
    def __del__(self):
        {STRIKE.format(name=name)}
        time.sleep(0.01)
began = time.monotonic()
try:
    Destroyed()
    time.sleep(5)
except KeyboardInterrupt:
    print(time.monotonic() - began)
    raise
"""
    done = run(body)
    assert (done.returncode, done.stderr) == (code, "")
    assert float(done.stdout) < 0.5


def test_a_clean_up_is_left_its_time() -> None:
    """Neither the second raise nor the end comes once the clean-up has begun."""
    body = f"""
import time
try:
    {STRIKE.format(name="SIGINT")}
    time.sleep(5)
except BaseException:
    with running.undisturbed():
        time.sleep(2)
    print("cleaned", flush=True)
    raise
"""
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned\n", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_once_the_command_is_over_changes_nothing(name: str) -> None:
    """Field case B05: the interpreter's own end would die of it."""
    late = f"import atexit, os, signal\natexit.register(lambda: {STRIKE.format(name=name)})\n"
    done = run("print('all of it')\nsys.exit(69)", late)
    assert (done.returncode, done.stdout, done.stderr) == (69, "all of it\n", "")
    strike = f"calls = []\nrunning.flush = lambda: calls.append(1) or len(calls) > 1 and {STRIKE.format(name=name)}"
    done = run(f"{strike}\nsys.exit(69)")
    assert (done.returncode, done.stderr) == (69, "")


@pytest.mark.parametrize(
    ("shell", "code", "says"),
    [
        ("> /dev/full", 1, "No space left on device"),
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_where_output_can_not_go(shell: str, code: int, says: str) -> None:
    """Field case B65: a closed pipe ends quietly; a full disk in one line."""
    done = run("print('x' * 100_000)", shell=shell)
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == (1 if says else 0)
