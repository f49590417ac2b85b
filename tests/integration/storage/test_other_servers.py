"""B41: other S3 servers and another version of the client pass the same suite, or are refused by what they lack.

Each server runs in an environment of its own (other_servers.py), and the suite in a process of its own. Beside
SeaweedFS, which all other tests use: moto and ministack, which are other implementations, and rclone, which has no
conditional writes. `DCNR_FULL=1` also runs the loops over every call there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from storage import StoreUnavailableError, open_store
from tests.integration.storage.conftest import BUCKET
from tests.integration.storage.other_servers import NotToBeHadError, client, other_server
from tests.seaweed import ENVIRONMENT, Seaweed, make_bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
OLDEST = ["aioboto3==14.0.0"]
"""The oldest client that setup.cfg allows; the installed one is the newest."""
FULL = bool(os.environ.get("DCNR_FULL"))
SUITE = ["test_conformance.py", "test_s3_faults.py", "test_s3_damage.py", *(["test_every_call.py"] if FULL else [])]
SELECT = "not local and not prefix and not bad_keys and not can_not_be and not credentials"
"""Emulators take any credentials; the rest that is left out needs no server."""
UNCHECKED = f"{SELECT} and not always_damaged"
"""moto stores what it is sent, whatever MD5 was announced: what is damaged on the way each time is stored so there."""


def had(make: Callable[[], Path]) -> Path:
    """What pip gets, or else the test is skipped (on CI, where nothing may be, that is a failure)."""
    try:
        return make()
    except NotToBeHadError as error:
        pytest.skip(str(error))


def started(server: AbstractContextManager[str]) -> Iterator[str]:
    try:
        endpoint = server.__enter__()
    except NotToBeHadError as error:
        pytest.skip(str(error))
    try:
        yield endpoint
    finally:
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from started(other_server("moto", tmp_path_factory.mktemp("moto") / "log"))


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from started(other_server("ministack", tmp_path_factory.mktemp("ministack") / "log"))


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for endpoint in started(other_server("rclone", tmp_path_factory.mktemp("rclone") / "log")):
        make_bucket(endpoint, BUCKET)
        yield endpoint


def run_suite(endpoint: str, files: list[str], select: str, versions: Path | None = None) -> str:
    """Run these files of this folder against a server; the last line of what pytest says."""
    path = os.pathsep.join([*([str(versions)] if versions else []), str(HERE.parents[2])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", select]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in files)], capture_output=True, text=True, timeout=1700,
        env=os.environ | {"DCNR_TEST_S3": endpoint, "PYTHONPATH": path}, cwd=HERE.parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    last = done.stdout.strip().splitlines()[-1]
    print(endpoint, last)
    assert int(last.split(" passed")[0].split()[-1]) > 20, "too little of it was selected"
    return last


def test_moto(moto: str) -> None:
    run_suite(moto, SUITE, UNCHECKED)


def test_ministack(ministack: str) -> None:
    run_suite(ministack, SUITE, SELECT)


def test_the_oldest_client(seaweed: Seaweed) -> None:
    """The version before last of the checksum headers, against the server that is checked most strictly."""
    versions = had(lambda: client(OLDEST))
    found = subprocess.run(
        [sys.executable, "-c", "import aioboto3, botocore; print(aioboto3.__file__, botocore.__version__)"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(versions)},
    )  # fmt: skip
    assert found.stdout.startswith(str(versions))
    print("botocore", found.stdout.split()[-1])
    run_suite(seaweed.endpoint, SUITE, SELECT, versions)


def test_the_oldest_client_with_moto(moto: str) -> None:
    run_suite(moto, ["test_conformance.py"], SELECT, had(lambda: client(OLDEST)))


async def test_a_server_without_conditional_writes_is_refused_by_name(
    rclone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    async with open_store(f"s3://{BUCKET}/p?endpoint={rclone}") as store:
        with pytest.raises(StoreUnavailableError, match=r"lacks what DCNR needs: conditional writes \(If-None-Match\)"):
            await store.probe()
        assert [entry.key async for entry in store.list("")] == []
