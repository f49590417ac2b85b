"""Which names a stored object may have, and where things of a network or session live.

A key is `segment/segment/…`. All keys are checked here before any open or request, so a name can never become a path
or address outside its place: no `..`, no absolute path, no empty segment, no NUL, no letters beyond ASCII
(look-alikes), nothing hidden (a leading dot), no capitals (folders that ignore case would mix two names up).

Layout:
    blobs/sha256/ab/abcd…                                       content-addressed blobs
    networks/<network>/sessions/<session>/parts/<digest>.safetensors
    networks/<network>/sessions/<session>/manifests/<step>-<digest>.json
    networks/<network>/sessions/<session>/head.json
"""

from __future__ import annotations

import re

from storage.limits import KEY_CHARS, SEGMENT_CHARS
from wire.errors import MisuseError

ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
DIGEST = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_-])?")
_PREFIX_TAIL = re.compile(r"(?:[a-z0-9_][a-z0-9._-]*)?")


class BadKeyError(MisuseError):
    """A name that can't be a key, id or digest; nothing was opened or asked for."""


def shown(text: str) -> str:
    """`text` for an error message: escaped, and cut when long."""
    escaped = ascii(text)
    return escaped if len(escaped) <= 100 else f"{escaped[:80]}…' ({len(text)} characters)"


def check_key(key: str) -> str:
    """`key`, if it is one. Raises BadKeyError."""
    if not key or len(key) > KEY_CHARS:
        raise BadKeyError(f"key {shown(key)} has {len(key)} characters", hint=f"1 to {KEY_CHARS} are allowed")
    for segment in key.split("/"):
        _check_segment(key, segment)
    return key


def check_prefix(prefix: str) -> str:
    """`prefix`, if keys can begin so; "" stands for all keys. Raises BadKeyError."""
    if len(prefix) > KEY_CHARS:
        raise BadKeyError(f"prefix {shown(prefix)} has {len(prefix)} characters", hint=f"at most {KEY_CHARS}")
    *folders, tail = prefix.split("/")
    for segment in folders:
        _check_segment(prefix, segment)
    if len(tail) > SEGMENT_CHARS or not _PREFIX_TAIL.fullmatch(tail) or ".." in tail:
        raise BadKeyError(f"no key can begin with {shown(prefix)}", hint="segments are a-z 0-9 . _ -, joined by /")
    return prefix


def check_folder(prefix: str) -> str:
    """`prefix`, if it is a whole folder of keys: "a/b/". Raises BadKeyError."""
    if not prefix.endswith("/"):
        raise BadKeyError(f"folder {shown(prefix)} does not end with '/'", hint="so that a/ never takes in ab/")
    check_key(prefix[:-1])
    return prefix


def _check_segment(key: str, segment: str) -> None:
    if len(segment) > SEGMENT_CHARS or not _SEGMENT.fullmatch(segment) or ".." in segment:
        raise BadKeyError(
            f"key {shown(key)} has the segment {shown(segment)}",
            hint=f"a segment is 1 to {SEGMENT_CHARS} of a-z 0-9 . _ -, begins with no dot, and holds no '..'",
        )


def check_id(value: str, what: str = "id") -> str:
    """`value`, if it is an id of a network, session or PNode. Raises BadKeyError."""
    if not ID.fullmatch(value):
        raise BadKeyError(
            f"{what} {shown(value)} is not allowed", hint="1 to 63 of a-z 0-9 _ -, first a letter or digit"
        )
    return value


def check_digest(value: str) -> str:
    """`value`, if it is a lower-case hex SHA-256. Raises BadKeyError."""
    if not DIGEST.fullmatch(value):
        raise BadKeyError(f"{shown(value)} is not a SHA-256 digest", hint="64 of 0-9 a-f")
    return value


def blob_key(digest: str) -> str:
    """Where the blob of that digest lives."""
    return f"blobs/sha256/{check_digest(digest)[:2]}/{digest}"


def network_prefix(network: str) -> str:
    """The folder of everything a network stores."""
    return f"networks/{check_id(network, 'network id')}/"


def session_prefix(network: str, session: str) -> str:
    """The folder of everything a session stores."""
    return f"{network_prefix(network)}sessions/{check_id(session, 'session id')}/"


def part_key(prefix: str, digest: str) -> str:
    """Where a checkpoint part of that digest lives below a session's prefix."""
    return f"{check_folder(prefix)}parts/{check_digest(digest)}.safetensors"


def manifest_key(prefix: str, step: int, digest: str) -> str:
    """Where the manifest of a cut lives; keys sort by step."""
    if not 0 <= step < 10**10:
        raise BadKeyError(f"step {step} is outside 0 … 10^10")
    return f"{check_folder(prefix)}manifests/{step:010d}-{check_digest(digest)}.json"


def head_key(prefix: str) -> str:
    """Where a session's head lives."""
    return f"{check_folder(prefix)}head.json"
