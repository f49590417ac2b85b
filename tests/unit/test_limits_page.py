"""docs/security.md: the table of limits has every limit, with its value."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .* \| ([0-9,]+) \| `([a-z.]+?)\.([A-Z_]+)(?:\.([a-z_]+))?` \|$", PAGE, re.MULTILINE)
MODULES = ("wire.limits", "storage.limits", "networks.limits", "pnode.data.limits", "cli.limits")
SIZES = ("KIB", "MIB", "GIB")
OF_THE_PROTOCOL = ("PROTOCOL_VERSION", "CHUNK_BYTES", "WHOLE_BYTES", "PART_BYTES", "ACK_RANGES")
"""Not about what a peer may send: how our own side cuts, sends and answers; PART_BYTES is what PACKET_BYTES is."""


@pytest.mark.parametrize(("value", "module", "name", "field"), ROWS, ids=lambda text: text)
def test_the_table_says_what_is_in_force(value: str, module: str, name: str, field: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert int(value.replace(",", "")) == (getattr(found, field) if field else found)


@pytest.mark.parametrize("module", MODULES)
def test_no_limit_is_left_out(module: str) -> None:
    source = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    source = source.partition("# ---------------------------------------------------------------- the sockets")[0]
    stated = set(re.findall(r"^([A-Z_]+) = ", source, re.MULTILINE)) - {*SIZES, *OF_THE_PROTOCOL}
    listed = {name for _, where, name, _ in ROWS if where == module}
    assert stated <= listed


def test_the_table_is_read() -> None:
    assert len(ROWS) > 45
