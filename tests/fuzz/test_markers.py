"""Pickles in every field and object: they travel as text or are refused, and are never run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.fuzz import samples
from tests.fuzz.engine import judge
from tests.fuzz.targets import TARGETS


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def forms(marker: Path) -> list[Any]:
    """The pickle as bytes of several protocols, as text, and under the tags that some loaders run."""
    pickles = [pickle.dumps(Evil(marker), protocol) for protocol in (0, 2, 4, 5)]
    call = {"__reduce__": ["os.system", [f"touch {marker}"]], "py/object": "os.system", "$type": "os.system"}
    yaml = f"!!python/object/apply:os.system ['touch {marker}']"
    return [*pickles, pickles[0].decode("ascii"), call, yaml, f"__import__('os').system('touch {marker}')"]


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all nodes of a tree."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, child in children for place in places(child, (*at, key)))]


def put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value at a place."""
    if not place:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[place[0]] = put(tree[place[0]], place[1:], value)
    return copy


def test_the_marker_works(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(forms(marker)[0])
    assert marker.exists()


def test_in_every_field_of_every_packet_and_message(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    target = TARGETS["header"]
    count = 0
    for fields in samples.packet_fields():
        for place in places(fields):
            for form in forms(marker):
                for value in (form, msgpack.ExtType(1, form) if isinstance(form, bytes) else [form]):
                    assert not judge(target, msgpack.packb(put(fields, place, value)))[1]
                    count += 1
    assert count > 5000
    assert not marker.exists()


@pytest.mark.parametrize("name", ["manifest", "network", "tokenizer", "config", "record"])
def test_in_every_place_of_every_json_file(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    texts = [form for form in forms(marker) if not isinstance(form, bytes)]
    for data in TARGETS[name].valid()[:2]:
        tree = json.loads(data)
        every = places(tree)
        for place in every[:: max(1, len(every) // 60)]:
            for form in texts:
                assert not judge(TARGETS[name], json.dumps(put(tree, place, form)).encode())[1]
    assert not marker.exists()


@pytest.mark.parametrize("name", TARGETS)
def test_as_the_whole_object(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    for form in forms(marker):
        data = (
            form if isinstance(form, bytes) else form.encode() if isinstance(form, str) else json.dumps(form).encode()
        )
        for case in (data, b"PK\x03\x04" + data, len(data).to_bytes(8, "little") + data, msgpack.packb(data)):
            accepted, broke = judge(TARGETS[name], case)
            assert not broke
            assert not accepted or name == "link"
    assert not marker.exists()


def test_in_a_network_file(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = TARGETS["yaml"].valid()[0]
    lines = data.split(b"\n")
    for at, line in enumerate(lines):
        for form in (f"!!python/object/apply:os.system ['touch {marker}']", f"!!python/name:os.system {marker}"):
            changed = line.partition(b": ")[0] + b": " + form.encode()
            accepted, broke = judge(TARGETS["yaml"], b"\n".join([*lines[:at], changed, *lines[at + 1 :]]))
            assert not broke
            assert not accepted
    assert not marker.exists()
