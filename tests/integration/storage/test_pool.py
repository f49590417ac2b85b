"""B39: ten thousand reads, of which many are broken off, and the pool of connections is as it was."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import warnings
from contextlib import aclosing
from urllib.parse import urlsplit

import psutil
import pytest

from storage import CorruptError, NotFoundError, PrefixStore
from storage.s3 import S3Store, open_s3
from storage.s3_retry import S3Limits
from tests.seaweed import Seaweed

SEED = int(os.environ.get("DCNR_SEED", "1"))
READS = 10_000
AT_ONCE = 14
LIMITS = S3Limits(connections=10)


def sockets_to(endpoint: str) -> int:
    """Connections of this process to the server, whatever their state."""
    port = urlsplit(endpoint).port
    return sum(1 for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port)


def in_use(store: PrefixStore) -> int:
    whole = store._store
    assert isinstance(whole, S3Store)
    sessions = whole._made._endpoint.http_session._sessions.values()
    return sum(len(session.connector._acquired) for session in sessions)


async def read(store: PrefixStore, chance: random.Random) -> None:
    """One read of any kind."""
    match chance.randrange(8):
        case 0:
            assert len((await store.get("small")).data) == 100
        case 1:
            with pytest.raises(NotFoundError):
                await store.get("missing")
        case 2:
            await store.head("small")
        case 3:
            with pytest.raises(NotFoundError):
                await store.head("missing")
        case 4:
            with pytest.raises(CorruptError):
                await store.get("large", max_bytes=10)
        case 5:
            async with aclosing(store.get_stream("large")) as chunks:
                await anext(chunks)
        case 6:
            with pytest.raises(NotFoundError):
                await anext(store.get_stream("missing"))
        case _:
            task = asyncio.ensure_future(store.get("large"))
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
            await asyncio.wait([task])


@pytest.mark.slow
async def test_ten_thousand_reads_leave_the_pool_as_it_was(s3_url: str, seaweed: Seaweed) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    left = READS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with open_s3(urlsplit(s3_url), LIMITS) as store:
            assert isinstance(store, PrefixStore)
            await store.put("small", b"x" * 100)
            await store.put("large", bytes(4 << 20))

            async def some() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    await read(store, chance)

            files = []
            for until in (READS * 4 // 5, 0):
                goal, left = left - until, left - until
                await asyncio.gather(*(some() for _ in range(AT_ONCE)))
                left = until
                assert goal > 0
                assert in_use(store) == 0
                assert sockets_to(seaweed.endpoint) <= LIMITS.connections
                files.append(psutil.Process().num_fds())
            assert files[1] <= files[0] + LIMITS.connections
            async with asyncio.timeout(20):
                assert len((await store.get("small")).data) == 100
        gc.collect()
        await asyncio.sleep(0.1)
        assert sockets_to(seaweed.endpoint) == 0
