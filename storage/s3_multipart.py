"""Uploads in parts, for objects that are too large for one request.

The object appears whole when the upload is completed. An upload that fails is aborted; one whose process dies leaves
parts that take room without being visible: a lifecycle rule on the bucket removes those.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from storage.store import NotFoundError, StoreError

MAX_PARTS = 10_000
PARALLEL = 4
ABORT_S = 10.0

T = TypeVar("T")


class Retry(Protocol):
    """`S3Store._retry`: the work until it succeeds, its errors turned into ours."""

    async def __call__(self, what: str, key: str, work: Callable[[], Awaitable[T]], *, size_bytes: int = 0) -> T: ...


@dataclass(frozen=True, slots=True)
class Multipart:
    """Uploads into one bucket."""

    client: Callable[[], Awaitable[Any]]
    bucket: str
    retry: Retry
    own_etag: Callable[[str, str], Awaitable[str]]
    part_bytes: int

    async def put(self, key: str, piece: Callable[[int, int], Awaitable[bytes]], size: int, sha256: str) -> str:
        """Upload `size` bytes that `piece(start, length)` gives; the etag."""
        client = await self.client()
        writer = uuid.uuid4().hex
        metadata = {"sha256": sha256, "writer": writer}
        answer = await self.retry(
            "begin the upload of", key,
            lambda: client.create_multipart_upload(Bucket=self.bucket, Key=key, Metadata=metadata),
        )  # fmt: skip
        where = {"Bucket": self.bucket, "Key": key, "UploadId": answer["UploadId"]}
        try:
            parts = await self._send(client, where, key, piece, size)
            return await self._complete(client, where, key, parts, writer)
        except BaseException:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await self.retry("abort the upload of", key, lambda: client.abort_multipart_upload(**where))
            raise

    async def _send(
        self, client: Any, where: dict[str, str], key: str, piece: Callable[[int, int], Awaitable[bytes]], size: int
    ) -> list[dict[str, Any]]:
        step = max(self.part_bytes, -(-size // MAX_PARTS))
        gate = asyncio.Semaphore(PARALLEL)

        async def send(number: int) -> dict[str, Any]:
            async with gate:
                body = await piece((number - 1) * step, step)
                answer = await self.retry(
                    f"upload part {number} of",
                    key,
                    lambda: client.upload_part(PartNumber=number, Body=body, **where),
                    size_bytes=len(body),
                )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(send(number)) for number in range(1, -(-size // step) + 1)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _complete(
        self, client: Any, where: dict[str, str], key: str, parts: list[dict[str, Any]], writer: str
    ) -> str:
        try:
            answer = await self.retry(
                "complete the upload of", key,
                lambda: client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where),
            )  # fmt: skip
        except NotFoundError:
            if etag := await self.own_etag(key, writer):
                return etag
            raise
        return str(answer["ETag"])
