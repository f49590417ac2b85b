"""The sections of a network file, read one by one so that a fault in one hides no fault in another.

What has an error of its own is left out or marked `broken`; whoever reads the document stays silent about it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

from networks.diagnostics import Diagnostics, quote
from networks.expressions import VarValue
from networks.graph import TensorSpec
from networks.model import BLOCK, VAR_PATTERN, BlockEntry, InputEntry, NetworkFile, NodeEntry, is_id
from networks.recipe import Recipe
from networks.types import REGISTRY, NodeParams, NodeType
from networks.values import BROKEN, Broken, Reader, Variables
from networks.yaml_source import Mapping, Scalar, Sequence, YamlNode, describe

_SHARED_KEYS = frozenset(NodeEntry.model_fields)
_NODE_TEXT = frozenset({"id", "type", "tie", "block"})


@dataclass(slots=True, eq=False)
class NodeDef:
    """A node as written in one scope. `kind` and `params` are None for a block's node or a broken one."""

    id: str
    entry: NodeEntry | None
    where: YamlNode
    kind: NodeType | None = None
    params: NodeParams | None = None
    block: ScopeDef | None = None
    broken: bool = False


@dataclass(slots=True, eq=False)
class ScopeDef:
    """A block, or the file's top level: names that see each other, and the edges between them."""

    name: str
    where: YamlNode
    inputs: dict[str, YamlNode] = field(default_factory=dict)
    nodes: dict[str, NodeDef] = field(default_factory=dict)
    edges: list[Scalar] = field(default_factory=list)
    outputs: dict[str, Scalar] = field(default_factory=dict)
    broken_nodes: bool = False


@dataclass(slots=True, eq=False)
class Document:
    """Everything that a file says."""

    root: Mapping
    name: str
    top: ScopeDef
    blocks: dict[str, ScopeDef]
    inputs: dict[str, TensorSpec]
    place: dict[str, Scalar]
    recipe: Recipe | None


DEFAULT_OUTPUT = "y"
"""The port of a block's only output."""


def read_root(root: YamlNode, diagnostics: Diagnostics) -> Mapping:
    """The file's top level, its keys checked."""
    if not isinstance(root, Mapping):
        diagnostics.add(root, f"a network file is a mapping, got {describe(root)}", "begin with 'version: 1'")
        diagnostics.finish()
    assert isinstance(root, Mapping)
    known = {info.alias or name: info.is_required() for name, info in NetworkFile.model_fields.items()}
    for key, where in root.keys.items():
        if key not in known:
            hint = diagnostics.suggest(key, known) or f"there are {', '.join(known)}"
            diagnostics.add(where, f"{quote(key)} is not known here", hint)
    for key, required in known.items():
        if required and key not in root.items:
            description = NetworkFile.model_fields[key].description
            diagnostics.add(root, f"{quote(key)} is missing", f"{key}: {description}")
    return root


def read_variables(root: Mapping, given: MappingType[str, VarValue | Broken], diagnostics: Diagnostics) -> Variables:
    """The file's `vars`, and those that the caller gives (the tokenizer's `vocab`), which may not contradict.

    A given variable that is broken has no value yet: what depends on it is left out in silence, and the file's own
    value, if there is one, takes its place.
    """
    variables = Variables()
    variables.known.update(given)
    section = root.items.get("vars")
    if section is None:
        return variables
    if not isinstance(section, Mapping):
        diagnostics.add(section, f"'vars' must be a mapping, got {describe(section)}")
        return variables
    reader = Reader(diagnostics, variables)
    for name, node in section.items.items():
        value = reader.plain(node)
        if not re.fullmatch(VAR_PATTERN.strip("^$"), name):
            diagnostics.add(section.keys[name], f"{quote(name)} can't name a variable", "use a-z, A-Z, 0-9 and _")
            continue
        if value is not BROKEN and not isinstance(value, int | float | str):
            diagnostics.add(node, f"'vars.{name}' must be a number, text, true or false, got {describe(node)}")
            value = BROKEN
        from_data = given.get(name, BROKEN)
        if value is not BROKEN and from_data is not BROKEN and value != from_data:
            text = f"'vars.{name}' is {value!r} here, but the data give {from_data!r}"
            diagnostics.add(node, text, f"remove it from 'vars'; ${name} is known without")
            continue
        if from_data is BROKEN:
            variables.known[name] = value
    return variables


def read_document(root: Mapping, reader: Reader) -> Document:
    """All sections; errors go to the reader's diagnostics."""
    name = root.items.get("name")
    network = name.text if isinstance(name, Scalar) else ""
    if name is not None and not is_id(network):
        _bad_id(reader, "name", name)
    version = root.items.get("version")
    if version is not None and reader.plain(version) != 1:
        reader.diagnostics.add(version, f"'version' must be 1, got {describe(version)}", "this release reads version 1")
    inputs = read_inputs(root, reader)
    blocks = _read_blocks(root, reader)
    top = ScopeDef("", root)
    section = root.items.get("inputs")
    if isinstance(section, Mapping):
        top.inputs = dict(section.keys)
    _read_scope(root, top, "", reader)
    top.outputs = _texts(root, "outputs", reader)
    for scope in (top, *blocks.values()):
        _link_blocks(scope, blocks, reader)
    return Document(root, network, top, blocks, inputs, _texts(root, "place", reader), read_recipe(root, reader))


