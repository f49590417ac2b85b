"""What is done to a store, each operation with the state before it, and the judge of what is there after a fault.

An operation may fail anywhere. Then what is read is the old state or the new one and never a mixture, and the operation
done again, with no fault, gives the new one. States tell their step in every number, so a mixture can't hide. No torch
here: processes that are forked and killed by the hundred run these too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from orchestrator.records import NetworkRecord, SessionRecord, session_key
from orchestrator.sweep import leftovers
from orchestrator.truth import Truth
from storage import Blobs, NotFoundError, Store
from storage.checkpoints import DataPosition, Head, Manifest, commit, read_head, save_part_bytes
from storage.keys import blob_key, part_key, session_prefix
from storage.retention import ancestry, collect, delete_all, newest_complete, prune
from storage.sealed import seal, unseal
from storage.store import digest_of
from storage.transfer import read_verified
from wire.messages import Part

SESSION = "net-1"
PREFIX = session_prefix("net", SESSION)
VNODES = ("tok", "h.0.up", "head")
NETWORK = b"the bytes of a network"

Work = Callable[[Store], Awaitable[None]]


def state_of(vnode: str, step: int, size: int = 40) -> bytes:
    """Bytes that tell VNode and step all over."""
    return f"{vnode} after {step}; ".encode() * size


def manifest_of(step: int, parts: Sequence[Part], head: Head | None) -> Manifest:
    return Manifest(
        SESSION, "net", "0" * 64, step, list(parts), data=DataPosition(step=step, samples=12 * step),
        counters={"step": step}, epoch=1, term=1, parent=head.manifest_key if head else "",
    )  # fmt: skip


async def save_parts(store: Store, step: int) -> list[Part]:
    return [await save_part_bytes(store, PREFIX, vnode, state_of(vnode, step)) for vnode in VNODES]


async def publish(store: Store, step: int) -> Head:
    """Make the manifest and move the head; the parts are there."""
    parts = [
        Part(vnode, digest_of(state_of(vnode, step)), len(state_of(vnode, step))) for vnode in VNODES
    ]  # fmt: skip
    head = await read_head(store, PREFIX)
    if head is not None and head.step == step:
        return head
    return await commit(store, PREFIX, manifest_of(step, parts, head), head)


async def save(store: Store, step: int) -> None:
    """One whole save, as the runtime does it: parts, manifest, head."""
    await save_parts(store, step)
    await publish(store, step)


async def load(store: Store, *, verify: bool = False) -> int | None:
    """The step of the checkpoint to resume from, every part of which was read and is of that step; None if none."""
    resume = await newest_complete(store, PREFIX, verify=verify)
    manifest = resume.manifest
    if manifest is None:
        return None
    assert [part.vnode for part in manifest.parts] == list(VNODES)
    assert manifest.counters == {"step": manifest.step}
    for part in manifest.parts:
        data = await read_verified(store, part_key(PREFIX, part.digest), part.digest, part.size_bytes)
        assert data == state_of(part.vnode, manifest.step), (part.vnode, manifest.step)
    return manifest.step


async def steps_in_line(store: Store) -> list[int]:
    """The steps of the head's ancestry, all of whose parts are there."""
    steps = []
    async for _, manifest in ancestry(store, PREFIX, await read_head(store, PREFIX)):
        for part in manifest.parts:
            assert (await store.head(part_key(PREFIX, part.digest))).size_bytes == part.size_bytes
        steps.append(manifest.step)
    return steps


async def keys_of(store: Store, prefix: str = PREFIX) -> list[str]:
    return [entry.key async for entry in store.list(prefix)]


@dataclass(frozen=True)
class Operation:
    """`before` makes the old state, `run` is what fails; `found` reads the state: one of `old`, `new`, or it raises.

    `clean`: what must hold besides once `run` has succeeded.
    """

    before: Work
    run: Work
    found: Callable[[Store], Awaitable[object]]
    old: object
    new: object
    clean: Work


