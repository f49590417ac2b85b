"""One SeaweedFS for all storage tests, and a fresh store of each kind for each test."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from storage import Store, open_store
from storage.open import open_ranged_store
from storage.remote.cache import BlobCache
from tests.integration.storage.service import serving
from tests.seaweed import ENVIRONMENT, Seaweed, seaweed_server

BUCKET = "dcnr-tests"


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """The server, with one bucket. `DCNR_TEST_S3` names another server's endpoint to run the same tests against."""
    if endpoint := os.environ.get("DCNR_TEST_S3"):
        other = Seaweed(endpoint, subprocess.Popen(["true"]))
        other.make_bucket(BUCKET)
        other.process.wait()
        yield other
        return
    with seaweed_server(tmp_path_factory.mktemp("seaweed") / "data") as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def s3_url(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store URL with a prefix of its own, and the credentials in the environment."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return seaweed.url(BUCKET, f"t-{uuid.uuid4().hex}")


@pytest.fixture(params=["local", "s3", "prefix", "remote", "remote-s3", "remote-cached"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """An empty store: a folder, a prefix in a bucket, a view of a folder; two of them behind a service."""
    if request.param.startswith("remote"):
        on = request.getfixturevalue("s3_url") if request.param == "remote-s3" else str(tmp_path / "store")
        cache = BlobCache(tmp_path / "cache", 1 << 30) if request.param == "remote-cached" else None
        async with serving(open_ranged_store(on), tmp_path / "spool") as served, served.client(cache=cache) as opened:
            yield opened
        return
    if request.param == "s3":
        opened = open_store(request.getfixturevalue("s3_url"))
    else:
        opened = open_store(str(tmp_path / "store"))
    if request.param == "prefix":
        from storage import PrefixStore

        await opened.put("other/secret", b"not yours")
        yield PrefixStore(opened, "mine/", owns=True)
    else:
        yield opened
    await opened.close()
