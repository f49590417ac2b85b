"""From the tree of a file to checked values: variables put in, models validated, each error at its line.

A value that could not be computed becomes `BROKEN`: its own error is noted once, and nothing that follows from it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from networks import yaml_source
from networks.diagnostics import Diagnostics, Spot, quote
from networks.expressions import ExpressionError, VarValue, evaluate, is_expression
from networks.yaml_source import Scalar, Sequence, YamlNode, describe


class Broken:
    """Stands for a value whose error is already noted."""


BROKEN = Broken()

ModelT = TypeVar("ModelT", bound=BaseModel)


class Variables(Mapping[str, VarValue]):
    """The variables of a file. `used` are those that were asked for; a broken one is known but has no value."""

    def __init__(self) -> None:
        self.known: dict[str, VarValue | Broken] = {}
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> VarValue:
        value = self.known[name]
        self.used.add(name)
        if isinstance(value, Broken):
            raise BrokenVariable(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


class BrokenVariable(ExpressionError):
    """A variable that has an error of its own was asked for."""


class Reader:
    """Evaluates and validates parts of one file; errors go to `diagnostics`."""

    def __init__(self, diagnostics: Diagnostics, variables: Variables) -> None:
        self.diagnostics = diagnostics
        self.variables = variables

    def plain(self, node: YamlNode, text: frozenset[str] = frozenset()) -> Any:
        """The value of a part of the tree: dicts, tuples, scalars; `BROKEN` where an expression failed.

        The values of the keys in `text` stay as written, so that an id `no` or `1e4` is text.
        """
        match node:
            case Scalar():
                return self.scalar(node)
            case Sequence():
                return tuple(self.plain(item) for item in node.items)
            case yaml_source.Mapping():
                return {
                    key: value.text if key in text and isinstance(value, Scalar) else self.plain(value)
                    for key, value in node.items.items()
                }

    def scalar(self, node: Scalar) -> Any:
        """The value of one scalar, its expression evaluated."""
        if node.text.startswith("$"):
            if not is_expression(node.text):
                return node.text[1:]
            try:
                return evaluate(node.text, self.variables)
            except BrokenVariable:
                return BROKEN
            except ExpressionError as error:
                self.expression_error(node, error)
                return BROKEN
        value = node.value()
        if isinstance(value, float) and not math.isfinite(value):
            self.diagnostics.add(node, f"{quote(node.text)[1:-1]} is not a finite number", "give a finite number")
            return BROKEN
        if isinstance(value, int) and abs(value) >= 2**63:
            self.diagnostics.add(node, f"{node.text} is too large", "whole numbers stay below 2**63")
            return BROKEN
        return value

    def expression_error(self, node: Scalar, error: ExpressionError) -> None:
        """Note what is wrong with an expression, at the very character."""
        spot = Spot(node.source, node.line, node.column + node.quoted + error.at)
        hint = error.hint
        if error.unknown == "vocab":
            hint = "it comes from the tokenizer of 'train.data'; give one, or --set vars.vocab=NUMBER"
        elif error.unknown is not None:
            known = [*self.variables]
            listed = f"there are {', '.join(known)}" if 0 < len(known) <= 20 else "declare it under 'vars'"
            hint = self.diagnostics.suggest(error.unknown, known) or listed
        self.diagnostics.add(spot, f"{error} in {quote(node.text)}", hint)

    def check(self, model: type[ModelT], node: YamlNode, plain: Any, what: str) -> ModelT | None:
        """A validated model of `plain`, which was read from `node`; None after noting every error."""
        try:
            return model.model_validate(plain)
        except ValidationError as error:
            explained: set[tuple[int, int]] = set()
            for found in error.errors(include_url=False):
                if found["input"] is BROKEN or _follows_from_broken(found):
                    continue
                place, path = _locate(node, found["loc"], key=found["type"] == "extra_forbidden")
                alternative = place is not node and found["type"].endswith("_type")
                if alternative and (place.line, place.column) in explained:
                    continue
                explained.add((place.line, place.column))
                self.explain(model, found, place, path, what)
            return None

    def explain(self, model: type[BaseModel], found: Any, place: YamlNode, path: list[str], what: str) -> None:
        """Turn one of pydantic's errors into ours; it was found at `place`, which a person calls `what` + `path`."""
        kind, location = found["type"], found["loc"]
        label = quote(".".join([*([what] if what else []), *path]))
        context = found.get("ctx", {})
        got = self._got(place, found["input"])
        hint = ""
        match kind:
            case "missing":
                text = f"{quote(location[-1])} is missing in {quote('.'.join([what, *path[:-1]]).strip('.'))}"
                hint = _description(model, location)
            case "extra_forbidden":
                text = f"{label} is not known here"
                fields = sorted(_fields_at(model, location[:-1]))
                hint = self.diagnostics.suggest(str(location[-1]), fields)
                hint = hint or (f"there are {', '.join(fields)}" if fields else "remove it")
            case "value_error":
                text = f"{label}: {context['error']}"
            case "union_tag_not_found":
                types = [str(tag) for one in _models_at(model, location) for tag in _tags(one)]
                text, hint = f"{label} has no 'type'", f"there are {', '.join(types)}"
            case "union_tag_invalid":
                expected = [tag.strip("' ") for tag in str(context["expected_tags"]).split(",")]
                tag = str(context["tag"])
                text = f"{label} has no type {quote(tag)}"
                hint = self.diagnostics.suggest(tag, expected) or f"there are {', '.join(expected)}"
            case _:
                text = f"{label} must be {_expected(kind, context, found['msg'])}, got {got}"
                hint = self._value_hint(kind, place, context)
        self.diagnostics.add(place, text, hint)

    def _got(self, node: YamlNode, value: object) -> str:
        if isinstance(node, Scalar) and is_expression(node.text):
            return f"{value!r} from {quote(node.text)}"
        return describe(node)

    def _value_hint(self, kind: str, node: YamlNode, context: Any) -> str:
        if not isinstance(node, Scalar):
            return ""
        if kind == "literal_error":
            return self.diagnostics.suggest(node.text, str(context["expected"]).replace(" or ", ", ").split("'")[1::2])
        if kind not in _NUMBERS:
            return ""
        if is_expression(node.text):
            return "'//' divides whole numbers" if "/" in node.text and kind.startswith("int") else ""
        bare = yaml_source.resolve(node.text)
        if node.quoted and isinstance(bare, int | float):
            return "remove the quotes"
        if isinstance(bare, float) and bare.is_integer() and abs(bare) < 2**53:
            return f"write {int(bare)}"
        digits = node.text.replace("_", "").lstrip("0")
        if digits.isdigit() and digits.isascii():
            return f"write {digits}"
        return ""


