"""`--set path=value`: what a person changes in a network file without editing it.

Paths: `train.optimizer.lr`, `vars.dropout`, `nodes.head.bias`, `blocks.transformer.attn.dropout`, `place.head`,
`name`. A value is read like a value in the file: a number, text, `$(expression)`, or `[…]` and `{…}`. The override
takes the value's place in the file's tree, so that everything after it checks both alike.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

from networks.diagnostics import Diagnostics, Spot, quote
from networks.yaml_source import Mapping, Scalar, Sequence, SourceText, YamlNode, parse

ROOTS = ("train", "vars", "nodes", "blocks", "place", "name")
_STRUCTURED = ("[", "{", '"', "'")


def apply_sets(root: Mapping, sets: SequenceType[str], diagnostics: Diagnostics) -> None:
    """Change `root` in place, later overrides last. Errors point at the override's text."""
    for text in sets:
        path, equals, value = text.partition("=")
        path = path.strip()
        source = SourceText("--set", value, shown=text, offset=len(text) - len(value))
        if not equals or not path:
            diagnostics.add(Spot(source, 1, 1), f"{quote(text)} is no override", "write --set train.batch=8")
            continue
        keys = path.split(".")
        if keys[0] == "place" and len(keys) > 2:
            keys = ["place", ".".join(keys[1:])]
        node = _value(source, value, diagnostics)
        _set(root, keys, node, source, diagnostics)


def _value(source: SourceText, value: str, diagnostics: Diagnostics) -> YamlNode:
    if value.lstrip().startswith(_STRUCTURED):
        return parse(source, diagnostics)
    return Scalar(source, 1, source.offset + 1, value.strip(), False)


def _set(root: Mapping, keys: list[str], value: YamlNode, source: SourceText, diagnostics: Diagnostics) -> None:
    try:
        current, keys = _owner(root, keys, source, diagnostics)
        for key in keys[:-1]:
            child = _child(current, key, source)
            if child is None:
                text = f"{quote(key)} holds no keys, so {quote('.'.join(keys))} can't be set"
                raise _WrongPathError(text, "set it as a whole")
            current = child
    except _WrongPathError as error:
        diagnostics.add(Spot(source, 1, 1), error.text, error.hint)
        return
    last = keys[-1]
    if last not in current.items:
        current.keys[last] = Scalar(source, 1, 1, last, False)
    current.items[last] = value


class _WrongPathError(Exception):
    """A path leads nowhere."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def _owner(root: Mapping, keys: list[str], source: SourceText, diagnostics: Diagnostics) -> tuple[Mapping, list[str]]:
    """The mapping that a path begins at, and the keys from there on. Raises `_WrongPathError`."""
    if keys[0] not in ROOTS:
        hint = diagnostics.suggest(keys[0], ROOTS) or f"there are {', '.join(ROOTS)}"
        raise _WrongPathError(f"{quote(keys[0])} can't be set", hint)
    if keys[0] not in ("nodes", "blocks"):
        return root, keys
    scope = root
    if keys[0] == "blocks":
        blocks = _child(root, "blocks", source)
        known = blocks.items if blocks is not None else {}
        name = keys[1] if len(keys) > 1 else ""
        block = _child(blocks, name, source) if blocks is not None and name in known else None
        if block is None:
            hint = diagnostics.suggest(name, known) or "blocks.BLOCK.NODE.KEY"
            raise _WrongPathError(f"no block is called {quote(name)}", hint)
        scope, keys = block, keys[1:]
    if len(keys) < 3:
        raise _WrongPathError("the override names no key of a node", "write nodes.NODE.KEY=VALUE")
    node, ids = _node(scope, keys[1])
    if node is None:
        hint = diagnostics.suggest(keys[1], ids) or "nodes of a block: blocks.BLOCK.NODE.KEY=VALUE"
        raise _WrongPathError(f"no node is called {quote(keys[1])}", hint)
    if keys[2:] == ["id"]:
        raise _WrongPathError("a node's id can't be set", "edit the file")
    return node, keys[2:]


def _child(parent: Mapping, key: str, source: SourceText) -> Mapping | None:
    """A mapping inside `parent`, as a copy of its own (aliases share), made if there is none."""
    found = parent.items.get(key)
    if found is None or (isinstance(found, Scalar) and found.value() is None):
        parent.keys.setdefault(key, Scalar(source, 1, 1, key, False))
        parent.items[key] = made = Mapping(source, 1, 1)
        return made
    if not isinstance(found, Mapping):
        return None
    parent.items[key] = copy = Mapping(found.source, found.line, found.column, dict(found.items), dict(found.keys))
    return copy


def _node(scope: Mapping, node_id: str) -> tuple[Mapping | None, list[str]]:
    """The node of that id in the scope's list, as a copy of its own, and all ids there are."""
    nodes = scope.items.get("nodes")
    if not isinstance(nodes, Sequence):
        return None, []
    ids: list[str] = []
    for index, item in enumerate(nodes.items):
        name = item.items.get("id") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or not isinstance(name, Scalar):
            continue
        ids.append(name.text)
        if name.text == node_id:
            copy = Mapping(item.source, item.line, item.column, dict(item.items), dict(item.keys))
            items = [*nodes.items[:index], copy, *nodes.items[index + 1 :]]
            scope.items["nodes"] = Sequence(nodes.source, nodes.line, nodes.column, items)
            return copy, ids
    return None, ids
