"""The files that the command line reads: limits, and whatever else they may be; one clear line each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import cli.inputs
from cli.card import Card
from cli.cluster import Cluster
from cli.context import Contexts, orchestrator_address, read_json
from cli.inputs import read_file
from cli.limits import HOME_FILE_BYTES
from wire.errors import BadFileError, RemoteError


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_size_of_a_file_in_the_home_folder(over: int, tmp_path: Path) -> None:
    file = tmp_path / "contexts.json"
    file.write_bytes(b"{}" + b" " * (HOME_FILE_BYTES + over - 2))
    if over <= 0:
        assert read_json(file) == {}
    else:
        with pytest.raises(BadFileError, match=f"more than {HOME_FILE_BYTES} bytes"):
            read_json(file)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_size_of_an_input(over: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.inputs, "INPUT_BYTES", 1 << 20)
    file = tmp_path / "x.json"
    file.write_bytes(b"[1]" + b" " * ((1 << 20) + over - 3))
    if over <= 0:
        assert read_file(file)[""].tolist() == [1]
    else:
        with pytest.raises(BadFileError, match="larger than 1 MiB"):
            read_file(file)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"1" * 5000, b"[]", b"", b"{} x"])
def test_what_is_no_json_object(data: bytes, tmp_path: Path) -> None:
    for name in ("contexts.json", "cluster.json"):
        (tmp_path / name).write_bytes(data)
    for read in (Contexts.read, Cluster.read):
        with pytest.raises(BadFileError):
            read(tmp_path)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "contexts.json").mkdir()
    with pytest.raises(BadFileError, match="can't be read"):
        Contexts.read(tmp_path)
    os.mkfifo(tmp_path / "cluster.json")  # opening it must not wait for somebody who writes
    with pytest.raises(BadFileError):
        Cluster.read(tmp_path)


def test_a_current_context_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "contexts.json").write_text(json.dumps({"current": "home", "contexts": {}}))
    with pytest.raises(BadFileError, match="names the context 'home', which it lacks"):
        orchestrator_address(None, tmp_path)
    Contexts.read(tmp_path).use("local", None).save()
    assert Contexts.read(tmp_path).current == ""


@pytest.mark.parametrize("data", [b'{"zzz":' + b"[" * 200_000, b'{"name":"\xff"}', b'{"train":' + b"[" * 200_000])
def test_networks_that_are_none(data: bytes) -> None:
    with pytest.raises(RemoteError, match="not a network"):
        Card.of(data)
