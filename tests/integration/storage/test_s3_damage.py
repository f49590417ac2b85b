"""Bits that flip between here and an S3 server, in bodies and in headers, or in the server's own disk."""

from __future__ import annotations

import os
import random
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

from storage import ConflictError, CorruptError, PrefixStore, Store, open_store
from storage.checkpoints import load_part, save_part_bytes
from storage.keys import part_key, session_prefix
from storage.s3 import S3Store, open_s3
from storage.s3_retry import S3Limits
from storage.store import digest_of
from tests.integration.storage.breaking_proxy import BreakingProxy, Exchange, breaking_proxy
from tests.integration.storage.conftest import BUCKET
from tests.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

SEED = int(os.environ.get("DCNR_SEED", "1"))
FAST = S3Limits(
    attempts=4, wait_initial_s=0.01, wait_max_s=0.05, jitter_s=0.01, stall_s=5.0, multipart_from_bytes=6 << 20,
    part_bytes=5 << 20,
)  # fmt: skip


@pytest.fixture
async def proxy(seaweed: Seaweed) -> AsyncIterator[BreakingProxy]:
    async with breaking_proxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
async def store(s3_url: str, proxy: BreakingProxy, seaweed: Seaweed) -> AsyncIterator[Store]:
    async with open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), FAST) as opened:
        yield opened


@pytest.fixture
async def direct(s3_url: str) -> AsyncIterator[Store]:
    async with open_store(s3_url) as opened:
        yield opened


def flip(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    bit = chance.randrange(8 * len(data))
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("size", [1, 5_000, 11 << 20], ids=["1", "5000", "in parts"])
async def test_uploads_that_arrive_damaged_are_sent_again(
    store: Store, direct: Store, proxy: BreakingProxy, size: int
) -> None:
    """Not every server checks the signature of a body; each checks its MD5."""
    print("seed", SEED)
    chance, damaged = random.Random(SEED), []
    data = os.urandom(size)

    def damage(exchange: Exchange, body: bytes) -> bytes:
        if exchange.method != "PUT" or len(damaged) >= 3 or exchange.number % 2 == 0:
            return body
        damaged.append(exchange.path)
        return flip(body, chance)

    proxy.sending = damage
    await store.put("k", data)
    assert damaged
    assert (await direct.get("k", sha256=digest_of(data))).data == data
    if size < 1 << 20:
        damaged.clear()
        etag = await store.put_if_absent("new", data)
        assert (await direct.get("new")).etag == etag
        damaged.clear()
        etag = await store.put_if_match("new", data + b"2", etag)
        assert (await direct.get("new")).data == data + b"2"


async def test_an_upload_that_is_always_damaged_stores_nothing(
    store: Store, direct: Store, proxy: BreakingProxy
) -> None:
    await direct.put("k", b"old")
    proxy.sending = lambda exchange, body: flip(body, random.Random(1)) if exchange.method == "PUT" else body
    with pytest.raises(Exception, match="gave up after 4 attempts"):
        await store.put("k", b"new" * 100)
    assert (await direct.get("k")).data == b"old"


def other_etag(exchange: Exchange) -> bytes:
    """The reply with one digit of its etag changed."""
    head = exchange.reply_head
    found = re.search(rb'(?i)etag: "?([0-9a-f])', head)
    if not found:
        return head + exchange.reply_body
    at = found.start(1)
    return head[:at] + (b"1" if head[at : at + 1] == b"0" else b"0") + head[at + 1 :] + exchange.reply_body


async def test_a_damaged_etag_does_not_make_the_next_write_look_lost(
    store: Store, direct: Store, proxy: BreakingProxy
) -> None:
    def damage_next() -> None:
        first = proxy.total + 1
        proxy.after = lambda exchange: other_etag(exchange) if exchange.total == first else None

    etag = await direct.put_if_absent("k", b"one")
    damage_next()
    stored = await store.get("k")
    assert stored.etag == etag
    damage_next()
    etag = await store.put_if_match("k", b"two", stored.etag)
    assert (await direct.get("k")).etag == etag
    damage_next()
    assert await store.put_if_absent("other", b"three") == (await direct.get("other")).etag
    assert proxy.total > 6


async def test_a_server_with_etags_of_its_own_is_believed_when_it_says_it_twice(
    store: Store, direct: Store, proxy: BreakingProxy
) -> None:
    """Etags need not be MD5s (encrypted buckets): every reply has the same other one here."""
    proxy.after = other_etag
    etag = await store.put_if_absent("k", b"one")
    stored = await store.get("k")
    assert stored.etag == etag != (await direct.get("k")).etag


async def test_damage_on_the_servers_disk_is_found_by_every_read(store: Store, s3_url: str, seaweed: Seaweed) -> None:
    """The object keeps its headers and its size; a bit of its body is another."""
    prefix = session_prefix("net", "net-1")
    part = await save_part_bytes(store, prefix, "fc", bytes(1000))
    await store.put("record", b"whole")
    assert isinstance(store, PrefixStore)
    whole = store._store
    assert isinstance(whole, S3Store)
    client: Any = boto3.client(
        "s3", endpoint_url=seaweed.endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )  # fmt: skip
    folder = urlsplit(s3_url).path.strip("/")
    for key in (part_key(prefix, part.digest), "record"):
        there = client.get_object(Bucket=BUCKET, Key=f"{folder}/{key}")
        body = flip(there["Body"].read(), random.Random(SEED))
        client.put_object(Bucket=BUCKET, Key=f"{folder}/{key}", Body=body, Metadata=there["Metadata"])
    client.close()
    with pytest.raises(CorruptError, match=r"record: 5 bytes with SHA-256 .* gave up after 4 attempts"):
        await store.get("record")
    with pytest.raises(CorruptError, match=part.digest) as caught:
        await load_part(store, prefix, part)
    assert caught.value.key.endswith(part_key(prefix, part.digest))
    with pytest.raises(ConflictError):
        await store.put_if_absent("record", b"another")
    again = await save_part_bytes(store, prefix, "fc", bytes(1000))
    assert (await store.get(part_key(prefix, again.digest), sha256=again.digest)).data == bytes(1000)