def read_inputs(root: Mapping, reader: Reader) -> dict[str, TensorSpec]:
    """The network's inputs by name, broken ones left out."""
    found: dict[str, TensorSpec] = {}
    section = _mapping(root, "inputs", reader)
    for name, node in section.items.items() if section else ():
        if not is_id(name):
            _bad_id(reader, "an input's name", section.keys[name] if section else node)
            continue
        entry = reader.check(InputEntry, node, reader.plain(node, frozenset({"dtype"})), f"inputs.{name}")
        if entry is not None:
            found[name] = TensorSpec(entry.dtype, entry.shape)
    return found


def read_recipe(root: Mapping, reader: Reader) -> Recipe | None:
    """The `train` section; the context of a text defaults to the length of the input `tokens`."""
    node = root.items.get("train")
    if node is None:
        return None
    recipe = reader.check(Recipe, node, reader.plain(node), "train")
    if recipe is None or recipe.data is None or recipe.data.text is None or recipe.data.context is not None:
        return recipe
    length = _context(root, reader)
    if length is None:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"context": length})})


def _context(root: Mapping, reader: Reader) -> int | None:
    inputs = root.items.get("inputs")
    tokens = inputs.items.get("tokens") if isinstance(inputs, Mapping) else None
    shape = tokens.items.get("shape") if isinstance(tokens, Mapping) else None
    if not isinstance(shape, Sequence) or len(shape.items) < 2:
        return None
    length = Reader(Diagnostics(), reader.variables).plain(shape.items[1])
    return length if isinstance(length, int) and length >= 1 else None


def _read_blocks(root: Mapping, reader: Reader) -> dict[str, ScopeDef]:
    blocks: dict[str, ScopeDef] = {}
    section = _mapping(root, "blocks", reader)
    for name, node in section.items.items() if section else ():
        if not is_id(name):
            _bad_id(reader, "a block's name", section.keys[name] if section else node)
            continue
        scope = ScopeDef(name, node)
        blocks[name] = scope
        if not isinstance(node, Mapping):
            reader.diagnostics.add(node, f"block {quote(name)} must be a mapping, got {describe(node)}")
            continue
        known = list(BlockEntry.model_fields)
        for key, where in node.keys.items():
            if key not in known:
                hint = reader.diagnostics.suggest(key, known) or f"there are {', '.join(known)}"
                reader.diagnostics.add(where, f"{quote(key)} is not known in a block", hint)
        for key in ("inputs", "nodes", "edges"):
            if key not in node.items:
                hint = f"{key}: {BlockEntry.model_fields[key].description}"
                reader.diagnostics.add(node, f"{quote(key)} is missing in block {quote(name)}", hint)
        for item in _items(node, "inputs", reader):
            if not isinstance(item, Scalar) or not is_id(item.text):
                _bad_id(reader, "a block's input", item)
            elif item.text in scope.inputs:
                reader.diagnostics.add(item, f"input {quote(item.text)} appears twice", "remove one of them")
            else:
                scope.inputs[item.text] = item
        _read_scope(node, scope, f"blocks.{name}.", reader)
        scope.outputs = _block_outputs(node, scope, reader)
    return blocks


def _block_outputs(node: Mapping, scope: ScopeDef, reader: Reader) -> dict[str, Scalar]:
    single = node.items.get("output")
    if (single is None) == ("outputs" not in node.items):
        reader.diagnostics.add(node, f"block {quote(scope.name)} needs either 'output' or 'outputs'", "output: NODE")
    if single is None:
        return _texts(node, "outputs", reader)
    if not isinstance(single, Scalar):
        reader.diagnostics.add(single, f"'output' must name a node, got {describe(single)}")
        return {}
    return {DEFAULT_OUTPUT: single}


def _read_scope(node: Mapping, scope: ScopeDef, prefix: str, reader: Reader) -> None:
    """The nodes and edges of the file or of a block."""
    for item in _items(node, "nodes", reader):
        _read_node(item, scope, prefix, reader)
    for item in _items(node, "edges", reader):
        if isinstance(item, Scalar):
            scope.edges.append(item)
        else:
            reader.diagnostics.add(item, f"an edge is text such as 'a -> b', got {describe(item)}", "write 'a -> b'")


