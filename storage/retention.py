"""Which checkpoint to resume from, which to keep, and what is garbage.

The ancestry of a head is its manifest, that one's parent, and so on. What no head's ancestry names is garbage; of the
ancestry itself, `prune` keeps the newest n.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection

from storage.checkpoints import (
    Head,
    Manifest,
    Resume,
    check_manifest_key,
    missing_parts,
    read_head,
    read_manifest,
)
from storage.keys import BadKeyError, check_folder, head_key, part_key
from storage.limits import ANCESTORS
from storage.store import CorruptError, Entry, NotFoundError, Store
from storage.transfer import check_verified
from wire.errors import MisuseError


async def newest_complete(store: Store, prefix: str, *, verify: bool = False, avoid: Collection[str] = ()) -> Resume:
    """The newest committed checkpoint whose parts are all there, with a report of all that was passed over.

    Manifests that no head ever named are ignored. Only if the head, or a manifest in its line, can't be read are all
    (older) manifests considered, the newest first: each was written when all its parts were there.

    `verify`: read every part and check its digest, as is due once anyone found one damaged. `avoid`: keys known to be
    damaged, which are not read again. Raises StoreUnavailableError, and then says nothing about what is damaged.
    """
    problems: list[str] = []
    head: Head | None = None
    check = PartCheck(store, prefix, verify=verify, avoid=avoid)
    try:
        head = await read_head(store, prefix)
    except (CorruptError, BadKeyError) as error:
        problems.append(f"the head is damaged ({error}); looking through all manifests")
        candidates = [key async for key in _manifests(store, prefix)][::-1]
        etag = (await store.head(head_key(prefix))).etag
    else:
        candidates = [head.manifest_key] if head else []
        etag = head.etag if head else ""
        async for key in _manifests(store, prefix):
            step = _step_of(key)
            if step > (head.step if head else -1):
                problems.append(f"step {step} was never committed: ignored")
    seen: set[str] = set()
    while candidates:
        key = candidates.pop(0)
        if key in seen:
            continue
        seen.add(key)
        step = _step_of(key)
        try:
            digest = check_manifest_key(prefix, key)
            if key in avoid:
                raise CorruptError("it was found damaged before", key=key)
            manifest = await read_manifest(store, prefix, key, digest)
        except (NotFoundError, CorruptError, BadKeyError) as error:
            known = key in avoid
            problems.append(
                f"step {step} is passed over: {error}" if known else f"step {step} has no usable manifest: {error}"
            )
            if not candidates:  # the chain is broken here; older cuts are whole all the same
                candidates = [other async for other in _manifests(store, prefix) if _step_of(other) < step][::-1]
            continue
        missing = await check.problems(manifest)
        if not missing:
            found = head or Head(step, manifest.epoch, manifest.term, key, digest, manifest.hash, etag)
            return Resume(manifest, key, digest, found, problems)
        problems.append(f"step {step} is incomplete: {missing[0]}; ignored")
        if manifest.parent:
            candidates.insert(0, manifest.parent)
    return Resume(None, head=head, problems=problems)


class PartCheck:
    """Whether the parts of checkpoints are there and, with `verify`, undamaged; none is read twice."""

    def __init__(self, store: Store, prefix: str, *, verify: bool, avoid: Collection[str]) -> None:
        self._store = store
        self._prefix = prefix
        self._verify = verify
        self._avoid = frozenset(avoid)
        self._good: set[str] = set()

    async def problems(self, manifest: Manifest) -> list[str]:
        """Sentences about parts that are missing or damaged; [] if the checkpoint is whole."""
        for part in manifest.parts:
            if part_key(self._prefix, part.digest) in self._avoid:
                return [f"the part of VNode {part.vnode} was found damaged"]
        missing = await missing_parts(self._store, self._prefix, manifest)
        if missing or not self._verify:
            return missing
        for part in manifest.parts:
            if part.digest in self._good:
                continue
            try:
                await check_verified(self._store, part_key(self._prefix, part.digest), part.digest)
            except (NotFoundError, CorruptError) as error:
                self._avoid |= {part_key(self._prefix, part.digest)}
                return [f"the part of VNode {part.vnode} is damaged ({error.message})"]
            self._good.add(part.digest)
        return []


async def ancestry(
    store: Store, prefix: str, head: Head | None, *, stop_at_damage: bool = False
) -> AsyncGenerator[tuple[str, Manifest], None]:
    """Key and manifest of the head and its ancestors, newest first, as far as they are still there.

    Raises CorruptError at a damaged manifest, unless it is to stop there.
    """
    key = head.manifest_key if head else ""
    seen: set[str] = set()
    while key and key not in seen and len(seen) < ANCESTORS:
        seen.add(key)
        try:
            manifest = await read_manifest(store, prefix, key, check_manifest_key(prefix, key))
        except NotFoundError:
            return
        except CorruptError:
            if stop_at_damage:
                return
            raise
        yield key, manifest
        key = manifest.parent


async def prune(store: Store, prefix: str, keep: int, *, under_way: Collection[str] = ()) -> list[str]:
    """Delete all but the newest `keep` committed checkpoints; the keys deleted. Safe while the session runs.

    `under_way`: digests of parts of cuts that are not committed yet. Manifests go first, so what is cut short leaves
    parts that nobody names, never a manifest without its parts.
    """
    if keep < 1:
        raise MisuseError(f"keep is {keep}", hint="at least one checkpoint is kept")
    lines = [line async for line in ancestry(store, prefix, await read_head(store, prefix), stop_at_damage=True)]
    kept = {part.digest for _, manifest in lines[:keep] for part in manifest.parts} | set(under_way)
    old = lines[keep:]
    parts = {part.digest for _, manifest in old for part in manifest.parts} - kept
    keys = [key for key, _ in reversed(old)] + [part_key(prefix, digest) for digest in sorted(parts)]
    for key in keys:
        await store.delete(key)
    return keys


async def collect(store: Store, prefix: str, *, dry_run: bool) -> list[Entry]:
    """Delete the manifests and parts that the head's ancestry does not name; what was, or would be, deleted.

    Only for a session that no PNode runs: parts of a cut under way look like garbage.
    """
    check_folder(prefix)
    head = await read_head(store, prefix)
    named = {head_key(prefix)}
    async for key, manifest in ancestry(store, prefix, head):
        named.add(key)
        named.update(part_key(prefix, part.digest) for part in manifest.parts)
    found: list[Entry] = []
    for folder in ("manifests/", "parts/"):
        async for entry in store.list(prefix + folder):
            if entry.key not in named:
                found.append(entry)
    if not dry_run:
        for entry in found:
            await store.delete(entry.key)
    return found


async def delete_all(store: Store, prefix: str) -> list[Entry]:
    """Delete everything below `prefix`, heads first; what was deleted."""
    check_folder(prefix)
    found = [entry async for entry in store.list(prefix)]
    found.sort(key=lambda entry: not entry.key.endswith("/head.json"))
    for entry in found:
        await store.delete(entry.key)
    return found


async def _manifests(store: Store, prefix: str) -> AsyncGenerator[str, None]:
    async for entry in store.list(f"{check_folder(prefix)}manifests/"):
        with contextlib.suppress(BadKeyError):
            check_manifest_key(prefix, entry.key)
            yield entry.key


def _step_of(key: str) -> int:
    return int(key.rpartition("/")[2].partition("-")[0])
