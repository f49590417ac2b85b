"""Writing to S3: what is stored is what was sent, and a write whose answer was lost counts once.

- Each request carries the MD5 of its body, so that bytes damaged on the way are refused and sent again. An etag that is
  not that MD5 makes us look: small objects are read back, large ones where the server turns out not to check MD5s.
  (Some servers check neither the signature of a body nor its MD5.) What is stored damaged is sent again.
- An object carries its SHA-256 and its writer's number as metadata. A conditional write that is answered "precondition
  failed" reads that number back: if it is our own, an earlier answer was lost, and the write was carried out.
- 412 means lost; 409 means that another conditional write is under way, so it's asked again.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from botocore.exceptions import ClientError

from storage.s3_errors import DIGEST_CODES, PreconditionError, code_of, gave_up
from storage.s3_multipart import Multipart
from storage.s3_read import Reader, is_md5, md5_of
from storage.s3_retry import SentBody
from storage.stall import Stall
from storage.store import CHUNK_BYTES, NotFoundError, StoreError, StoreUnavailableError, digest_of

MAX_READ_BACK_BYTES = 1 << 20
"""Larger objects are read back only from a server that does not check MD5s."""
OWN_TRIES = 2
READ_BACKS = 3


class Writer:
    """Writes one bucket."""

    def __init__(self, client: Callable[[], Awaitable[Any]], bucket: str, reader: Reader) -> None:
        self._client = client
        self._bucket = bucket
        self._reader = reader
        self._retry = reader.retry
        self._trial = asyncio.Lock()
        self._trusted: bool | None = None
        self.multipart = Multipart(client, bucket, reader.retry, self)

    async def put(self, key: str, data: bytes, condition: Mapping[str, str]) -> str:
        """One object in one request; its etag. Raises PreconditionError if the condition did not hold."""
        digest, md5 = await asyncio.to_thread(_digests, data)
        metadata = {"sha256": digest, "writer": uuid.uuid4().hex}
        limits = self._retry.limits
        for tries in range(1, limits.attempts + 1):
            etag = await self._send(key, data, md5, metadata, condition)
            whole, etag = await self._stored(key, etag, data, metadata)
            if whole:
                return etag
            if condition:
                condition = {"IfMatch": etag}  # our own damaged write, and nobody else's, is replaced
            await asyncio.sleep(limits.wait_s(tries))
        raise gave_up(self._retry.url, "put", key, "other bytes are stored than were sent, each time", limits.attempts)

    async def _send(
        self, key: str, data: bytes, md5: str, metadata: Mapping[str, str], condition: Mapping[str, str]
    ) -> str:
        client = await self._client()

        async def attempt(stall: Stall) -> str:
            body = SentBody(data, stall, self._retry.limits)
            answer = await client.put_object(
                Bucket=self._bucket, Key=key, Body=body, ContentMD5=md5, Metadata=metadata, **condition
            )
            return str(answer["ETag"])

        try:
            return await self._retry("put", key, attempt, unsure=bool(condition))
        except PreconditionError as error:
            if etag := await self.own_etag(key, metadata["writer"]):
                return etag
            if not condition:
                raise StoreUnavailableError(str(error), key=key, hint="check the store URL and the bucket") from error
            raise

    async def _stored(self, key: str, etag: str, data: bytes, metadata: Mapping[str, str]) -> tuple[bool, str]:
        """Whether the server holds what was sent, and the etag of what it holds."""
        if await asyncio.to_thread(is_md5, etag, data):
            return True, etag
        if len(data) > MAX_READ_BACK_BYTES and await self.checks_md5(key):
            return True, await self._reader.sure_etag(key, etag, b"")

        async def look(stall: Stall) -> tuple[str, str, str]:
            answer = await self._reader.open(key, {})
            body, digest = answer["Body"], hashlib.sha256()
            try:
                while chunk := await body.read(CHUNK_BYTES):
                    digest.update(chunk)
                    stall.moved(len(chunk))
            finally:
                body.close()
            return answer["Metadata"].get("writer", ""), digest.hexdigest(), str(answer["ETag"])

        seen: set[str] = set()
        for _ in range(READ_BACKS):
            try:
                writer, digest, now = await self._retry("read back", key, look)
            except NotFoundError:
                return True, etag
            if writer != metadata["writer"]:
                return True, etag  # somebody else wrote since, as they may
            if digest == metadata["sha256"]:
                return True, await self._reader.sure_etag(key, now, data)
            if digest in seen:
                break
            seen.add(digest)
        return False, await self._reader.sure_etag(key, now, b"")

    async def checks_md5(self, key: str) -> bool:
        """Whether the server refuses a body that has not the MD5 it is sent with; found out once, beside `key`."""
        async with self._trial:
            if self._trusted is None:
                client, where = await self._client(), {"Bucket": self._bucket, "Key": f"{key}.probe-{uuid.uuid4().hex}"}

                async def refused(stall: Stall) -> bool:
                    try:
                        await client.put_object(Body=b"sent", ContentMD5=md5_of(b"announced"), **where)
                    except ClientError as error:
                        if code_of(error) in DIGEST_CODES:
                            return True
                        raise
                    return False

                try:
                    self._trusted = await self._retry("try out", key, refused)
                    if not self._trusted:
                        await self._retry("delete", key, lambda stall: client.delete_object(**where))
                except StoreError:
                    return bool(self._trusted)
            return self._trusted

    async def own_etag(self, key: str, writer: str) -> str:
        """The object's etag if `writer` wrote it, "" if it's somebody else's or isn't there."""
        for _ in range(OWN_TRIES):  # an answer whose headers were damaged must not make our own write look lost
            try:
                answer = await self._reader.head(key)
            except NotFoundError:
                return ""
            if answer["Metadata"].get("writer") == writer:
                return str(answer["ETag"])
        return ""


def _digests(data: bytes) -> tuple[str, str]:
    """SHA-256 in hex, and MD5 as HTTP wants it."""
    return digest_of(data), md5_of(data)
