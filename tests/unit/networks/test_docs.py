"""docs/networks.md: every example loads, and the tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest

from networks.expressions import FUNCTIONS
from networks.load import shipped
from networks.recipe import SGD, AdamW, CheckpointRecipe, DataRecipe, Recipe
from networks.schema import json_schema
from networks.types import REGISTRY
from tests.unit.networks.files import Files
from tests.unit.networks.test_schema import instance

PAGE = (Path(__file__).parents[3] / "docs" / "networks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: re.findall(r"name: (.*)", text)[0])
def test_every_example_loads(files: Files, text: str) -> None:
    files.load(text)
    jsonschema.Draft7Validator(json_schema()).validate(instance(text))


def test_every_type_function_network_and_field_is_mentioned() -> None:
    for name in [*REGISTRY, *FUNCTIONS, *(path.stem for path in shipped())]:
        assert f"`{name}`" in PAGE, name
    for model in (Recipe, DataRecipe, AdamW, SGD, CheckpointRecipe):
        for name in model.model_fields:
            assert name in PAGE, name
