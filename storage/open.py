"""From a store's URL to a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from storage.local import LocalStore
from storage.store import RangedStore, Store
from wire.errors import MisuseError, UsageError

if TYPE_CHECKING:
    from storage.remote.cache import BlobCache
    from wire.bus import Bus
    from wire.keys import KeyPair

FORMS = "file:///path, /path, s3://bucket/prefix?endpoint=http://host:port&region=…, or dcnr://host:port[?key=…]"


@dataclass(frozen=True, slots=True)
class Remote:
    """How this process reaches storage services.

    `make_bus` gives a bus for the one store whose service has this public key ("" without keys), or raises UsageError;
    None: only services without keys. `cache`: where what was fetched is kept.
    """

    make_bus: Callable[[str], Bus] | None = None
    cache: BlobCache | None = None


def open_store(url: str, remote: Remote = Remote()) -> Store:
    """The store of `url`: `file:///path`, `/path`, `s3://bucket/prefix?endpoint=http://host:port&region=…`, or
    `dcnr://host:port`, a storage service (with `?key=…` where there are keys).

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


def service_url(address: str, key: str = "") -> str:
    """The URL of the storage service at `tcp://host:port` with this public key."""
    return f"dcnr://{address.removeprefix('tcp://')}" + (f"?key={quote(key, safe='')}" if key else "")


def keyed_bus(name: str, keys: KeyPair | None, service_key: str) -> Bus:
    """A bus to one storage service: with keys it is the one with this key, or none. Raises UsageError."""
    from storage.remote import SERVICE_ID
    from storage.remote.connection import STORE_LIMITS
    from wire.admission import Admission
    from wire.messages import Admitted
    from wire.roles import STORAGE
    from wire.zmq_bus import ZmqBus

    if keys is None:
        if service_key:
            raise UsageError("this storage service has a key, and this process has none", hint="join its cluster")
        return ZmqBus(name, limits=STORE_LIMITS)
    if not service_key:
        raise UsageError(
            "in a cluster with keys the URL of the storage service has its key",
            hint="dcnr://host:port?key=…, as dcnr storage says it",
        )
    admission = Admission()
    admission.pin(Admitted(service_key, SERVICE_ID, STORAGE))
    return ZmqBus(name, keys=keys, admission=admission, limits=STORE_LIMITS)


def _open_remote(parts: SplitResult, remote: Remote) -> Store:
    from storage.remote.client import RemoteStore
    from wire.directory import check_address
    from wire.keys import is_key

    address = f"tcp://{parts.netloc}"
    try:
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        key = dict(asked).get("key", "")
        if [name for name, _ in asked] not in ([], ["key"]) or (asked and not is_key(key)):
            raise MisuseError("its key is none")
        if parts.path.strip("/") or parts.fragment or parts.username is not None:
            raise MisuseError("there is more in it")
        check_address(address)
    except (MisuseError, ValueError) as error:
        raise UsageError(f"a storage service's URL is dcnr://host:port[?key=…]: {error}", hint=FORMS) from error
    make_bus = remote.make_bus or _plain_bus
    return RemoteStore(service_url(address, key), address, lambda: make_bus(key), cache=remote.cache, key=key)


def _plain_bus(key: str) -> Bus:
    import secrets

    return keyed_bus(f"store-{secrets.token_hex(6)}", None, key)
