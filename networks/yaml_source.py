"""A YAML text as a tree in which every key and value knows its line and column.

Own loader on PyYAML's event stream (libyaml where present): nothing is constructed from tags, so nothing is executed.
Rules, stricter than YAML's:

- one document, no tags, no repeated keys, keys are plain text; anchors and aliases work but never contain themselves;
- limits: `YAML_BYTES` of text, `YAML_DEPTH` levels, `YAML_VALUES` values with every alias written out;
- scalars resolve as in the YAML 1.2 core schema (`1e-4` is a number; `no`, `on`, `12:30:45`, `1_000` are text), save
  that a number with a leading zero (`010`) is text, because readers differ on whether it is eight or ten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from networks.diagnostics import Diagnostics, Source, Spot, one_error, quote
from networks.limits import NUMBER_CHARS, YAML_BYTES, YAML_DEPTH, YAML_VALUES

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    "null": None, "Null": None, "NULL": None, "~": None, "": None,
}  # fmt: skip

Value: TypeAlias = "str | int | float | bool | None"


class SourceText:
    """The text of one file (or of one `--set` value) and what errors call it."""

    def __init__(self, name: str, text: str, *, shown: str | None = None, offset: int = 0) -> None:
        self.name = name
        self.text = text
        self.offset = offset
        self._shown = shown
        self._lines: list[str] | None = None

    def line_text(self, line: int) -> str:
        """The text of a line, counted from 1."""
        if self._lines is None:
            self._lines = (self.text if self._shown is None else self._shown).split("\n")
        return self._lines[line - 1].rstrip("\r") if 0 < line <= len(self._lines) else ""


@dataclass(slots=True, eq=False)
class Scalar:
    """A single value as written: `text` is the content, `quoted` says that quotes (or a block style) made it text."""

    source: Source
    line: int
    column: int
    text: str
    quoted: bool
    size: int = 1

    def value(self) -> Value:
        """The value by the core schema; text if it is nothing else."""
        return self.text if self.quoted else resolve(self.text)


@dataclass(slots=True, eq=False)
class Mapping:
    """Keys with their values, in the order of the text."""

    source: Source
    line: int
    column: int
    items: dict[str, YamlNode] = field(default_factory=dict)
    keys: dict[str, Scalar] = field(default_factory=dict)
    size: int = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """A list of values."""

    source: Source
    line: int
    column: int
    items: list[YamlNode] = field(default_factory=list)
    size: int = 1


YamlNode: TypeAlias = Scalar | Mapping | Sequence


def resolve(text: str) -> Value:
    """What an unquoted scalar means: null, bool, int, float (also inf and nan, which no field accepts), or text."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in "+-.0123456789" and len(text) <= NUMBER_CHARS:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if _BASED_INT.fullmatch(text):
            return int(text, 0)
        if _SPECIAL_FLOAT.fullmatch(text):
            return float(text.replace(".", "", 1))
    return text


def describe(node: YamlNode) -> str:
    """What a value is, for error messages: "a mapping", "text 'no'", "0.5"."""
    match node:
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case Scalar():
            value = node.value()
            if value is None:
                return "nothing"
            if isinstance(value, str):
                return f"text {quote(value)}"
            return quote(node.text)[1:-1]


def parse(source: SourceText, diagnostics: Diagnostics) -> YamlNode:
    """The tree of a YAML text.

    Faults after which the rest makes no sense (syntax, limits) raise `NetworkFileError` at once; others (repeated
    keys, tags) go to `diagnostics`, and reading goes on.
    """
    if len(source.text) > YAML_BYTES:
        raise one_error(source, 1, 1, f"the file is larger than {YAML_BYTES // 2**20} MiB", "use blocks with 'repeat'")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(source.text)
        try:
            return _Composer(source, diagnostics, loader).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(source, error) from None
    except yaml.reader.ReaderError as error:
        raise _character_error(source, error) from None


