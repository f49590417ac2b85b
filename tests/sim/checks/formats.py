"""Reading stored control objects from their bytes, from the description of their formats and nothing else.

Sealed objects are `{"sha256": digest of the body's bytes, "body": ...}`; manifests and parts are named by their digest.
Keys: `networks/<network>/sessions/<session>/{head.json, manifests/<step>-<digest>.json, parts/<digest>.safetensors}`,
`registry/{term,incarnations,epochs}.json`, `registry/sessions/<session>.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OF_SESSION = re.compile(r"networks/[^/]+/sessions/(?P<session>[^/]+)/(?P<rest>.+)")
_MANIFEST = re.compile(r"manifests/(\d{10})-([0-9a-f]{64})\.json")
_PART = re.compile(r"parts/([0-9a-f]{64})\.safetensors")
_RECORD = re.compile(r"registry/sessions/([^/]+)\.json")


class BadObjectError(ValueError):
    """Bytes that are not what their key says."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a key says: kind is head, manifest, part, record, term, incarnations, epochs or other."""

    kind: str
    session: str = ""
    step: int = 0
    digest: str = ""
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """A session's head."""

    step: int
    epoch: int
    term: int
    manifest_key: str
    manifest_digest: str
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A cut: VNode -> (digest, size); `hash` is worked out here."""

    session: str
    step: int
    epoch: int
    term: int
    parent: str
    parts: Mapping[str, tuple[str, int]]
    hash: str


@dataclass(frozen=True, slots=True)
class Record:
    """A session's record, as far as it matters here."""

    session: str
    state: str
    epoch: int
    step: int
    committed: int
    keep: int
    steps: int
    start_step: int
    placement: Mapping[str, str] = field(default_factory=dict)
    incarnations: Mapping[str, int] = field(default_factory=dict)


def key_of(key: str) -> Key:
    """What is stored under a key."""
    fixed = {"registry/term.json": "term", "registry/incarnations.json": "incarnations"}
    if key in fixed:
        return Key(fixed[key])
    if key == "registry/epochs.json":
        return Key("epochs")
    if found := _RECORD.fullmatch(key):
        return Key("record", found[1])
    whole = _OF_SESSION.fullmatch(key)
    if whole is None:
        return Key("other")
    session, rest = whole["session"], whole["rest"]
    prefix = key[: len(key) - len(rest)]
    if rest == "head.json":
        return Key("head", session, prefix=prefix)
    if found := _MANIFEST.fullmatch(rest):
        return Key("manifest", session, int(found[1]), found[2], prefix)
    if found := _PART.fullmatch(rest):
        return Key("part", session, 0, found[1], prefix)
    return Key("other", session, prefix=prefix)


def sha256(data: bytes) -> str:
    """Lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def unsealed(data: bytes) -> dict[str, Any]:
    """The body of a sealed object. Raises BadObjectError."""
    try:
        envelope = json.loads(data)
        raw = data[data.index(b'"body":') + len(b'"body":') : data.rindex(b"}")]
        body = envelope["body"]
        if sha256(raw) != envelope["sha256"] or json.loads(raw) != body:
            raise BadObjectError("its body does not have the digest that it was sealed with")
    except (ValueError, KeyError, TypeError) as error:
        raise BadObjectError(f"it is not a sealed object: {error}") from error
    if not isinstance(body, dict):
        raise BadObjectError("its body is not an object")
    return body


def read_head(data: bytes) -> Head:
    """A head. Raises BadObjectError."""
    body = unsealed(data)
    return Head(
        _int(body, "step"), _int(body, "epoch"), _int(body, "term"), _str(body, "manifest_key"),
        _str(body, "manifest_digest"), _str(body, "hash"),
    )  # fmt: skip


def read_manifest(data: bytes) -> Manifest:
    """A manifest. Raises BadObjectError."""
    try:
        body = json.loads(data)
        parts = {str(vnode): (str(digest), int(size)) for vnode, digest, size in body["parts"]}
        twice = len(parts) != len(body["parts"])
        state = {
            "network": body["network_digest"],
            "step": body["step"],
            "parts": sorted([vnode, digest] for vnode, (digest, _) in parts.items()),
            "data": body["data"],
            "counters": body["counters"],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise BadObjectError(f"it is not a manifest: {error}") from error
    if twice:
        raise BadObjectError("it names a VNode twice")
    digest = sha256(json.dumps(state, sort_keys=True, separators=(",", ":")).encode())
    return Manifest(
        _str(body, "session"), _int(body, "step"), _int(body, "epoch"), _int(body, "term"), _str(body, "parent"),
        parts, digest,
    )  # fmt: skip


def read_record(data: bytes) -> Record:
    """A session's record. Raises BadObjectError."""
    body = unsealed(data)
    placement, incarnations = body.get("placement", {}), body.get("incarnations", {})
    return Record(
        _str(body, "session"), _str(body, "state"), _int(body, "epoch"), _int(body, "step"), _int(body, "committed"),
        _int(body, "keep"), _int(body, "steps"), int(body.get("start_step", 0)), dict(placement), dict(incarnations),
    )  # fmt: skip


def read_term(data: bytes) -> tuple[str, int]:
    """Cluster and term. Raises BadObjectError."""
    body = unsealed(data)
    return _str(body, "cluster"), _int(body, "term")


def read_incarnations(data: bytes) -> dict[str, int]:
    """The highest incarnation granted, by PNode. Raises BadObjectError."""
    granted = unsealed(data).get("granted")
    if not isinstance(granted, dict) or not all(isinstance(number, int) for number in granted.values()):
        raise BadObjectError("it holds no incarnations")
    return granted


def item(value: object, name: str, place: int, default: Any = None) -> Any:
    """A field of a nested value of a message: by name, as an attribute, or by its place in an array."""
    if isinstance(value, Mapping):
        return value.get(name, default)
    if isinstance(value, list | tuple):
        return value[place] if place < len(value) else default
    return getattr(value, name, default)


def _int(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadObjectError(f"its {name} is {value!r}")
    return value


def _str(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise BadObjectError(f"its {name} is {value!r}")
    return value
