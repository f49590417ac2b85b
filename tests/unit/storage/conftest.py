"""Says at the end how many calls of a store were made to fail."""

from __future__ import annotations

import pytest

from tests.unit.storage.operations import show_tried


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    show_tried(terminalreporter.write_line)
