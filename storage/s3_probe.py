"""What DCNR needs of an S3 server, tried out before anything depends on it."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

from storage.store import ConflictError, Store, StoreError, StoreUnavailableError, digest_of

if TYPE_CHECKING:
    from storage.s3_multipart import Multipart


async def probe_s3(store: Store, multipart: Multipart) -> None:
    """Try each feature on an object of its own. Raises StoreUnavailableError naming the one that is missing."""
    key = f"probe-{uuid.uuid4().hex}"
    feature = "writing"

    def missing(what: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{store.url}: the server lacks what DCNR needs: {what}", key=key,
            hint="use a server with conditional writes and metadata, such as AWS S3, SeaweedFS, MinIO or Ceph",
        )  # fmt: skip

    try:
        etag = await store.put_if_absent(key, b"first")
        feature = "reading"
        if (await store.get(key)).data != b"first":
            raise missing("it reads back other bytes than were written")
        feature = "conditional writes (If-None-Match)"
        with contextlib.suppress(ConflictError):
            await store.put_if_absent(key, b"second")
            raise missing(f"{feature} are ignored")
        feature = "conditional writes (If-Match)"
        with contextlib.suppress(ConflictError):
            await store.put_if_match(key, b"third", '"0123456789abcdef0123456789abcdef"')
            raise missing(f"{feature} are ignored")
        if (await store.put_if_match(key, b"fourth", etag)) == etag:
            raise missing("etags do not change with the bytes")
        feature = "uploads in parts"

        async def piece(start: int, size: int) -> bytes:
            return b"in parts"

        await multipart.put(key, piece, 8, digest_of(b"in parts"))
        if (await store.get(key, sha256=digest_of(b"in parts"))).data != b"in parts":
            raise missing("uploads in parts give other bytes")
        feature = "listing"
        if [entry.key async for entry in store.list(key)] != [key]:
            raise missing("an object just written is not listed")
    except ConflictError as error:
        raise missing(f"{feature}: {error.message}") from error
    except StoreUnavailableError as error:
        if error.hint.startswith("does this server"):
            raise missing(f"{feature}: {error.message}") from error
        raise
    finally:
        with contextlib.suppress(StoreError):
            await store.delete(key)
