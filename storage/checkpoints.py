"""Checkpoints: the state of all VNodes of a session after the same step.

Order of writing: the parts (one per VNode that has state, named by digest), then the manifest that names them all, then
the head by a conditional write. So whatever is cut short, the head names a whole checkpoint: the old one or the new.

Who writes: parts come from any PNode; `commit`, `prune` and `collect` of a session are called one after another by the
session's one owner, the orchestrator of the present term. `commit` checks that each part is really there.

Deleting: a running session only `prune`s: it deletes what a committed, superseded manifest names, and nothing that a
kept manifest or a cut under way names. Leftovers of uploads that were cut short are deleted by `collect`, only while
no PNode of the session can be uploading.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from storage.keys import BadKeyError, check_folder, check_id, head_key, manifest_key, part_key
from storage.limits import MANIFEST_BYTES, MANIFEST_PARTS
from storage.parallel import in_parallel
from storage.reread import read_again
from storage.sealed import read_sealed, seal
from storage.store import (
    ConflictError,
    CorruptError,
    NotFoundError,
    Store,
    StoreError,
    digest_of,
)
from storage.transfer import OnBytes, read_verified
from wire.errors import MisuseError
from wire.messages import Part

if TYPE_CHECKING:
    from torch import Tensor

PARALLEL = 8


class DataPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where in the data a session is: the next batch is a pure function of these and the data set."""

    data_digest: str = ""
    tokenizer_digest: str = ""
    sampler: str = ""
    seed: int = 0
    step: int = 0
    samples: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that makes up one cut. `parent`: the key of the manifest before it, "" for the first."""

    session: str
    network: str
    network_digest: str
    step: int
    parts: Annotated[list[Part], msgspec.Meta(max_length=MANIFEST_PARTS)]
    data: DataPosition = DataPosition()
    counters: dict[str, int] = {}
    seed: int = 0
    rng: str = "keyed by seed, replica, VNode, step, microbatch"
    epoch: int = 0
    term: int = 0
    replica: int = 0
    parent: str = ""
    environment: list[str] = []
    created_s: float = 0.0
    version: int = 1

    @property
    def hash(self) -> str:
        """Digest of the state itself: parts, counters and data position; not of who saved it, where or when."""
        state = {
            "network": self.network_digest,
            "step": self.step,
            "parts": sorted((part.vnode, part.digest) for part in self.parts),
            "data": msgspec.to_builtins(self.data),
            "counters": self.counters,
        }
        return digest_of(json.dumps(state, sort_keys=True, separators=(",", ":")).encode())

    def to_bytes(self) -> bytes:
        """The stored form; its digest is in the manifest's key."""
        return msgspec.json.encode(self, order="sorted")


class HeadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a head."""

    step: int
    epoch: int
    term: int
    manifest_key: str
    manifest_digest: str
    hash: str
    version: int = 1


@dataclass(frozen=True, slots=True)
class Head:
    """The last committed cut of a session, and the etag that the next commit has to match."""

    step: int
    epoch: int
    term: int
    manifest_key: str
    manifest_digest: str
    hash: str
    etag: str


@dataclass(frozen=True, slots=True)
class Resume:
    """What to go on from. `problems`: sentences about what was incomplete, damaged or uncommitted, and ignored."""

    manifest: Manifest | None
    manifest_key: str = ""
    manifest_digest: str = ""
    head: Head | None = None
    problems: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ parts


async def save_part(
    store: Store, prefix: str, vnode: str, state: Mapping[str, Tensor], *, known: Collection[str] = ()
) -> Part:
    """Store the state of one VNode; keys "param.…", "buffer.…", "optim.…".

    `known`: digests of the parts of the last committed cut; a part among them is not sent again.
    """
    from storage.tensors import encode_tensors  # torch is needed by those who hold tensors only

    data = await asyncio.to_thread(encode_tensors, state)
    return await save_part_bytes(store, prefix, vnode, data, known=known)


async def save_part_bytes(store: Store, prefix: str, vnode: str, data: bytes, *, known: Collection[str] = ()) -> Part:
    """As `save_part`, from `storage.tensors.encode_tensors` bytes."""
    digest = await asyncio.to_thread(digest_of, data)
    if digest not in known:
        await store.put(part_key(prefix, digest), data)
    return Part(vnode, digest, len(data))


async def load_part(store: Store, prefix: str, part: Part, *, on_bytes: OnBytes | None = None) -> dict[str, Tensor]:
    """The state of one VNode, verified. Raises NotFoundError, CorruptError. `on_bytes`: see storage.transfer."""
    from storage.tensors import decode_tensors

    key = part_key(prefix, part.digest)
    data = await read_verified(store, key, part.digest, part.size_bytes, on_bytes=on_bytes)
    return await asyncio.to_thread(decode_tensors, bytes(data), key=key)


# ------------------------------------------------------------------------------------------------ manifest and head


async def read_manifest(store: Store, prefix: str, key: str, digest: str) -> Manifest:
    """A manifest, verified. Raises NotFoundError, CorruptError."""
    check_manifest_key(prefix, key)
    stored = await read_again(lambda: store.get(key, sha256=digest, max_bytes=MANIFEST_BYTES))
    manifest = decode_manifest(stored.data, key=key)
    if manifest_key(prefix, manifest.step, digest) != key:
        raise CorruptError(f"{key} holds the manifest of step {manifest.step}", key=key)
    return manifest


def decode_manifest(data: bytes, *, key: str) -> Manifest:
    """A manifest's stored form. Raises CorruptError naming `key`."""
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{key} is not a manifest: {error}", key=key) from error


