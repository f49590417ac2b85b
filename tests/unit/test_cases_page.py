"""docs/cases.md names tests that are there, for every case that it has to cover."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
CASES = [
    "B01",
    "B03",
    "B05",
    "B07",
    "B09",
    "B10",
    "B18",
    "B20",
    "B22",
    "B26",
    "B28",
    "B30",
    "B31",
    "B33",
    "B35",
    "B37",
    "B39",
    "B41",
    "B42",
    "B43",
    "B50",
    "B52",
    "B54",
    "B55",
    "B57",
    "B58",
    "B63",
    "B64",
    "B65",
    "B67",
    "B70",
]


def rows() -> dict[str, list[tuple[str, str]]]:
    """By case: the tests that its line names."""
    found = {}
    for line in PAGE.splitlines():
        if (match := re.match(r"\| (B\d+|–) \|", line)) is not None:
            found[match[1]] = re.findall(r"`([\w/]+\.py)::(\w+)`", line)
    return found


def test_every_case_has_tests() -> None:
    assert set(CASES) < rows().keys()
    assert all(rows().values())


def test_every_named_test_exists() -> None:
    for case, tests in rows().items():
        for path, name in tests:
            tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
            defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in defined, (case, path, name)
