"""A storage service with keys: whom it lets in, and whom its clients take for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from orchestrator.allowlist import MEMBERS_KEY, MembersRecord
from storage.local import LocalStore
from storage.members import MembersList
from storage.open import Remote, keyed_bus, open_store, service_url
from storage.remote import SERVICE_ID
from storage.remote.admitted import look
from storage.remote.client import RemoteStore
from storage.remote.connection import Patience
from storage.remote.service import StorageService
from storage.remote.spool import Spool
from storage.sealed import seal
from storage.store import StoreError, StoreUnavailableError
from wire.admission import Admission
from wire.errors import UsageError
from wire.keys import KeyPair
from wire.messages import Admitted
from wire.roles import CLIENT, JOIN, ORCHESTRATOR, PNODE, STORAGE
from wire.zmq_bus import ZmqBus

KEYS, OTHER = KeyPair.new(), KeyPair.new()
SHORT = Patience(stall_s=3.0, connect_s=3.0)


class Keyed:
    """A service with keys on real sockets, and its list."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "store")
        self.admission = Admission()
        self.bus = ZmqBus(SERVICE_ID, bind="tcp://127.0.0.1:0", keys=KEYS, admission=self.admission)
        self.service = StorageService(self.bus, self.store, Spool(folder / "spool"), structlog.get_logger())

    @property
    def address(self) -> str:
        return self.bus.me.addresses[0]

    async def admit(self, version: int, *entries: Admitted) -> None:
        """Store this list, as an orchestrator does, and look at it."""
        await self.store.put(MEMBERS_KEY, seal(MembersRecord(version, list(entries))))
        assert await look(self.store, self.admission)

    def client(self, name: str, keys: KeyPair, service_key: str = KEYS.public) -> RemoteStore:
        def bus() -> ZmqBus:
            found = keyed_bus(name, keys, service_key)
            assert isinstance(found, ZmqBus)
            return found

        url = service_url(self.address, service_key)
        return RemoteStore(url, self.address, bus, patience=SHORT, key=service_key)


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Keyed]:
    found = Keyed(tmp_path)
    await found.service.open()
    yield found
    await found.bus.close()
    await found.store.close()


@pytest.mark.parametrize("role", [PNODE, CLIENT])
async def test_pnodes_and_clients_are_let_in(keyed: Keyed, role: str) -> None:
    mine = KeyPair.new()
    await keyed.admit(1, Admitted(mine.public, "p0", role))
    async with keyed.client("p0", mine) as store:
        await store.put("blobs/a", b"hello")
        assert (await store.get("blobs/a")).data == b"hello"


@pytest.mark.parametrize("role", [ORCHESTRATOR, STORAGE])
async def test_other_roles_are_refused(keyed: Keyed, role: str) -> None:
    mine = KeyPair.new()
    await keyed.admit(1, Admitted(mine.public, "p0", role))
    async with keyed.client("p0", mine) as store:
        with pytest.raises(StoreError, match="role"):
            await store.get("blobs/a")


async def test_strangers_guests_and_those_revoked_get_nothing(keyed: Keyed) -> None:
    mine, guest = KeyPair.new(), KeyPair.new()
    await keyed.admit(1, Admitted(mine.public, "p0", PNODE), Admitted(guest.public, "join-1", JOIN, 0.0, -1, PNODE))
    for name, keys in (("p0", OTHER), ("join-1", guest), ("p1", mine)):
        async with keyed.client(name, keys) as store:
            with pytest.raises(StoreUnavailableError):
                await store.get("blobs/a")
    async with keyed.client("p0", mine) as store:
        await store.put("blobs/a", b"hello")
        await keyed.admit(2)
        with pytest.raises(StoreUnavailableError):
            await store.get("blobs/a")


async def test_a_service_with_another_key_is_not_believed(keyed: Keyed) -> None:
    mine = KeyPair.new()
    await keyed.admit(1, Admitted(mine.public, "p0", PNODE))
    async with keyed.client("p0", mine, OTHER.public) as store:
        with pytest.raises(StoreUnavailableError):
            await store.get("blobs/a")


def test_a_url_names_the_key() -> None:
    url = service_url("tcp://h:7701", KEYS.public)
    seen: list[str] = []
    store = open_store(url, Remote(lambda key: seen.append(key) or keyed_bus("p0", KEYS, key)))  # type: ignore[func-returns-value]
    assert isinstance(store, RemoteStore)
    assert store.url == url
    store._connection._make_bus()
    assert seen == [KEYS.public]
    for wrong in ("?key=abc", "?key=", "?x=1", f"?key={'a' * 40}&key={'a' * 40}"):
        with pytest.raises(UsageError, match="key"):
            open_store(f"dcnr://h:7701{wrong}")


def test_keys_on_one_side_only_are_refused() -> None:
    with pytest.raises(UsageError, match="this process has none"):
        keyed_bus("p0", None, KEYS.public)
    with pytest.raises(UsageError, match="has its key"):
        keyed_bus("p0", KEYS, "")


def test_the_stored_list_is_the_orchestrators() -> None:
    assert MembersRecord.__struct_fields__ == MembersList.__struct_fields__