def check_manifest_key(prefix: str, key: str) -> str:
    """The digest in a manifest's key. Raises BadKeyError if it's no manifest below `prefix`."""
    step, _, digest = key.removeprefix(f"{check_folder(prefix)}manifests/").removesuffix(".json").partition("-")
    if not step.isdecimal() or manifest_key(prefix, int(step), digest) != key:
        raise BadKeyError(f"{key[:200]!r} is not the key of a manifest of {prefix}")
    return digest


async def read_head(store: Store, prefix: str) -> Head | None:
    """The session's head, None if nothing was committed yet. Raises CorruptError."""
    key = head_key(prefix)
    try:
        body, stored = await read_sealed(store, key, HeadBody)
    except NotFoundError:
        return None
    check_manifest_key(prefix, body.manifest_key)
    return Head(
        body.step, body.epoch, body.term, body.manifest_key, body.manifest_digest, body.hash, stored.etag
    )  # fmt: skip


async def commit(store: Store, prefix: str, manifest: Manifest, expected_head: Head | None) -> Head:
    """Make the cut of `manifest` the session's head; when this returns, it is durable.

    Committing the same manifest again gives the same head. Raises ConflictError ("superseded by term N …") if the head
    is not `expected_head` any more, MissingPartsError if a part isn't in the store.
    """
    _check_manifest(manifest, expected_head)
    missing = await missing_parts(store, prefix, manifest)
    if missing:
        raise MissingPartsError(manifest, missing)
    data = manifest.to_bytes()
    digest = digest_of(data)
    key = manifest_key(prefix, manifest.step, digest)
    await store.put(key, data)
    body = HeadBody(manifest.step, manifest.epoch, manifest.term, key, digest, manifest.hash)
    sealed = seal(body)
    try:
        if expected_head is None:
            etag = await store.put_if_absent(head_key(prefix), sealed)
        else:
            etag = await store.put_if_match(head_key(prefix), sealed, expected_head.etag)
    except ConflictError as error:
        now = await read_head(store, prefix)
        if now is not None and now.manifest_digest == digest:
            return now
        found = f"term {now.term}, epoch {now.epoch}, step {now.step}" if now else "nothing: its head was deleted"
        raise ConflictError(
            f"{prefix}: step {manifest.step} of term {manifest.term}, epoch {manifest.epoch} is superseded by {found}",
            key=head_key(prefix), hint="another orchestrator took over; stop this one, or resume from the new head",
        ) from error  # fmt: skip
    return Head(body.step, body.epoch, body.term, key, digest, body.hash, etag)


class MissingPartsError(StoreError):
    """A cut can't be committed or loaded because parts of it are not in the store."""

    def __init__(self, manifest: Manifest, missing: list[str]) -> None:
        shown = "; ".join(missing[:3]) + (f"; and {len(missing) - 3} more" if len(missing) > 3 else "")
        super().__init__(
            f"step {manifest.step} of session {manifest.session} is incomplete: {shown}", hint="save it again"
        )
        self.missing = missing


def _check_manifest(manifest: Manifest, head: Head | None) -> None:
    check_id(manifest.session, "session id")
    check_id(manifest.network, "network id")
    names = [part.vnode for part in manifest.parts]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise MisuseError(f"manifest of step {manifest.step} names VNode {twice!r} twice")
    if manifest.parent != (head.manifest_key if head else ""):
        raise MisuseError(f"manifest of step {manifest.step} names the parent {manifest.parent!r}, not the head's")
    if head is not None and (manifest.epoch, manifest.term) < (head.epoch, head.term):
        raise ConflictError(
            f"epoch {manifest.epoch} of term {manifest.term} is superseded by term {head.term}, epoch {head.epoch}",
            key=head.manifest_key, hint="another orchestrator took over",
        )  # fmt: skip


async def missing_parts(store: Store, prefix: str, manifest: Manifest) -> list[str]:
    """Sentences about the parts that are not there, or have another size; [] if the checkpoint is complete."""

    async def look(part: Part) -> str:
        try:
            entry = await store.head(part_key(prefix, part.digest))
        except NotFoundError:
            return f"the part of VNode {part.vnode} is not in the store"
        if entry.size_bytes != part.size_bytes:
            return f"the part of VNode {part.vnode} has {entry.size_bytes} bytes, expected {part.size_bytes}"
        return ""

    return [text for text in await in_parallel(look, manifest.parts, PARALLEL) if text]
