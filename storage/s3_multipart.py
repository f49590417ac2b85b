"""Uploads in parts, for objects that are too large for one request.

The object appears whole when the upload is completed. Each part is tried again by itself, also one that arrived damaged
at a server that does not check MD5s. An upload that fails is aborted; one whose process dies leaves parts that take
room without being visible: `sweep` removes those.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from storage.parallel import in_parallel
from storage.s3_errors import gave_up
from storage.s3_read import is_md5, md5_of
from storage.s3_retry import Retries, SentBody
from storage.stall import Stall
from storage.store import NotFoundError, StoreError

if TYPE_CHECKING:
    from storage.s3_write import Writer

MAX_PARTS = 10_000
PARALLEL = 4
ABORT_S = 10.0
OURS = ("networks/", "blobs/", "registry/", "probe-")
"""How keys of this project begin: a bucket may be shared with others."""

Piece = Callable[[int, int], Awaitable[bytes]]
"""The bytes from a position, so many or as many as there are."""


class Multipart:
    """Uploads into one bucket."""

    def __init__(self, client: Callable[[], Awaitable[Any]], bucket: str, retry: Retries, writer: Writer) -> None:
        self._client = client
        self._bucket = bucket
        self._retry = retry
        self._writer = writer

    async def put(self, key: str, piece: Piece, size: int, sha256: str) -> str:
        """Upload `size` bytes that `piece` gives; the etag."""
        client = await self._client()
        writer = uuid.uuid4().hex
        metadata = {"sha256": sha256, "writer": writer}
        answer = await self._retry(
            "begin the upload of", key,
            lambda stall: client.create_multipart_upload(Bucket=self._bucket, Key=key, Metadata=metadata),
        )  # fmt: skip
        where = {"Bucket": self._bucket, "Key": key, "UploadId": answer["UploadId"]}
        try:
            parts = await self._send(client, where, key, piece, size)
            return await self._complete(client, where, key, parts, writer)
        except BaseException:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await self._abort(client, where)
            raise

    async def _abort(self, client: Any, where: dict[str, str]) -> None:
        await self._retry(
            "abort the upload of", where["Key"], lambda stall: client.abort_multipart_upload(**where)
        )  # fmt: skip

    async def _send(
        self, client: Any, where: dict[str, str], key: str, piece: Piece, size: int
    ) -> list[dict[str, Any]]:
        step = max(self._retry.limits.part_bytes, -(-size // MAX_PARTS))

        async def send(number: int) -> dict[str, Any]:
            data = await piece((number - 1) * step, step)
            md5 = await asyncio.to_thread(md5_of, data)

            def attempt(stall: Stall) -> Awaitable[Any]:
                body = SentBody(data, stall, self._retry.limits)
                sent: Awaitable[Any] = client.upload_part(PartNumber=number, Body=body, ContentMD5=md5, **where)
                return sent

            what = f"upload part {number} of"
            for tries in range(1, self._retry.limits.attempts + 1):
                answer = await self._retry(what, key, attempt)
                if is_md5(answer["ETag"], data) or await self._writer.checks_md5(key):
                    return {"PartNumber": number, "ETag": answer["ETag"]}
                await asyncio.sleep(self._retry.limits.wait_s(tries))
            raise gave_up(self._retry.url, what, key, "other bytes are stored than were sent, each time", tries)

        return await in_parallel(send, range(1, -(-size // step) + 1), PARALLEL)

    async def _complete(
        self, client: Any, where: dict[str, str], key: str, parts: list[dict[str, Any]], writer: str
    ) -> str:
        try:
            answer = await self._retry(
                "complete the upload of", key,
                lambda stall: client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where),
                stall_s=self._retry.limits.complete_s,
            )  # fmt: skip
        except NotFoundError:
            if etag := await self._writer.own_etag(key, writer):
                return etag
            raise
        return str(answer["ETag"])

    async def sweep(self, prefix: str) -> int:
        """Abort our uploads below `prefix` that were begun long ago, by the server's clock; how many."""
        client = await self._client()
        extra: dict[str, str] = {}
        aborted = 0
        while True:
            ask = {"Bucket": self._bucket, "Prefix": prefix, **extra}
            page = await self._retry("list the uploads of", prefix, partial(_list_uploads, client, ask))
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in page.get("Uploads", []):
                age_s = (now - upload["Initiated"]).total_seconds()
                if age_s >= self._retry.limits.stale_upload_s and upload["Key"].removeprefix(prefix).startswith(OURS):
                    await self._abort(
                        client, {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    )
                    aborted += 1
            if not page.get("IsTruncated"):
                return aborted
            extra = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


async def _list_uploads(client: Any, ask: dict[str, str], stall: Stall) -> Any:
    return await client.list_multipart_uploads(**ask)