def _read_node(node: YamlNode, scope: ScopeDef, prefix: str, reader: Reader) -> None:
    """One node of a scope: what all nodes share, then its type's own parameters."""
    diagnostics = reader.diagnostics
    if not isinstance(node, Mapping):
        diagnostics.add(node, f"a node is a mapping such as {{id: fc, type: linear, …}}, got {describe(node)}")
        scope.broken_nodes = True
        return
    plain = reader.plain(node, _NODE_TEXT)
    named = node.items.get("id")
    name = named.text if isinstance(named, Scalar) else ""
    label = prefix + name if is_id(name) else f"{prefix}nodes"
    shared = {key: value for key, value in plain.items() if key in _SHARED_KEYS}
    entry = reader.check(NodeEntry, node, shared, label)
    if not is_id(name):
        scope.broken_nodes = True
        return
    other = scope.nodes.get(name)
    if other is not None or name in scope.inputs:
        first = other.where if other is not None else scope.inputs[name]
        what = "node" if other is not None else "input"
        assert named is not None
        diagnostics.add(named, f"{quote(name)} is already the name of a {what}, on line {first.line}", "rename one")
        return
    found = NodeDef(name, entry, node, broken=entry is None)
    scope.nodes[name] = found
    if entry is None or entry.type == BLOCK:
        return
    found.kind = REGISTRY.get(entry.type)
    rest = {key: value for key, value in plain.items() if key not in _SHARED_KEYS}
    if found.kind is None:
        hint = diagnostics.suggest(entry.type, [*REGISTRY, BLOCK])
        hint = f"{hint} (dcnr net types)" if hint else "`dcnr net types` lists them"
        diagnostics.add(node.items["type"], f"unknown node type {quote(entry.type)}", hint)
    else:
        for key in ("block", "repeat"):
            if key in node.items:
                diagnostics.add(node.keys[key], f"{quote(f'{label}.{key}')} needs 'type: block'", f"remove '{key}'")
        found.params = reader.check(found.kind.params, node, rest, label)
    found.broken = found.params is None


def _link_blocks(scope: ScopeDef, blocks: dict[str, ScopeDef], reader: Reader) -> None:
    """Give each node of type `block` its block."""
    for node in scope.nodes.values():
        entry, where = node.entry, node.where
        if entry is None or entry.type != BLOCK or not isinstance(where, Mapping):
            continue
        node.block = blocks.get(entry.block or "")
        for key, place in where.keys.items():
            if key not in ("id", "type", "block", "repeat"):
                reader.diagnostics.add(place, f"{quote(key)} is not known in a node of type 'block'", "remove it")
        if entry.block is None:
            reader.diagnostics.add(where, f"node {quote(node.id)} does not say which block", "block: NAME")
        elif node.block is None:
            hint = reader.diagnostics.suggest(entry.block, blocks)
            hint = hint or (f"there are {', '.join(blocks)}" if blocks else "declare it under 'blocks'")
            reader.diagnostics.add(where.items["block"], f"no block is called {quote(entry.block)}", hint)
        node.broken = node.block is None


def _mapping(node: Mapping, key: str, reader: Reader) -> Mapping | None:
    found = node.items.get(key)
    if found is None or isinstance(found, Mapping):
        return found
    reader.diagnostics.add(found, f"{quote(key)} must be a mapping, got {describe(found)}")
    return None


def _items(node: Mapping, key: str, reader: Reader) -> list[YamlNode]:
    found = node.items.get(key)
    if found is None:
        return []
    if isinstance(found, Sequence):
        if not found.items:
            reader.diagnostics.add(found, f"{quote(key)} is empty", "a network needs at least one")
        return found.items
    reader.diagnostics.add(found, f"{quote(key)} must be a list, got {describe(found)}", "begin each item with '- '")
    return []


def _texts(node: Mapping, key: str, reader: Reader) -> dict[str, Scalar]:
    """A section that maps names to names."""
    section = _mapping(node, key, reader)
    found: dict[str, Scalar] = {}
    for name, value in section.items.items() if section else ():
        if not isinstance(value, Scalar):
            reader.diagnostics.add(value, f"'{key}.{name}' must be a name, got {describe(value)}")
        elif key == "outputs" and not is_id(name):
            _bad_id(reader, "an output's name", section.keys[name] if section else value)
        elif key == "place" and not is_id(value.text):
            _bad_id(reader, "a PNode's name", value)
        else:
            found[name] = value
    return found


def _bad_id(reader: Reader, what: str, node: YamlNode) -> None:
    text = f"{what} must be 1 to 63 of a-z, 0-9, _ and -, starting with a letter or digit, got {describe(node)}"
    hint = ""
    if isinstance(node, Scalar):
        plain = node.text.encode("ascii", "backslashreplace").decode("ascii")
        text = text.rsplit(", got", 1)[0] + f", got {quote(plain)}"
        close = re.sub(r"[^a-z0-9_-]+", "-", node.text.lower()).strip("-_")[:63]
        hint = f"for example {quote(close)}" if close and is_id(close) else ""
    reader.diagnostics.add(node, text, hint)