_NUMBERS = {"int_type", "int_from_float", "float_type", "int_parsing", "float_parsing"}
_WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "absent",
    "finite_number": "a finite number",
}
_PATTERNS = {
    "^[a-z0-9][a-z0-9_-]{0,62}$": "1 to 63 of a-z, 0-9, _ and -, starting with a letter or digit",
}


def _expected(kind: str, context: Any, message: str) -> str:
    """What would have been right, to follow "must be"."""
    if kind in _WORDS:
        return _WORDS[kind]
    match kind:
        case "greater_than":
            return f"greater than {context['gt']:g}"
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "less_than":
            return f"less than {context['lt']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case "literal_error":
            return f"{context['expected']}"
        case "string_pattern_mismatch":
            return _PATTERNS.get(context["pattern"], f"like {context['pattern']}")
        case "too_short":
            return f"at least {context['min_length']} long"
        case "too_long":
            return f"at most {context['max_length']} long"
        case "string_too_short":
            return f"at least {context['min_length']} characters"
        case "string_too_long":
            return f"at most {context['max_length']} characters"
    return f"right ({message})"


def _follows_from_broken(found: Any) -> bool:
    return (
        found["type"].startswith("union_tag")
        and isinstance(found["input"], dict)
        and any(value is BROKEN for value in found["input"].values())
    )


def _locate(root: YamlNode, location: tuple[str | int, ...], *, key: bool) -> tuple[YamlNode, list[str]]:
    """The part of the tree at pydantic's location, and the path that a person would write for it.

    Parts of the location that the tree lacks (the tags of unions, a missing key) are skipped in the tree. With
    `key`, the place is the last key instead of its value.
    """
    node: YamlNode = root
    place: YamlNode = root
    path: list[str] = []
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(node, yaml_source.Mapping) and part in node.items:
            name = str(part)
            place = node.keys[name] if key and last else node.items[name]
            node = node.items[name]
            path.append(name)
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            place = node
            path.append(str(part))
        elif last and not _is_tag(node, part):
            path.append(str(part))
    return place, path


def _is_tag(node: YamlNode, part: str | int) -> bool:
    """Whether a part of pydantic's location is the tag of a union, which the file has as `type: part`."""
    if not isinstance(node, yaml_source.Mapping):
        return True
    kind = node.items.get("type")
    return isinstance(kind, Scalar) and kind.text == part


def _models(annotation: Any) -> list[type[BaseModel]]:
    """All models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Literal:
        return []
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _models_at(model: type[BaseModel], location: tuple[str | int, ...]) -> list[type[BaseModel]]:
    """The models that may stand at pydantic's location; list indices and unknown parts are passed over."""
    current = [model]
    for part in location:
        by_tag = [one for one in current if part in _tags(one)]
        if by_tag:
            current = by_tag
            continue
        inner = [
            found
            for one in current
            for name, info in one.model_fields.items()
            if part in (name, info.alias)
            for found in _models(info.annotation)
        ]
        current = inner or current
    return current


def _fields_at(model: type[BaseModel], location: tuple[str | int, ...]) -> set[str]:
    """The names of the fields that the model has at pydantic's location."""
    models = _models_at(model, location)
    return {info.alias or name for one in models for name, info in one.model_fields.items()}


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    """The values of `type` that choose this model in a union."""
    info = model.model_fields.get("type")
    return get_args(info.annotation) if info is not None and get_origin(info.annotation) is Literal else ()


def _description(model: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """The description of the field at pydantic's location, to say what a missing field is for."""
    for one in _models_at(model, location[:-1]):
        for name, info in one.model_fields.items():
            if location[-1] in (name, info.alias) and info.description:
                return f"{location[-1]}: {info.description}"
    return ""
