"""Which orchestrator a command means."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.cluster import available_cores, threads_per_pnode
from cli.context import Contexts, orchestrator_address, parse_address
from wire.errors import BadFileError, UnreachableError, UsageError


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:7700", "host.example:1", "[::1]:7700", " tcp://a-b:65535 "])
def test_good_addresses(text: str) -> None:
    assert parse_address(text).startswith("tcp://")


@pytest.mark.parametrize(
    "text", ["", "host", "host:0", "host:65536", "tcp://:5", "http://a:5", "a:5/x", "a b:5", "ipc:///tmp/x"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


def test_order_of_precedence(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no cluster is running"):
        orchestrator_address(None, tmp_path)
    Contexts.read(tmp_path).use("lab", "10.0.0.5:7700").save()
    assert orchestrator_address(None, tmp_path) == "tcp://10.0.0.5:7700"
    assert orchestrator_address("h:1", tmp_path) == "tcp://h:1"
    Contexts.read(tmp_path).use("local", None).save()
    with pytest.raises(UnreachableError):
        orchestrator_address(None, tmp_path)


def test_contexts_are_kept_and_forgotten(tmp_path: Path) -> None:
    Contexts.read(tmp_path).use("lab", "h:1").save()
    assert Contexts.read(tmp_path).current == "lab"
    with pytest.raises(UsageError, match="no context 'labs'"):
        Contexts.read(tmp_path).use("labs", None)
    with pytest.raises(UsageError, match="can't be a context's name"):
        Contexts.read(tmp_path).use("../x", "h:1")
    Contexts.read(tmp_path).without("lab").save()
    assert Contexts.read(tmp_path).addresses == {}
    assert Contexts.read(tmp_path).current == ""


@pytest.mark.parametrize("text", ["", "[]", "{", '{"contexts": 5}', '{"contexts": {}, "current": 3}'])
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "contexts.json").write_text(text)
    with pytest.raises(BadFileError, match=r"contexts\.json"):
        Contexts.read(tmp_path)


def test_threads_share_the_cores() -> None:
    assert threads_per_pnode(3, cores=2) == 1
    assert threads_per_pnode(2, cores=8) == 4
    assert threads_per_pnode(0, cores=8) == 8
    assert available_cores() >= 1
