"""Valid input, changed: bytes, trees (what JSON and msgpack hold) and lines of text. All from a seeded generator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgpack

PICKLE = "cos\nsystem\n(S'touch {marker}'\ntR."
"""A pickle that would make a file if anything ever unpickled it; `tests.fuzz.markers` looks for the file."""

MARKER = "/tmp/dcnr-fuzz-marker"
MARKED = PICKLE.replace("{marker}", MARKER)

NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 32767, 32768, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    1 << 40, (1 << 40) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "0", "..", "../../etc/passwd", "/etc/passwd", "a/../b", "a\0b", "con", "x" * 63, "x" * 64, "x" * 5000,
    "é", "\u202eabc", "\x1b[2J", "[bold red]x[/]", "float32", "bfloat16", "true", "nan", "__import__('os')",
    MARKED, "!!python/object/apply:os.system", "\ud7ff", "\U0010ffff", "-1", "1e999", "a" * 64, "tcp://h:1",
)  # fmt: skip


def pick(random: Random, items: Sequence[Any]) -> Any:
    """One of them; far faster than `Random.choice`, which counts where a case takes microseconds."""
    return items[int(random.random() * len(items))]


def value(random: Random) -> Any:
    """Something that probably does not belong there."""
    kind = random.random()
    if kind < 0.35:
        return pick(random, NUMBERS)
    if kind < 0.65:
        return pick(random, TEXTS)
    if kind < 0.75:
        return pick(random, FLOATS)
    if kind < 0.9:
        return pick(random, (None, True, False, [], {}, [[]], [0] * 17, {"a": 1}))
    deep: Any = 1
    for _ in range(pick(random, (3, 15, 16, 17, 40))):
        deep = [deep]
    return deep


def change_tree(random: Random, tree: Any, items: Sequence[Any] = ()) -> Any:
    """The tree with one node replaced, removed, doubled or moved. May change `tree` itself. `items`: more values."""
    parent: Any = None
    at: Any = None
    node = tree
    while isinstance(node, list | dict) and node and (parent is None or random.random() < 0.85):
        parent = node
        at = int(random.random() * len(node)) if isinstance(node, list) else pick(random, list(node))
        node = node[at]
    new = pick(random, items) if items and random.random() < 0.2 else value(random)
    if parent is None:
        return new
    action = random.random()
    if action < 0.6:
        if type(node) is int and type(new) is int and random.random() < 0.5:
            new = node + pick(random, (-1, 1, 2, -2, 256, -node, node))
        parent[at] = new
    elif action < 0.75:
        del parent[at]
    elif isinstance(parent, list):
        if action < 0.85:
            parent.insert(at, new)
        elif action < 0.97:
            parent.insert(at, node)
        else:
            parent[at : at + 1] = [node] * pick(random, (2, 9, 17, 33, 257))
    else:
        parent[pick(random, TEXTS)] = parent.pop(at) if action < 0.85 else new
    return tree


def change_bytes(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with a few of them flipped, overwritten, removed, doubled, or mixed with those of another input."""
    changed = bytearray(data)
    for _ in range(pick(random, (1, 1, 1, 2, 4))):
        size = len(changed)
        at = int(random.random() * (size + 1))
        action = random.random()
        if action < 0.3 and size:
            changed[at % size] ^= 1 << int(random.random() * 8)
        elif action < 0.5 and size:
            changed[at % size] = int(random.random() * 256)
        elif action < 0.6:
            width = pick(random, (1, 2, 4, 8))
            number = pick(random, NUMBERS) & ((1 << 8 * width) - 1)
            changed[at : at + width] = number.to_bytes(width, pick(random, ("big", "little")))
        elif action < 0.7:
            del changed[at : at + pick(random, (1, 2, 8, 64))]
        elif action < 0.8:
            piece = changed[at : at + pick(random, (1, 4, 16, 64))]
            changed[at:at] = piece * pick(random, (1, 2, 20))
        elif action < 0.88:
            del changed[at:]
        elif action < 0.95 and others:
            other = pick(random, others)
            changed[at:] = other[int(random.random() * (len(other) + 1)) :]
        else:
            changed[at:at] = pick(random, (b"\x00", b"\xff", b"\x80", b"\xc1", b"[" * 3000, b"\x91" * 600, b'"', b"\n"))
    return bytes(changed)


def change_text(random: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """Lines or words of a text removed, doubled, moved, indented otherwise, or replaced by others."""
    lines = data.split(b"\n")
    for _ in range(pick(random, (1, 1, 2, 4))):
        at = int(random.random() * len(lines))
        action = random.random()
        if action < 0.15:
            del lines[at]
        elif action < 0.3:
            lines.insert(at, pick(random, lines) if lines else b"")
        elif action < 0.4:
            lines[at] = b" " * pick(random, (1, 2, 4, 31)) + lines[at]
        elif action < 0.45:
            lines[at] = lines[at].lstrip()
        elif action < 0.85:
            parts = lines[at].split(b" ")
            parts[int(random.random() * len(parts))] = pick(random, words)
            lines[at] = b" ".join(parts)
        else:
            lines[at] = change_bytes(random, lines[at])
        lines = lines or [b""]
    return b"\n".join(lines)


def tree_of_msgpack(data: bytes) -> Any:
    """What msgpack bytes hold."""
    return msgpack.unpackb(data, strict_map_key=False)


def msgpack_of(tree: Any) -> bytes:
    """Msgpack bytes of a tree; what it can't hold is left out."""
    try:
        return msgpack.packb(tree)
    except (ValueError, OverflowError):
        return msgpack.packb(None)


def json_of(tree: Any) -> bytes:
    """JSON of a tree, with `NaN` and half surrogates where the tree has them."""
    return json.dumps(tree).encode()


def structured(
    read: Callable[[bytes], Any], write: Callable[[Any], bytes], *, items: Sequence[Any] = (), plain: float = 0.3
) -> Callable[[Random, bytes, Sequence[bytes]], bytes]:
    """A mutation of trees, and for a share `plain` of cases of their bytes."""

    def change(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        if random.random() < plain:
            return change_bytes(random, data, others)
        tree = change_tree(random, read(data), items)
        while random.random() < 0.35:
            tree = change_tree(random, tree, items)
        return write(tree)

    return change
