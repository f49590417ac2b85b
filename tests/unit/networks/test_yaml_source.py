"""The YAML loader: places, scalars by YAML 1.2, and limits on hostile files."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from networks.diagnostics import Diagnostics, NetworkFileError
from networks.limits import YAML_BYTES
from networks.yaml_source import Mapping, Scalar, Sequence, SourceText, YamlNode, parse, resolve


def tree(text: str) -> YamlNode:
    diagnostics = Diagnostics()
    found = parse(SourceText("f.yaml", text), diagnostics)
    diagnostics.finish()
    return found


def plain(node: YamlNode) -> object:
    match node:
        case Scalar():
            return node.value()
        case Sequence():
            return [plain(item) for item in node.items]
        case Mapping():
            return {key: plain(value) for key, value in node.items.items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("3E-4", 3e-4), ("1.0e-4", 1e-4), (".5", 0.5), ("5.", 5.0), ("-1.5", -1.5), ("+2", 2), ("0", 0),
        ("1E+3", 1000.0), ("0x1F", 31), ("0o10", 8), ("true", True), ("False", False), ("null", None), ("~", None),
        ("", None), ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("010", "010"),
        ("00", "00"), ("12:30:45", "12:30:45"), ("1_000", "1_000"), ("1e", "1e"), ("e5", "e5"), ("0b11", "0b11"),
        ("1.2.3", "1.2.3"), ("2024-01-01", "2024-01-01"), ("-", "-"), (".", "."), ("1,000", "1,000"), ("٣", "٣"),
    ],
)  # fmt: skip
def test_unquoted_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = resolve(text)
    assert found == value
    assert type(found) is type(value)


def test_infinite_and_nan_are_recognized_so_that_they_can_be_refused() -> None:
    assert resolve(".inf") == float("inf")
    assert resolve("-.INF") == float("-inf")
    assert str(resolve(".NaN")) == "nan"
    assert resolve("1e999") == float("inf")


def test_quotes_make_text() -> None:
    assert plain(tree("[\"1e-4\", '5', 5, |-\n  6\n]".replace("|-\n  6\n", "6"))) == ["1e-4", "5", 5, 6]


def test_every_key_and_value_knows_its_place() -> None:
    root = tree("a: 1\nb:\n  - x\n  - {c: é, d: 2}\n")
    assert isinstance(root, Mapping)
    assert (root.keys["b"].line, root.keys["b"].column) == (2, 1)
    items = root.items["b"]
    assert isinstance(items, Sequence)
    inner = items.items[1]
    assert isinstance(inner, Mapping)
    assert (inner.line, inner.column) == (4, 5)
    assert (inner.keys["d"].line, inner.keys["d"].column) == (4, 12)
    assert (inner.items["d"].line, inner.items["d"].column) == (4, 15)


def test_repeated_keys_are_all_reported() -> None:
    with pytest.raises(NetworkFileError) as caught:
        tree("a: 1\nb: {c: 1, c: 2}\na: 2\n")
    assert [(one.line, one.column, one.text) for one in caught.value.diagnostics] == [
        (2, 11, "key 'c' appears twice; the first is on line 2"),
        (3, 1, "key 'a' appears twice; the first is on line 1"),
    ]


def test_aliases_share_a_value_but_never_contain_themselves() -> None:
    assert plain(tree("a: &x {n: 1}\nb: *x\nc: [*x, *x]\n")) == {
        "a": {"n": 1},
        "b": {"n": 1},
        "c": [{"n": 1}, {"n": 1}],
    }
    for text in ("a: &x [*x]", "a: &x {b: [1, {c: *x}]}", "&r a: &y\n  b: *y\n"):
        with pytest.raises(NetworkFileError, match="stands inside the value"):
            tree(text)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

HOSTILE = {
    "alias bomb": (BOMB, "aliases written out"),
    "bomb of mappings": (BOMB.replace("[", "{k1: [").replace("]", "]}"), "aliases written out"),
    "brackets": ("[" * 5000, "nested deeper"),
    "braces": ("{a: " * 5000, "nested deeper"),
    "dashes": ("- " * 5000, "nested deeper"),
    "closed brackets": ("[" * 5000 + "]" * 5000, "nested deeper"),
    "depth just above": ("[" * 33 + "]" * 33, "nested deeper"),
    "indentation": ("\n".join(" " * depth + "a:" for depth in range(1200)), "nested deeper"),
    "tab": ("a:\n\t- b\n", "a tab can't indent"),
    "tab after a mapping": ("a: b\n\tc: d\n", "a tab can't indent"),
    "tab first": ("\ta: 1\n", "a tab can't indent"),
    "unknown alias": ("a: *nope\n", "no anchor is called 'nope'"),
    "empty": ("", "the file is empty"),
    "only comments": ("# nothing\n", "the file is empty"),
    "two documents": ("a: 1\n---\nb: 2\n", "a second document"),
    "broken quotes": ('a: "x\nb: 1\n', "not valid YAML"),
    "open bracket": ("a: [1, 2\nb: 3\n", "not valid YAML"),
    "two colons": ("a: b: c\n", "not valid YAML"),
    "complex key": ("? [a]\n: b\n", "a key must be plain text"),
    "NUL": ("a: \0\n", "control character U+0000"),
    "escape": ("a: \x1b[31m\n", "control character U+001B"),
    "too large": ("#" * (YAML_BYTES + 1), "larger than 8 MiB"),
    "many values": ("[" + "1," * 500_001 + "]", "holds more than 500,000 values"),
    "tag that runs code": ("a: !!python/object/apply:os.system ['echo hi']\n", "tags such as"),
    "own tag": ("a: !thing {}\n", "tags such as '!thing'"),
    "binary tag": ("a: !!binary aGk=\n", "tags such as"),
    "long number": ("a: " + "9" * 5000, None),
    "many anchors": ("\n".join(f"k{i}: &a{i} 1" for i in range(20000)) + "\nz: *nope\n", "no anchor is called"),
    "many repeated keys": ("a: 1\n" * 20000, "appears twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_quickly_and_in_little_memory(name: str) -> None:
    text, expected = HOSTILE[name]
    started = time.process_time()
    if expected is None:
        tree(text)
    else:
        with pytest.raises(NetworkFileError) as caught:
            tree(text)
        assert expected in str(caught.value)
        assert all(one.line >= 1 and one.column >= 1 for one in caught.value.diagnostics)
        assert str(caught.value).startswith("f.yaml:")
    assert time.process_time() - started < 5.0  # what grows with the square of the size takes minutes


@pytest.mark.parametrize("name", ["alias bomb", "brackets", "braces", "indentation", "tab"])
def test_hostile_files_take_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NetworkFileError):
            tree(HOSTILE[name][0])
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_the_depth_that_is_allowed_is_allowed() -> None:
    tree("[" * 32 + "]" * 32)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_either_read_or_refused_with_a_place(text: str) -> None:
    refusal = None
    try:
        tree(text)
    except NetworkFileError as error:
        refusal = error
    if refusal is not None:
        assert refusal.diagnostics
        assert all(one.line >= 1 and one.column >= 1 for one in refusal.diagnostics)
        assert all(line.isprintable() for line in str(refusal).split("\n"))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(categories=("L", "N", "P", "S")), max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text("abcdef", min_size=1, max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(values)
def test_what_json_says_is_read_as_json(value: object) -> None:
    assert plain(tree(json.dumps(value, ensure_ascii=False))) == value


def test_the_pure_python_parser_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: &x {n: 1e-4}\nb: [*x, no, 'q']\n"
    fast = plain(tree(text))
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert plain(tree(text)) == fast == {"a": {"n": 1e-4}, "b": [{"n": 1e-4}, "no", "q"]}
    with pytest.raises(NetworkFileError, match="a tab can't indent"):
        tree("a:\n\t- b\n")
    with pytest.raises(NetworkFileError, match="nested deeper"):
        tree("[" * 5000)
