"""Small mutable objects that carry their own SHA-256, so that each read is verified.

The stored form is JSON: `{"sha256": "<digest of the body's bytes>", "body": …}`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from storage.limits import SEALED_BYTES
from storage.reread import read_again
from storage.store import Buffer, CorruptError, Store, Stored, digest_of

T = TypeVar("T")


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    body: msgspec.Raw


def seal(body: object) -> bytes:
    """The stored form of `body`, a msgspec struct or plain data."""
    raw = msgspec.json.encode(body, order="sorted")
    return msgspec.json.encode(_Envelope(digest_of(raw), msgspec.Raw(raw))) + b"\n"


def unseal(data: Buffer, kind: type[T], *, key: str) -> T:
    """The body of a sealed object. Raises CorruptError naming `key`."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        actual = digest_of(bytes(envelope.body))
        if actual == envelope.sha256:
            return msgspec.json.decode(envelope.body, type=kind)
        cause = f"its body has SHA-256 {actual[:16]}…, sealed as {envelope.sha256[:16]}…"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        cause = str(error)
    raise CorruptError(
        f"{key} is corrupt: {cause}", key=key, hint="it was damaged or changed by hand", found=digest_of(data)
    )


async def read_sealed(store: Store, key: str, kind: type[T], *, max_bytes: int = SEALED_BYTES) -> tuple[T, Stored]:
    """The body of a sealed object, and the object. Raises NotFoundError, CorruptError that is to be believed."""

    async def read() -> tuple[T, Stored]:
        stored = await store.get(key, max_bytes=max_bytes)
        return unseal(stored.data, kind, key=key), stored

    return await read_again(read)
