"""What networks and servers do to S3 clients: lost replies, broken bodies, damaged bytes, missing features."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage import ConflictError, CorruptError, NotFoundError, PrefixStore, Store, StoreUnavailableError, open_store
from storage.s3 import S3Store, open_s3
from storage.s3_retry import S3Limits
from storage.store import digest_of
from tests.integration.storage.breaking_proxy import BreakingProxy, Exchange, breaking_proxy, canned
from tests.seaweed import SECRET_KEY, Seaweed
from wire.errors import UsageError

FAST = S3Limits(
    attempts=4, wait_initial_s=0.01, wait_max_s=0.05, jitter_s=0.01, stall_s=5.0, connections=10,
    multipart_from_bytes=6 << 20, part_bytes=5 << 20,
)  # fmt: skip


@pytest.fixture
async def proxy(seaweed: Seaweed) -> AsyncIterator[BreakingProxy]:
    async with breaking_proxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
async def store(s3_url: str, proxy: BreakingProxy, seaweed: Seaweed) -> AsyncIterator[Store]:
    opened = open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), FAST)
    yield opened
    await opened.close()


def inner(store: Store) -> S3Store:
    assert isinstance(store, PrefixStore)
    found = store._store
    assert isinstance(found, S3Store)
    return found


def half(exchange: Exchange) -> bytes:
    return exchange.reply_head + exchange.reply_body[: len(exchange.reply_body) // 2]


@pytest.mark.parametrize("times", [1, 3])
async def test_a_body_that_breaks_off_is_read_again(store: Store, proxy: BreakingProxy, times: int) -> None:
    data = os.urandom(3 << 20)
    await store.put("k", data)
    proxy.after = lambda exchange: half(exchange) if exchange.method == "GET" and exchange.number <= times else None
    assert (await store.get("k")).data == data
    assert proxy.counts["GET"] == times + 1
    proxy.counts.clear()
    assert b"".join([chunk async for chunk in store.get_stream("k", sha256=digest_of(data))]) == data
    assert proxy.counts["GET"] == times + 1


async def test_a_body_that_always_breaks_off_is_one_clear_error(store: Store, proxy: BreakingProxy) -> None:
    """B37: each reply ends at half of its body, or nothing beyond half of the object ever comes."""
    await store.put("parts/k", bytes(2000))
    proxy.after = lambda exchange: half(exchange) if exchange.method == "GET" else None
    with pytest.raises(StoreUnavailableError, match=r"parts/k: .*1999 of 2000 bytes.*gave up after 4 attempts"):
        await store.get("parts/k")

    def never_beyond(exchange: Exchange) -> bytes | None:
        if exchange.method != "GET":
            return None
        return exchange.reply_head if "range" in exchange.headers else half(exchange)

    proxy.after = never_beyond
    for read in (store.get("parts/k"), _stream(store, "parts/k")):
        with pytest.raises(
            StoreUnavailableError, match=r"parts/k: .*1000 of 2000 bytes.*gave up after 4 attempts"
        ) as caught:
            await read
        assert caught.value.exit_code == 69
        assert caught.value.key.endswith("parts/k")
    proxy.after = lambda exchange: exchange.reply_head if exchange.method == "GET" else None
    with pytest.raises(StoreUnavailableError, match=r"parts/k: .*0 of 2000 bytes.*gave up after 4 attempts"):
        await _stream(store, "parts/k")
    proxy.after = lambda exchange: None
    assert len((await store.get("parts/k")).data) == 2000


async def _stream(store: Store, key: str, sha256: str | None = None) -> bytes:
    return b"".join([chunk async for chunk in store.get_stream(key, sha256=sha256)])


async def test_damaged_bytes_are_never_handed_over(store: Store, proxy: BreakingProxy) -> None:
    data = bytes(5000)
    await store.put("k", data)

    def damage(exchange: Exchange) -> bytes | None:
        if exchange.method != "GET" or exchange.number > limit:
            return None
        return exchange.reply_head + exchange.reply_body[:-1] + b"x"

    limit = 2
    proxy.after = damage
    assert (await store.get("k")).data == data
    proxy.counts.clear()
    limit = 1000
    with pytest.raises(CorruptError, match=r"k: 5000 bytes with SHA-256 .* gave up after 4 attempts"):
        await store.get("k")
    with pytest.raises(CorruptError):
        [chunk async for chunk in store.get_stream("k")]


async def test_a_write_whose_reply_is_lost_counts_once(store: Store, proxy: BreakingProxy) -> None:
    def lose(exchange: Exchange) -> bytes | None:
        return b"" if exchange.method == "PUT" and exchange.number == 1 else None

    proxy.after = lose
    etag = await store.put_if_absent("k", b"one")
    assert proxy.counts["PUT"] == 2
    assert await store.get("k") == (await store.get("k", sha256=digest_of(b"one")))
    assert (await store.get("k")).etag == etag
    proxy.counts.clear()
    etag = await store.put_if_match("k", b"two", etag)
    assert proxy.counts["PUT"] == 2
    assert (await store.get("k")).etag == etag
    proxy.counts.clear()
    await store.put("k", b"three")
    assert (await store.get("k")).data == b"three"


async def test_a_lost_reply_does_not_hide_another_writer(proxy: BreakingProxy, s3_url: str, seaweed: Seaweed) -> None:
    """No attempt arrives before another writer has created the object with the same bytes: that is not our write."""
    async with open_store(s3_url) as other:
        lost, stolen = asyncio.Event(), asyncio.Event()

        def lose(exchange: Exchange) -> bytes | None:
            if exchange.method == "PUT" and not stolen.is_set():
                lost.set()
                return b""
            return None

        async def steal() -> None:
            await lost.wait()
            await other.put_if_absent("k", b"same")
            stolen.set()

        proxy.before = lose
        thief = asyncio.create_task(steal())
        patient = S3Limits(attempts=4, wait_initial_s=1.0, jitter_s=0.1)
        async with open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), patient) as slow:
            with pytest.raises(ConflictError):
                await slow.put_if_absent("k", b"same")
        await thief


async def test_409_is_asked_again_and_412_is_not(store: Store, proxy: BreakingProxy) -> None:
    def busy(exchange: Exchange) -> bytes | None:
        if exchange.method == "PUT" and exchange.number <= 2:
            return canned(409, "ConditionalRequestConflict")
        return None

    proxy.before = busy
    await store.put_if_absent("k", b"one")
    assert proxy.counts["PUT"] == 3
    with pytest.raises(ConflictError):
        await store.put_if_absent("k", b"two")
    assert proxy.counts["PUT"] == 4


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (429, "Throttling")])
async def test_a_busy_server_is_asked_again(store: Store, proxy: BreakingProxy, status: int, code: str) -> None:
    proxy.before = lambda exchange: canned(status, code) if exchange.number <= 2 else None
    await store.put("k", b"one")
    assert (await store.get("k")).data == b"one"
    assert [entry.key async for entry in store.list("")] == ["k"]
    await store.delete("k")


async def test_an_upload_in_parts_survives_lost_replies(store: Store, proxy: BreakingProxy) -> None:
    data = os.urandom(11 << 20)
    proxy.after = lambda exchange: b"" if exchange.method == "PUT" and exchange.number == 2 else None
    await store.put("k", data)
    assert (await store.get("k", sha256=digest_of(data))).data == data
    completions: list[str] = []

    def lose_completion(exchange: Exchange) -> bytes | None:
        if exchange.method == "POST" and "uploadId" in exchange.path:
            completions.append(exchange.path)
            return b"" if len(completions) == 1 else None
        return None

    proxy.after = lose_completion
    await store.put("k2", data)
    assert len(completions) == 2
    assert (await store.get("k2", sha256=digest_of(data))).data == data


async def test_an_upload_that_fails_is_aborted(store: Store, proxy: BreakingProxy) -> None:
    proxy.before = lambda exchange: canned(403, "AccessDenied") if "partNumber=2" in exchange.path else None
    with pytest.raises(StoreUnavailableError, match="AccessDenied"):
        await store.put("k", bytes(11 << 20))
    assert any(line.startswith("DELETE") and "uploadId" in line for line in proxy.log)
    with pytest.raises(NotFoundError):
        await store.get("k")


FEATURES = {
    "If-None-Match": lambda e: (
        canned(200, headers='ETag: "1"\r\n', body=b"") if e.headers.get("if-none-match") and e.number == 2 else None
    ),
    "If-Match": lambda e: (
        canned(200, headers='ETag: "1"\r\n', body=b"") if e.method == "PUT" and e.headers.get("if-match") else None
    ),
    "uploads in parts": lambda e: canned(501, "NotImplemented") if e.method == "POST" else None,
    "listing": lambda e: (
        canned(200, body=b"<?xml version='1.0'?><ListBucketResult></ListBucketResult>")
        if "list-type" in e.path
        else None
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
async def test_the_probe_names_the_missing_feature(store: Store, proxy: BreakingProxy, feature: str) -> None:
    await inner(store).probe()
    proxy.counts.clear()
    proxy.before = FEATURES[feature]
    with pytest.raises(StoreUnavailableError, match=f"lacks what DCNR needs: .*{feature}|an object just written"):
        await inner(store).probe()


async def test_an_absent_server_is_unreachable_and_says_so(s3_url: str, seaweed: Seaweed) -> None:
    url = s3_url.replace(seaweed.endpoint, "http://127.0.0.1:9")
    async with open_s3(urlsplit(url), FAST) as store:
        with pytest.raises(StoreUnavailableError, match=r"k: .*gave up after 4 attempts") as caught:
            await store.put_if_absent("k", b"")
    assert "may or may not have been stored" in str(caught.value)


async def test_wrong_bucket_and_wrong_credentials(
    s3_url: str, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_s3(urlsplit(seaweed.url("no-such-bucket")), FAST) as store:
        with pytest.raises(StoreUnavailableError, match="no-such-bucket"):
            await store.get("k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-" + SECRET_KEY)
    async with open_s3(urlsplit(s3_url), FAST) as store:
        with pytest.raises(StoreUnavailableError, match="HTTP 403") as caught:
            await store.get("k")
    assert SECRET_KEY not in str(caught.value)
    assert "credentials" in str(caught.value)


async def test_no_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    async with open_s3(urlsplit(s3_url), FAST) as store:
        with pytest.raises(StoreUnavailableError, match="AWS_ACCESS_KEY_ID"):
            await store.get("k")


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///prefix", "s3://key:secret@bucket/p", "s3://b/p?endpoint=ftp://x", "s3://b/p?secret=x",
        "s3://b/p?endpoint=http://u:p@h", "s3://b?endpoint=http://a&endpoint=http://b", "gs://b/p", "file://host/p",
        "file://", "nonsense", "", "/a\0b", "file:///a?x=1",
    ],
)  # fmt: skip
def test_store_urls_that_can_not_be(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "secret@" not in str(caught.value)


def test_a_prefix_of_the_url_is_a_folder_of_keys() -> None:
    with pytest.raises(Exception, match=r"not allowed|segment"):
        open_store("s3://bucket/../x")
