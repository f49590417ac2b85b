"""Writing to S3: what is stored is what was sent, and a write whose answer was lost counts once.

- Each request carries the MD5 of its body, so that bytes damaged on the way are refused and sent again. (Some servers
  do not check the signature of a body.) An etag that is not that MD5 makes us read back what is stored.
- An object carries its SHA-256 and its writer's number as metadata. A conditional write that is answered "precondition
  failed" reads that number back: if it is our own, an earlier answer was lost, and the write was carried out.
- 412 means lost; 409 means that another conditional write is under way, so it's asked again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from storage.s3_errors import AgainError, PreconditionError
from storage.s3_multipart import Multipart
from storage.s3_read import Reader, is_md5, md5_of
from storage.s3_retry import SentBody
from storage.stall import Stall
from storage.store import NotFoundError, StoreUnavailableError, digest_of

MAX_READ_BACK_BYTES = 1 << 20
OWN_TRIES = 2


class Writer:
    """Writes one bucket."""

    def __init__(self, client: Callable[[], Awaitable[Any]], bucket: str, reader: Reader) -> None:
        self._client = client
        self._bucket = bucket
        self._reader = reader
        self._retry = reader.retry
        self.multipart = Multipart(client, bucket, reader.retry, self.own_etag)

    async def put(self, key: str, data: bytes, condition: Mapping[str, str]) -> str:
        """One object in one request; its etag. Raises PreconditionError if the condition did not hold."""
        client = await self._client()
        digest, md5 = await asyncio.to_thread(_digests, data)
        metadata = {"sha256": digest, "writer": uuid.uuid4().hex}

        async def attempt(stall: Stall) -> str:
            body = SentBody(data, stall, self._retry.limits)
            answer = await client.put_object(
                Bucket=self._bucket, Key=key, Body=body, ContentMD5=md5, Metadata=metadata, **condition
            )
            return str(answer["ETag"])

        try:
            etag = await self._retry("put", key, attempt, unsure=bool(condition))
        except PreconditionError as error:
            if etag := await self.own_etag(key, metadata["writer"]):
                return await self._settled(key, etag, data, metadata)
            if not condition:
                raise StoreUnavailableError(str(error), key=key, hint="check the store URL and the bucket") from error
            raise
        return await self._settled(key, etag, data, metadata)

    async def _settled(self, key: str, etag: str, data: bytes, metadata: Mapping[str, str]) -> str:
        """The etag of what was written, once it is sure that the server holds what was sent."""
        if len(data) > MAX_READ_BACK_BYTES or await asyncio.to_thread(is_md5, etag, data):
            return etag

        async def look(stall: Stall) -> str:
            answer = await self._reader.open(key, {})
            body = answer["Body"]
            try:
                found = await body.read()
            finally:
                body.close()
            if answer["Metadata"].get("writer") != metadata["writer"]:
                return etag  # somebody else wrote since, as they may
            if digest_of(found) != metadata["sha256"]:
                raise AgainError("reading back gives other bytes than were written", corrupt=True)
            return str(answer["ETag"])

        try:
            return await self._reader.sure_etag(key, await self._retry("read back", key, look), data)
        except NotFoundError:
            return etag

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