async def _nothing(store: Store) -> None:
    return None


async def _ten(store: Store) -> None:
    await save(store, 10)


async def _ten_and_parts_of_twenty(store: Store) -> None:
    await save(store, 10)
    await save_parts(store, 20)


async def _five_steps_and_litter(store: Store) -> None:
    for step in (10, 20, 30, 40):
        await save(store, step)
    head = await read_head(store, PREFIX)
    await save_part_bytes(store, PREFIX, "tok", state_of("tok", 99))
    manifest = manifest_of(50, await save_parts(store, 50), head)
    data = manifest.to_bytes()
    await store.put(f"{PREFIX}manifests/{50:010d}-{digest_of(data)}.json", data)


async def _save_twenty(store: Store) -> None:
    await save(store, 20)


async def _publish_twenty(store: Store) -> None:
    await publish(store, 20)


async def _resume(store: Store) -> None:
    assert await load(store) == 40


async def _resume_verified(store: Store) -> None:
    assert await load(store, verify=True) == 40


async def _prune(store: Store) -> None:
    await prune(store, PREFIX, 2)


async def _pruned(store: Store) -> None:
    """A prune that was cut short may leave parts that nobody names; those are for `collect`."""
    assert await steps_in_line(store) == [40, 30]
    await collect(store, PREFIX, dry_run=False)
    assert not await store_has_steps(store, 10, 20)


async def store_has_steps(store: Store, *steps: int) -> list[str]:
    """Keys of manifests and parts that these steps alone name."""
    digests = {digest_of(state_of(vnode, step)) for step in steps for vnode in VNODES}
    names = {f"{step:010d}" for step in steps}
    keys = await keys_of(store)
    return [key for key in keys if key.rpartition("/")[2].split("-")[0].split(".")[0] in digests | names]


async def _collect(store: Store) -> None:
    await collect(store, PREFIX, dry_run=False)


async def _collected(store: Store) -> None:
    assert await steps_in_line(store) == [40, 30, 20, 10]
    assert len(await keys_of(store)) == 4 * (len(VNODES) + 1) + 1


async def _owner(store: Store) -> Truth:
    """The orchestrator of that store, just begun."""
    truth = Truth(store)
    await truth.raise_term()
    return truth


async def _register(store: Store) -> None:
    digest = await Blobs(store).put(NETWORK)
    await (await _owner(store)).put_network(NetworkRecord("net", digest, 3, 100, 0.0))


async def _registered(store: Store) -> str:
    """ "none" or "whole": a record never names a blob that is not there."""
    networks = await Truth(store).networks()
    for record in networks:
        assert await Blobs(store).get(record.digest) == NETWORK
    return "whole" if networks else "none"


def session_record(state: str, epoch: int) -> SessionRecord:
    return SessionRecord(
        SESSION, "net", "0" * 64, "", "", "text", 10, 1, 1, 3, False, "", 0.0, state=state, epoch=epoch,
        placement=dict.fromkeys(VNODES, f"p{epoch}"),
    )  # fmt: skip


async def _session(store: Store) -> None:
    await _five_steps_and_litter(store)
    await (await _owner(store)).put_session(SESSION, seal(session_record("running", 1)))


async def _advance(store: Store) -> None:
    truth = await _owner(store)
    await truth.sessions()
    await truth.put_session(SESSION, seal(session_record("paused", 2)))


async def _record(store: Store) -> str:
    """ "none", or state and epoch of the record; it never names a placement of another epoch."""
    try:
        stored = await store.get(session_key(SESSION))
    except NotFoundError:
        return "none"
    record = unseal(stored.data, SessionRecord, key="")
    assert record.placement == dict.fromkeys(VNODES, f"p{record.epoch}")
    return f"{record.state} {record.epoch}"


async def _delete(store: Store) -> None:
    """As the orchestrator removes a session: first the record, then what it stored."""
    await (await _owner(store)).drop_session(SESSION)
    await delete_all(store, PREFIX)