class _Composer:
    """Builds the tree from events, with an explicit stack so that no input can exhaust Python's."""

    def __init__(self, source: SourceText, diagnostics: Diagnostics, loader: Any) -> None:
        self.source = source
        self.diagnostics = diagnostics
        self.loader = loader
        self.anchors: dict[str, YamlNode] = {}
        self.open: list[Mapping | Sequence] = []
        self.pending: list[Scalar | None] = []  # per open mapping: the key whose value comes next
        self.total = 0

    def document(self) -> YamlNode:
        loader, root = self.loader, None
        loader.get_event()
        if isinstance(loader.peek_event(), yaml.StreamEndEvent):
            raise one_error(self.source, 1, 1, "the file is empty", "docs/networks.md describes the format")
        loader.get_event()
        while True:
            event = loader.get_event()
            if isinstance(event, yaml.DocumentEndEvent):
                break
            node = self.step(event)
            if node is not None and root is None:
                root = node
        if not isinstance(loader.peek_event(), yaml.StreamEndEvent):
            mark = loader.peek_event().start_mark
            raise one_error(
                self.source, mark.line + 1, mark.column + 1, "a second document starts here", "one network a file"
            )
        assert root is not None
        return root

    def step(self, event: Any) -> YamlNode | None:
        """Handle one event; returns the node that it begins, if it begins one."""
        mark = event.start_mark
        line, column = mark.line + 1, mark.column + 1 + self.source.offset
        if isinstance(event, yaml.ScalarEvent):
            self.refuse_tag(event, line, column)
            node: YamlNode = Scalar(self.source, line, column, event.value, not event.implicit[0])
            self.anchor(event.anchor, node)
            self.place(node)
            return node
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, line, column)
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self.refuse_tag(event, line, column)
            if len(self.open) >= YAML_DEPTH:
                raise one_error(
                    self.source, line, column, f"values are nested deeper than {YAML_DEPTH} levels", "flatten them"
                )
            kind = Mapping if isinstance(event, yaml.MappingStartEvent) else Sequence
            node = kind(self.source, line, column)
            self.anchor(event.anchor, node)
            self.place(node)
            self.open.append(node)
            self.pending.append(None)
            return node
        closed = self.open.pop()
        self.pending.pop()
        children = closed.items.values() if isinstance(closed, Mapping) else closed.items
        closed.size = 1 + sum(child.size for child in children)
        return None

    def alias(self, event: Any, line: int, column: int) -> YamlNode:
        target = self.anchors.get(event.anchor)
        if target is None:
            hint = self.diagnostics.suggest(event.anchor, self.anchors)
            raise one_error(self.source, line, column, f"no anchor is called {quote(event.anchor)}", hint)
        if any(target is one for one in self.open):
            text = f"alias {quote('*' + event.anchor)} stands inside the value that it names"
            raise one_error(self.source, line, column, text, "write the value out")
        self.total += target.size - 1
        self.place(target, Spot(self.source, line, column))
        return target

    def place(self, node: YamlNode, spot: Spot | None = None) -> None:
        """Put a node where the text has it: as the next key, value or item."""
        where = spot or node
        self.total += 1
        if self.total > YAML_VALUES:
            text = f"the file holds more than {YAML_VALUES:,} values, aliases written out"
            raise one_error(self.source, where.line, where.column, text, "write fewer aliases; blocks have 'repeat'")
        if not self.open:
            return
        parent = self.open[-1]
        if isinstance(parent, Sequence):
            parent.items.append(node)
            return
        key = self.pending[-1]
        if key is None:
            if not isinstance(node, Scalar):
                raise one_error(self.source, where.line, where.column, "a key must be plain text", "name it by a word")
            self.pending[-1] = node
            return
        self.pending[-1] = None
        first = parent.keys.get(key.text)
        if first is not None:
            text = f"key {quote(key.text)} appears twice; the first is on line {first.line}"
            self.diagnostics.add(key, text, "remove one of them")
            return
        parent.keys[key.text] = key
        parent.items[key.text] = node

    def anchor(self, name: str | None, node: YamlNode) -> None:
        if name is not None:
            self.anchors[name] = node

    def refuse_tag(self, event: Any, line: int, column: int) -> None:
        tag = event.tag
        if tag is not None and tag != "!":
            text = f"tags such as {quote(tag)} are not allowed"
            self.diagnostics.add(Spot(self.source, line, column), text, "remove the tag")


def _syntax_error(source: SourceText, error: yaml.MarkedYAMLError) -> Exception:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1 + source.offset) if mark is not None else (1, 1)
    problem = str(error.problem or "this is not YAML")
    text = f"not valid YAML: {problem}" + (f" {error.context}" if error.context else "")
    hint = ""
    tabbed = source.line_text(line).lstrip(" ").startswith("\t")
    if tabbed or "tab" in problem:
        text, hint = "a tab can't indent YAML", "use spaces"
    elif "nesting" in problem:
        text, hint = f"values are nested deeper than {YAML_DEPTH} levels", "flatten them"
    elif "mapping values are not allowed" in problem:
        hint = "is a line above not finished, or does the text need quotes?"
    return one_error(source, line, column, text, hint)


def _character_error(source: SourceText, error: yaml.reader.ReaderError) -> Exception:
    found = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", source.text)
    at = found.start() if found else 0
    line = source.text.count("\n", 0, at) + 1
    column = at - (source.text.rfind("\n", 0, at) + 1) + 1
    code = ord(source.text[at]) if source.text else 0
    return one_error(source, line, column, f"control character U+{code:04X} in the text", "remove it")
