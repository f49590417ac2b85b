"""Fixtures for network files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.networks.files import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)