async def _there(store: Store) -> str:
    """ "whole" while the record is there, then "gone", whatever is left of it."""
    if await _record(store) == "none":
        step = await load(store)
        assert step in (None, 40), step
        return "gone"
    assert await load(store) == 40
    return "whole"


async def _deleted(store: Store) -> None:
    assert await keys_of(store) == []


async def _store_full_of_garbage(store: Store) -> None:
    """A session with litter, what is left of a removed one, and a blob that nobody names."""
    await _five_steps_and_litter(store)
    removed = session_prefix("net", "removed-1")
    for step in (1, 2):
        await save_part_bytes(store, removed, "tok", state_of("tok", step))
    await _two_blobs(store)


async def _sweep(store: Store) -> None:
    """As `dcnr gc`: the litter of sessions, then what is left of removed ones, then blobs."""
    await collect(store, PREFIX, dry_run=False)
    await leftovers(store, "", {SESSION}, dry_run=False)
    await _collect_blobs(store)


async def _needed(store: Store) -> int | None:
    """The step to resume from; the blob that is named is there."""
    await _named_blob(store)
    return await load(store)


async def _swept(store: Store) -> None:
    await _collected(store)
    await _one_blob(store)
    assert await keys_of(store, "networks/") == await keys_of(store)


async def _two_blobs(store: Store) -> None:
    await Blobs(store).put(NETWORK)
    await Blobs(store).put(b"nobody names it")


async def _collect_blobs(store: Store) -> None:
    await Blobs(store).collect([digest_of(NETWORK)], now_s=time.time() + 60, dry_run=False, grace_s=-60)


async def _named_blob(store: Store) -> str:
    assert await Blobs(store).get(digest_of(NETWORK)) == NETWORK
    return "named one is there"


async def _one_blob(store: Store) -> None:
    assert await keys_of(store, "blobs/") == [blob_key(hashlib.sha256(NETWORK).hexdigest())]


OPERATIONS = {
    "save": Operation(_ten, _save_twenty, load, 10, 20, _nothing),
    "first save": Operation(_nothing, _save_twenty, load, None, 20, _nothing),
    "publish": Operation(_ten_and_parts_of_twenty, _publish_twenty, load, 10, 20, _nothing),
    "resume": Operation(_five_steps_and_litter, _resume, load, 40, 40, _nothing),
    "resume verified": Operation(_five_steps_and_litter, _resume_verified, load, 40, 40, _nothing),
    "prune": Operation(_five_steps_and_litter, _prune, load, 40, 40, _pruned),
    "collect": Operation(_five_steps_and_litter, _collect, load, 40, 40, _collected),
    "gc": Operation(_store_full_of_garbage, _sweep, _needed, 40, 40, _swept),
    "register a network": Operation(_nothing, _register, _registered, "none", "whole", _nothing),
    "advance a record": Operation(_session, _advance, _record, "running 1", "paused 2", _nothing),
    "delete a session": Operation(_session, _delete, _there, "whole", "gone", _deleted),
    "collect blobs": Operation(
        _two_blobs, _collect_blobs, _named_blob, "named one is there", "named one is there", _one_blob
    ),
}


async def judge(operation: Operation, store: Store, *, done: bool) -> object:
    """After a fault: old or new; after success: new; the line of the head is whole. Returns what was found."""
    found = await operation.found(store)
    assert found in (operation.old, operation.new), found
    assert found == operation.new or not done, found
    if operation.before is not _session and operation.before is not _nothing:
        await steps_in_line(store)
    return found


async def finish(operation: Operation, store: Store) -> None:
    """The next attempt, without the fault, succeeds."""
    await operation.run(store)
    assert await operation.found(store) == operation.new
    await operation.clean(store)
    if operation.found in (load, _needed):
        step = 60
        await save(store, step)
        assert await load(store) == step
