"""What moves goes on, however long it takes; what stands still ends, is taken up where it stood, and is reported."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage import Blobs, NotFoundError, Store, StoreUnavailableError, open_store
from storage.checkpoints import load_part, save_part_bytes
from storage.keys import session_prefix
from storage.s3 import open_s3
from storage.s3_retry import S3Limits
from storage.stall import Stall, StallError, watched
from storage.store import digest_of
from storage.tensors import encode_tensors
from tests.integration.storage.slow_proxy import SlowProxy, slow_proxy
from tests.seaweed import Seaweed

STALL_S = 2.0
LONG_S = 2.5 * STALL_S
PATIENT = S3Limits(
    attempts=3, wait_initial_s=0.01, wait_max_s=0.02, jitter_s=0.01, stall_s=STALL_S, slowest_bytes_s=300_000,
    multipart_from_bytes=6 << 20, part_bytes=5 << 20,
)  # fmt: skip
HASTY = replace(PATIENT, slowest_bytes_s=1e12)
"""Takes nothing to be still in this machine's send buffer."""
PREFIX = session_prefix("net", "net-1")


@pytest.fixture
async def proxy(seaweed: Seaweed) -> AsyncIterator[SlowProxy]:
    async with slow_proxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
async def store(s3_url: str, proxy: SlowProxy, seaweed: Seaweed) -> AsyncIterator[Store]:
    opened = open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), PATIENT)
    yield opened
    await opened.close()


@pytest.fixture
async def direct(s3_url: str) -> AsyncIterator[Store]:
    """The same place, without the relay."""
    async with open_store(s3_url) as opened:
        yield opened


async def read_by_stream(store: Store, key: str) -> bytes:
    return b"".join([chunk async for chunk in store.get_stream(key)])


async def read_whole(store: Store, key: str) -> bytes:
    return (await store.get(key)).data


@pytest.mark.parametrize("read", [read_whole, read_by_stream])
async def test_a_slow_download_goes_on(direct: Store, store: Store, proxy: SlowProxy, read: object) -> None:
    """Longer than the stall limit in all, and in one request."""
    data = os.urandom(400_000)
    await direct.put("k", data)
    proxy.down_bytes_s = len(data) / LONG_S
    started = time.monotonic()
    assert await read(store, "k") == data  # type: ignore[operator]
    assert time.monotonic() - started > STALL_S
    assert proxy.connections == 1


async def test_a_slow_upload_goes_on(direct: Store, store: Store, proxy: SlowProxy, tmp_path: Path) -> None:
    """In one request, from a file, and in parts."""
    data = os.urandom(3_000_000)
    (tmp_path / "file").write_bytes(data)
    proxy.up_bytes_s = len(data) / LONG_S
    started = time.monotonic()
    await asyncio.gather(store.put("a", data), store.put_file("b", tmp_path / "file"))
    assert time.monotonic() - started > STALL_S
    assert proxy.moved["up"] < 2.5 * len(data)
    for key in ("a", "b"):
        assert (await direct.get(key)).data == data
    large = os.urandom(11 << 20)
    proxy.up_bytes_s = (5 << 20) / LONG_S
    await store.put("c", large)
    assert (await direct.get("c")).data == large


@pytest.mark.parametrize("read", [read_whole, read_by_stream])
async def test_a_download_that_stands_still_is_taken_up_where_it_stood(
    direct: Store, store: Store, proxy: SlowProxy, read: object
) -> None:
    data = os.urandom(2_000_000)
    await direct.put("k", data)
    proxy.freeze_down, proxy.frozen = 1_500_000, 1
    assert await read(store, "k") == data  # type: ignore[operator]
    assert proxy.connections == 2
    assert proxy.moved["down"] < 1.2 * len(data)


async def test_an_upload_in_parts_sends_only_the_part_again_that_stood_still(
    direct: Store, s3_url: str, seaweed: Seaweed, proxy: SlowProxy
) -> None:
    data = os.urandom(21 << 20)
    proxy.freeze_up, proxy.frozen = 2_000_000, 1
    async with open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), HASTY) as store:
        await store.put("k", data)
    assert (await direct.get("k")).data == data
    assert proxy.moved["up"] < len(data) + (8 << 20)


async def test_what_stands_still_for_ever_is_one_error_with_key_bytes_and_attempts(
    direct: Store, s3_url: str, seaweed: Seaweed, proxy: SlowProxy
) -> None:
    await direct.put("large", bytes(2_000_000))
    limits = S3Limits(attempts=3, wait_initial_s=0.01, jitter_s=0.01, stall_s=0.4, slowest_bytes_s=1e12)
    proxy.frozen = 1000
    async with open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), limits) as store:
        proxy.freeze_down = 500
        for read in (read_whole, read_by_stream):
            with pytest.raises(StoreUnavailableError, match=r"large: .*after 3 attempts") as caught:
                await read(store, "large")
            assert caught.value.key.endswith("large")
        with pytest.raises(
            StoreUnavailableError, match=r"large: .* \d{6,} of 2000000 bytes .*gave up after 3 attempts"
        ):
            await _stands_still_in_the_middle(store, proxy)
        proxy.freeze_down, proxy.freeze_up = 0, 300_000
        with pytest.raises(
            StoreUnavailableError,
            match=r"up: no answer: nothing moved for 0\.4 s, after [1-9]\d{4,} bytes; gave up after 3 attempts",
        ):
            await store.put("up", bytes(8_000_000))
    with pytest.raises(NotFoundError):
        await direct.get("up")


async def _stands_still_in_the_middle(store: Store, proxy: SlowProxy) -> None:
    """Some of the object comes, and from then on nothing, on any connection."""
    proxy.moved["down"], proxy.freeze_down = 0, 1_000_000
    async for _ in store.get_stream("large"):
        if proxy.moved["down"] > 500_000:
            proxy.freeze_down = 1


async def test_progress_is_told_while_a_part_or_a_blob_comes(
    direct: Store, store: Store, proxy: SlowProxy, tmp_path: Path
) -> None:
    import torch

    data = encode_tensors({"param.weight": torch.zeros(75_000)})
    part = await save_part_bytes(direct, PREFIX, "fc", data)
    digest = await Blobs(direct).put(data)
    proxy.down_bytes_s = 600_000
    told: list[int] = []
    state = await load_part(store, PREFIX, part, on_bytes=told.append)
    assert state["param.weight"].numel() == 75_000
    assert sum(told) == len(data)
    assert len(told) > 3
    told.clear()
    await Blobs(store).fetch_to_file(digest, tmp_path / "blob", on_bytes=told.append)
    assert digest_of((tmp_path / "blob").read_bytes()) == digest
    assert sum(told) == len(data)
    assert len(told) > 3


async def test_the_timer_itself() -> None:
    """It is moved on by bytes, ends what stands still, and leaves other time limits to others."""
    stall = Stall(0.3)
    async with watched(stall):
        for _ in range(8):
            await asyncio.sleep(0.06)
            stall.moved(1)
    assert stall.moved_bytes == 8
    with pytest.raises(StallError, match="nothing moved for 0"):
        async with watched(Stall(0.05)):
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError) as caught:
        async with watched(Stall(60)), asyncio.timeout(0.01):
            await asyncio.sleep(60)
    assert not isinstance(caught.value, StallError)
