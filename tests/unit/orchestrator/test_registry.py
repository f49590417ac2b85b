"""The SQLite index and the records that it is rebuilt from."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.records import NetworkRecord, network_key, session_key
from orchestrator.registry import Registry
from orchestrator.truth import Truth, sealed_session
from storage.keys import BadKeyError
from storage.local import LocalStore
from tests.unit.orchestrator.story import make_record
from wire.messages import PeerRef, SessionEvent, StepReport


def network(name: str = "gpt") -> NetworkRecord:
    return NetworkRecord(name, "a" * 64, 3, 100, 1.0)


def event(seq: int) -> SessionEvent:
    return SessionEvent(seq, 1.0, "progress", "", seq, [StepReport(seq, 1.0, 1, 1.0, 0.1, 0.1, 1, "")])


def test_what_is_entered_survives(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry.sqlite", "c1")
    assert registry.fresh
    registry.put_network(network(), [("tok", "embedding", 90), ("head", "linear", 10)])
    registry.put_session(make_record(state="paused", step=17))
    registry.put_placement("gpt-1", 1, {"tok": "p1", "head": "p2"})
    registry.put_placement("gpt-1", 2, {"tok": "p2", "head": "p2"})
    registry.put_pnode("p1", 4, PeerRef("p1", 1, ["tcp://h:1"]), "alive", 2.0)
    registry.put_events("gpt-1", [event(1), event(2)], rewrite=False)
    registry.close()
    again = Registry(tmp_path / "registry.sqlite", "c1")
    assert not again.fresh
    assert again.networks() == [network()]
    assert again.vnodes("gpt") == [("tok", "embedding", 90), ("head", "linear", 10)]
    assert again.sessions() == [make_record(state="paused", step=17)]
    assert again.placement("gpt-1") == {"tok": "p2", "head": "p2"}
    assert again.incarnations() == {"p1": 4}
    assert again.events("gpt-1") == [event(1), event(2)]
    again.put_events("gpt-1", [event(2)], rewrite=True)
    assert again.events("gpt-1") == [event(2)]
    again.drop_session("gpt-1")
    assert again.sessions() == []
    assert again.events("gpt-1") == []
    again.close()
    again.close()


@pytest.mark.parametrize("damage", [b"", b"not a database at all, but long enough to be looked at" * 100])
def test_a_damaged_file_is_put_aside(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "registry.sqlite"
    path.write_bytes(damage)
    registry = Registry(path, "c1")
    assert registry.fresh
    assert registry.networks() == []
    assert (tmp_path / "registry.sqlite.damaged").exists() == bool(damage)
    registry.close()


def test_a_file_of_another_cluster_is_not_used(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry.sqlite", "c1")
    registry.put_network(network())
    registry.close()
    other = Registry(tmp_path / "registry.sqlite", "c2")
    assert other.fresh
    assert other.networks() == []
    other.close()


def test_an_index_that_can_not_be_written_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry.sqlite", "c1")
    registry._db.execute("PRAGMA query_only = 1")
    registry.put_session(make_record())
    registry.put_events("gpt-1", [event(1)], rewrite=False)
    assert registry.failed == 2
    assert "put_events" in registry.problem
    assert registry.sessions() == []
    registry.close()


async def test_rebuilding_from_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    truth = Truth(store)
    term = await truth.raise_term()
    await truth.put_network(network("gpt"))
    await truth.put_network(network("mlp"))
    await truth.put_session("gpt-1", sealed_session(make_record(state="running", epoch=4)))
    registry = Registry(tmp_path / "registry.sqlite", term.cluster)
    registry.put_network(network("gone"))
    registry.put_session(make_record(session="gone-1"))
    registry.rebuild(await truth.networks(), await truth.sessions())
    assert [record.network for record in registry.networks()] == ["gpt", "mlp"]
    assert registry.sessions() == [make_record(state="running", epoch=4)]
    registry.close()


@pytest.mark.parametrize("name", ["../../other", "a/b", ".", "%2e%2e", "a\0", "x" * 300, "а", "", "A"])
def test_names_that_are_no_ids_never_become_keys(name: str) -> None:
    """Field case B64."""
    with pytest.raises(BadKeyError):
        network_key(name)
    with pytest.raises(BadKeyError):
        session_key(name)
