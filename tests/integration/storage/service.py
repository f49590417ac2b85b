"""A storage service in this process, on real sockets, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from storage.remote import SERVICE_ID
from storage.remote.cache import BlobCache
from storage.remote.client import RemoteStore
from storage.remote.connection import STORE_LIMITS, Patience
from storage.remote.service import StorageService
from storage.remote.spool import Spool
from storage.store import RangedStore
from wire.zmq_bus import ZmqBus

LOG = structlog.wrap_logger(structlog.PrintLogger(), wrapper_class=structlog.make_filtering_bound_logger(30))


class Served:
    """A service that runs, or was killed. `address` stays the same."""

    def __init__(self, store: RangedStore, spool: Path, options: dict[str, Any]) -> None:
        self._store = store
        self._spool = spool
        self._options = {"truth": True, **options}
        self._running: asyncio.Task[None] | None = None
        self._clients = 0
        self.address = "tcp://127.0.0.1:0"
        self.bus: ZmqBus
        self.service: StorageService

    async def up(self) -> None:
        """Start it, at its old address if it had one."""
        self.bus = ZmqBus(SERVICE_ID, bind=self.address)
        self.service = StorageService(self.bus, self._store, Spool(self._spool), LOG, **self._options)
        await self.service.open()
        self.address = self.bus.me.addresses[0]
        self._running = asyncio.ensure_future(self.service.run())

    async def down(self) -> None:
        """End it in good order."""
        if self._running is not None:
            self.service.stop()
            await self._running
            self._running = None
            await self.bus.close()

    async def crash(self) -> None:
        """End it without a word."""
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait([self._running])
        self._running = None
        self.bus._closed = True
        self.bus._abandon()
        self.bus._end()

    def client(
        self, address: str = "", *, cache: BlobCache | None = None, patience: Patience | None = None, name: str = ""
    ) -> RemoteStore:
        """A store that is reached through it."""
        self._clients += 1
        name = name or f"client{self._clients}"
        address = address or self.address
        url = address.replace("tcp:", "dcnr:")
        return RemoteStore(url, address, lambda: ZmqBus(name, limits=STORE_LIMITS), cache=cache, patience=patience)


@asynccontextmanager
async def serving(store: RangedStore, spool: Path, **options: Any) -> AsyncIterator[Served]:
    """A service that stands on `store`, closed with it."""
    served = Served(store, spool, options)
    await served.up()
    try:
        yield served
    finally:
        await served.down()
        await store.close()
