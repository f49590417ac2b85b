"""Texts and recipes for data tests."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXT = "".join(f"line {n}: the quick brown fox, x = {n * n} ünïcödé 😀\n" for n in range(400))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text file of about 20 kB."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path
