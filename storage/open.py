"""From a store's URL to a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from storage.local import LocalStore
from storage.store import RangedStore, Store
from wire.errors import MisuseError, UsageError

if TYPE_CHECKING:
    from storage.remote.cache import BlobCache
    from storage.remote.connection import MakeBus
    from wire.bus import Bus

FORMS = "file:///path, /path, s3://bucket/prefix?endpoint=http://host:port&region=…, or dcnr://host:port"


@dataclass(frozen=True, slots=True)
class Remote:
    """How this process reaches storage services: `make_bus` gives a bus for one store, None: one of its own kind.

    `cache`: where what was fetched is kept.
    """

    make_bus: MakeBus | None = None
    cache: BlobCache | None = None


def open_store(url: str, remote: Remote = Remote()) -> Store:
    """The store of `url`: `file:///path`, `/path`, `s3://bucket/prefix?endpoint=http://host:port&region=…`, or
    `dcnr://host:port`, a storage service.

    Nothing is opened yet: the first call, or `probe()`, finds out whether it answers. S3 credentials come from the
    usual AWS environment, never from the URL. Raises UsageError for a URL that can't be one.
    """
    if not url.startswith("dcnr:"):
        return open_ranged_store(url)
    return _open_remote(urlsplit(_without_nul(url)), remote)


def open_ranged_store(url: str) -> RangedStore:
    """As `open_store`, of a store that a storage service can stand on. Raises UsageError."""
    url = _without_nul(url)
    if url.startswith(("/", "./", "../", "~")):
        return LocalStore(Path(url).expanduser())
    parts = urlsplit(url)
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost"):
                raise UsageError(f"store URL names the host {parts.netloc!r}", hint="file:///path has three slashes")
            if parts.query or parts.fragment or not parts.path.startswith("/"):
                raise UsageError("a file URL is file:// and an absolute path", hint=FORMS)
            return LocalStore(Path(unquote(parts.path)))
        case "s3":
            from storage.s3 import open_s3  # aioboto3 takes half a second to import

            return open_s3(parts)
        case "dcnr":
            raise UsageError("a storage service does not stand on another one", hint="file:///path or s3://…")
        case scheme:
            raise UsageError(f"there is no store of the kind {scheme or 'without a scheme'!r}", hint=FORMS)


def _without_nul(url: str) -> str:
    if "\0" in url:
        raise UsageError("a store URL holds a NUL character", hint=FORMS)
    return url


def _open_remote(parts: SplitResult, remote: Remote) -> Store:
    from storage.remote.client import RemoteStore
    from wire.directory import check_address

    address = f"tcp://{parts.netloc}"
    try:
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise MisuseError("there is more in it")
        check_address(address)
    except (MisuseError, ValueError) as error:
        raise UsageError(f"a storage service's URL is dcnr://host:port: {error}", hint=FORMS) from error
    return RemoteStore(f"dcnr://{parts.netloc}", address, remote.make_bus or _plain_bus, cache=remote.cache)


def _plain_bus() -> Bus:
    import secrets

    from storage.remote.connection import STORE_LIMITS
    from wire.zmq_bus import ZmqBus

    return ZmqBus(f"store-{secrets.token_hex(6)}", limits=STORE_LIMITS)
