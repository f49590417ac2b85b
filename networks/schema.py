"""The file format as JSON Schema draft-07, for editors: made from the pydantic models and the registry of types.

pydantic writes a later draft; what differs is rewritten here. Wherever a number, a boolean or one of several words is
expected, an expression (`$name`, `$(…)`) is allowed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from networks.codecs import WISHES
from networks.model import BLOCK, ID_PATTERN, NetworkFile, NodeEntry
from networks.types import REGISTRY

DRAFT = "http://json-schema.org/draft-07/schema#"
_EXPRESSION = {"type": "string", "pattern": r"^\$[A-Za-z_(]"}
_WRAPPED = ("integer", "number", "boolean")
_ANNOTATIONS = ("title", "description", "default")


def json_schema() -> dict[str, Any]:
    """The schema of a network file."""
    models = [(NetworkFile, "validation"), *((kind.params, "validation") for kind in REGISTRY.values())]
    references, schema = models_json_schema(
        models,  # type: ignore[arg-type]
        by_alias=True,
        ref_template="#/definitions/{model}",
        schema_generator=GenerateJsonSchema,
    )
    definitions = {name: _draft07(part) for name, part in schema["$defs"].items()}
    definitions["expression"] = {**_EXPRESSION, "description": "an expression over the variables of the file"}
    shared = definitions.pop("NodeEntry")["properties"]
    types = {}
    for name, kind in REGISTRY.items():
        reference = references[kind.params, "validation"]["$ref"].rsplit("/", 1)[1]
        types[name] = _node(name, kind.doc, definitions[reference], shared)
    for kind in REGISTRY.values():
        definitions.pop(references[kind.params, "validation"]["$ref"].rsplit("/", 1)[1], None)
    for name, node in types.items():
        definitions[f"node.{name}"] = node
    definitions[f"node.{BLOCK}"] = _block_node(shared)
    definitions["NodeEntry"] = _any_node([*REGISTRY, BLOCK])
    _network(definitions)
    top = definitions.pop("NetworkFile")
    used = set(_references({"top": top, "nodes": definitions}))
    return {
        "$schema": DRAFT,
        **top,
        "title": "DCNR network file",
        "definitions": {name: part for name, part in sorted(definitions.items()) if name in used},
    }


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                yield value.rsplit("/", 1)[1]
            else:
                yield from _references(value)
    elif isinstance(part, list):
        for item in part:
            yield from _references(item)


def _draft07(part: Any) -> Any:
    """One part of a schema in draft-07's words, numbers and the like open to expressions."""
    if isinstance(part, list):
        return [_draft07(item) for item in part]
    if not isinstance(part, dict):
        return part
    found: dict[str, Any] = {}
    for key, value in part.items():
        match key:
            case "properties" | "patternProperties":
                found[key] = {name: _draft07(item) for name, item in value.items()}
            case "prefixItems":
                found["items"] = [_draft07(item) for item in value]
                found["additionalItems"] = False
            case "discriminator" | "propertyNames":
                continue
            case "const" | "enum" | "default" | "required":
                found[key] = value
            case _:
                found[key] = _draft07(value)
    if "const" in found.get("properties", {}).get("type", {}):
        found["required"] = sorted({*found.get("required", []), "type"})
    if _takes_expression(found):
        notes = {key: found.pop(key) for key in _ANNOTATIONS if key in found}
        return {"anyOf": [found, {"$ref": "#/definitions/expression"}], **notes}
    return found


def _takes_expression(part: dict[str, Any]) -> bool:
    return part.get("type") in _WRAPPED or ("enum" in part and "const" not in part)


def _node(name: str, doc: str, params: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """A node of one type: what all nodes have, and the type's parameters."""
    common = {"id": shared["id"], "type": {"const": name, "description": doc}}
    if REGISTRY[name].tie is not None:
        common["tie"] = {"type": "string", "description": shared["tie"].get("description", "")}
    return {
        "type": "object",
        "description": doc,
        "properties": {**common, **params.get("properties", {})},
        "required": ["id", "type", *params.get("required", [])],
        "additionalProperties": False,
    }


def _block_node(shared: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": "the nodes of a block",
        "properties": {
            "id": shared["id"],
            "type": {"const": BLOCK},
            "block": {
                "type": "string",
                "pattern": ID_PATTERN,
                "description": NodeEntry.model_fields["block"].description,
            },
            "repeat": shared["repeat"],
        },
        "required": ["id", "type", "block"],
        "additionalProperties": False,
    }


def _any_node(types: list[str]) -> dict[str, Any]:
    """A node: its type decides which definition applies, so that an editor shows only that one's errors."""
    return {
        "type": "object",
        "required": ["id", "type"],
        "properties": {"type": {"enum": types}},
        "allOf": [
            {
                "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
                "then": {"$ref": f"#/definitions/node.{name}"},
            }
            for name in types
        ],
    }


def _network(definitions: dict[str, Any]) -> None:
    """What pydantic can't know: names as keys, shapes, and a block's one kind of output."""
    names = {"propertyNames": {"pattern": ID_PATTERN}}
    properties = definitions["NetworkFile"]["properties"]
    for key in ("inputs", "outputs", "blocks"):
        properties[key].update(names)
    extent = {"anyOf": [{"type": "integer", "minimum": 1}, {"$ref": "#/definitions/expression"}]}
    shape = definitions["InputEntry"]["properties"]["shape"]
    shape.update({"type": "array", "items": [{"const": "batch"}], "additionalItems": extent, "minItems": 1})
    block = definitions["BlockEntry"]
    block["oneOf"] = [{"required": ["output"]}, {"required": ["outputs"]}]
    arrow = rf"(->|\s-({'|'.join(WISHES)})->)"
    edge = {"type": "string", "pattern": rf"^\s*[a-z0-9._-]+\s*({arrow}\s*[a-z0-9._-]+\s*)+$"}
    for owner in (definitions["NetworkFile"], block):
        owner["properties"]["edges"]["items"] = edge
