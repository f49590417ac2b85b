"""From a store's URL to a store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.local import LocalStore
from storage.store import Store
from wire.errors import UsageError

FORMS = "file:///path, /path, or s3://bucket/prefix?endpoint=http://host:port&region=…"


def open_store(url: str) -> Store:
    """The store of `url`: `file:///path`, `/path`, `s3://bucket/prefix?endpoint=http://host:port&region=…`.

    Nothing is opened yet: the first call, or `probe()`, finds out whether it answers. S3 credentials come from the
    usual AWS environment, never from the URL. Raises UsageError for a URL that can't be one.
    """
    if "\0" in url:
        raise UsageError("a store URL holds a NUL character", hint=FORMS)
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
        case scheme:
            raise UsageError(f"there is no store of the kind {scheme or 'without a scheme'!r}", hint=FORMS)
