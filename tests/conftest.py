"""What all tests share: one torch thread, no skip on CI, and no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.tried import TRIED, show_tried

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Two cores and many tests: torch computes on one thread unless a test says otherwise."""
    import torch

    torch.set_num_threads(1)


OURS = {"cli.main", "pnode.main", "orchestrator.main", "dcnr", "dcnr-pnode", "dcnr-orchestrator", "weed"}
"""Words of a command line, less their folders, by which our processes are known."""


def our_processes() -> list[psutil.Process]:
    """Living descendants of the test run that are DCNR daemons or test servers."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            words = {os.path.basename(word) for word in child.cmdline()}
            if child.status() != psutil.STATUS_ZOMBIE and words & OURS:
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever the tests started has ended when they end."""
    yield
    psutil.wait_procs(our_processes(), timeout=5)
    left = [f"{child.pid} {' '.join(child.cmdline())[:120]}" for child in our_processes()]
    assert not left, f"processes left behind: {left}"


SKIPPED: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was skipped, for `pytest_sessionfinish`."""
    if report.skipped and not hasattr(report, "wasxfail"):
        SKIPPED.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """On CI a skipped test is a failure: everything it needs is installed there."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["tried"] = dict(TRIED)
    elif os.environ.get("CI") and SKIPPED and exitstatus == 0:
        print(f"\nskipped on CI, where nothing may be: {SKIPPED}")
        session.exitstatus = 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """One of several test processes has ended: what it tried counts with the rest."""
    TRIED.update(getattr(node, "workeroutput", {}).get("tried", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many calls of a store were made to fail."""
    show_tried(terminalreporter.write_line)
