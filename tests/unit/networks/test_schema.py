"""The JSON Schema: draft-07, true to the loader on shipped files and on broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from networks.diagnostics import Diagnostics
from networks.load import shipped
from networks.schema import json_schema
from networks.types import REGISTRY
from networks.yaml_source import Mapping, Scalar, Sequence, SourceText, YamlNode, parse
from tests.unit.networks.files import MLP, Files, changed

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def plain(node: YamlNode) -> Any:
    """A file as an editor's schema check sees it: YAML 1.2 values, expressions as text."""
    match node:
        case Scalar():
            return node.value()
        case Sequence():
            return [plain(item) for item in node.items]
        case Mapping():
            return {key: plain(value) for key, value in node.items.items()}


def instance(text: str) -> Any:
    return plain(parse(SourceText("f", text), Diagnostics()))


def test_it_is_draft_07() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    text = json.dumps(SCHEMA)
    for later in ("$defs", "prefixItems", "unevaluated", "dependentRequired"):
        assert later not in text


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_shipped_files_validate(path: Path) -> None:
    VALIDATOR.validate(instance(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_type_validates_with_its_example(name: str) -> None:
    kind = REGISTRY[name]
    node = {"id": "n", "type": name, **kind.example}
    data = instance(MLP)
    data["nodes"] = [node]
    VALIDATOR.validate(data)
    data["nodes"] = [{**node, "bogus": 1}]
    assert not VALIDATOR.is_valid(data)


BROKEN = [
    [("version: 1", "version: 2")],
    [("name: mlp", "name: ../x")],
    [("name: mlp\n", "")],
    [("vars: {d: 8}", "var: {d: 8}")],
    [("vars: {d: 8}", "vars: {d: [8]}")],
    [("vars: {d: 8}", "place: {fc1: P1}")],
    [("float32", "float33")],
    [("[batch, 8]", "[8, batch]")],
    [("[batch, 8]", "[batch, 0]")],
    [("type: relu", "type: rellu")],
    [("type: relu", "type: relu, foo: 1")],
    [("type: relu", "type: block")],
    [("id: act", "id: Act")],
    [("in: 8,", "")],
    [("in: 8,", "in: eight,")],
    [("in: 8,", "in: 0,")],
    [("in: 8,", "in: 8, bias: yes,")],
    [("-> act ->", "-> a b ->")],
    [("lr: 1e-3", "lr: fast")],
    [("lr: 1e-3", "lr: '1e-3'")],
    [("lr: 1e-3", "lr: 0")],
    [("type: adamw,", "type: adam,")],
    [("type: adamw, ", "")],
    [("[0.9, 0.99]", "[0.9]")],
    [("[0.9, 0.99]", "[0.9, 0.99, 0.999]")],
    [("  steps: 10\n", "")],
    [("  steps: 10\n", "  steps: 10\n  precision: fp8\n")],
    [("batch: 4", "batch: 1.5")],
]


@pytest.mark.parametrize("pairs", BROKEN, ids=lambda pairs: pairs[0][1].strip())
def test_broken_files_validate_neither_here_nor_in_the_loader(files: Files, pairs: list[tuple[str, str]]) -> None:
    text = changed(*pairs)
    assert files.errors(text)
    assert not VALIDATOR.is_valid(instance(text))


def test_expressions_are_allowed_for_numbers_and_words(files: Files) -> None:
    text = changed(
        ("lr: 1e-3", "lr: $(1/1000)"), ("in: 8,", "in: $d,"), ("[0.9, 0.99]", "[$(0.9), 0.99]"),
        ("batch: 4", "batch: $(d//2)"), ("[batch, 8]", "[batch, $d]"),
    )  # fmt: skip
    files.load(text)
    VALIDATOR.validate(instance(text))


def test_descriptions_reach_the_editor() -> None:
    linear = SCHEMA["definitions"]["node.linear"]["properties"]
    assert linear["in"]["description"] == "size of the input's last dimension"
    assert SCHEMA["properties"]["name"]["description"]
