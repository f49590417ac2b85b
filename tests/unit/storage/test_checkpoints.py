"""Checkpoints: exact state, one writer, and at every crash point the old or the new one, never a mixture."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import msgspec
import pytest
import torch

from storage import ConflictError, CorruptError, NotFoundError, open_store
from storage.checkpoints import (
    DataPosition,
    Head,
    Manifest,
    MissingPartsError,
    commit,
    load_part,
    read_head,
    read_manifest,
    save_part,
)
from storage.keys import BadKeyError, head_key, part_key, session_prefix
from storage.local import LocalStore
from storage.retention import collect, newest_complete, prune
from storage.store import Store, digest_of
from storage.tensors import check_tensors, decode_tensors, encode_tensors
from tests.unit.storage.faulty import Crash, FaultyStore
from wire.errors import MisuseError

PREFIX = session_prefix("net", "net-1")
VNODES = ("tok", "h.0.up", "head")


def state_of(vnode: str, step: int) -> dict[str, torch.Tensor]:
    """A state that tells its VNode and step."""
    return {
        "param.weight": torch.full((2, 3), float(step)),
        "buffer.seen": torch.tensor(step),
        "optim.step.weight": torch.tensor(float(step)),
        "optim.exp_avg.weight": torch.full((2, 3), float(VNODES.index(vnode))),
    }


def manifest_of(step: int, parts: list, head: Head | None, **changes: object) -> Manifest:
    fields: dict = {
        "session": "net-1", "network": "net", "network_digest": "0" * 64, "step": step, "parts": parts,
        "data": DataPosition(step=step, samples=12 * step), "parent": head.manifest_key if head else "",
    }  # fmt: skip
    return Manifest(**(fields | changes))


async def save_cut(store: Store, step: int) -> Head:
    """One whole save as the runtime does it: parts, manifest, head."""
    parts = [await save_part(store, PREFIX, vnode, state_of(vnode, step)) for vnode in VNODES]
    head = await read_head(store, PREFIX)
    return await commit(store, PREFIX, manifest_of(step, parts, head), head)


async def load_cut(store: Store) -> int | None:
    """The step of the newest complete checkpoint, all of whose parts were loaded and agree on it."""
    resume = await newest_complete(store, PREFIX)
    if resume.manifest is None:
        return None
    assert [part.vnode for part in resume.manifest.parts] == list(VNODES)
    for part in resume.manifest.parts:
        state = await load_part(store, PREFIX, part)
        expected = state_of(part.vnode, resume.manifest.step)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)
    return resume.manifest.step


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


async def test_types_and_bits_stay(store: LocalStore) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {
        "param.weight": torch.randn(5, 3, generator=generator).bfloat16(),
        "param.half": torch.randn(5, generator=generator).half(),
        "optim.exp_avg.weight": torch.randn(5, 3, generator=generator),
        "optim.step.weight": torch.tensor(7.0),
        "buffer.odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "buffer.double": torch.randn(2, generator=generator, dtype=torch.float64),
        "buffer.count": torch.tensor(3),
        "buffer.mask": torch.tensor([True, False]),
        "buffer.none": torch.zeros(0, 4),
    }
    part = await save_part(store, PREFIX, "fc", state)
    loaded = await load_part(store, PREFIX, part)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        before, after = tensor.reshape(-1), loaded[name].reshape(-1)
        assert bytes(before.view(torch.uint8).numpy()) == bytes(after.view(torch.uint8).numpy()), name


def test_equal_states_give_equal_bytes() -> None:
    a = {"b": torch.arange(4.0), "a": torch.arange(3)}
    b = {"a": torch.arange(3), "b": torch.arange(8.0).view(4, 2).t()[0].contiguous() / 2}
    assert encode_tensors(a) == encode_tensors(dict(reversed(a.items()))) == encode_tensors(b)


def test_views_of_one_storage_can_be_stored() -> None:
    whole = torch.arange(6.0)
    data = encode_tensors({"a": whole[:3], "b": whole[3:], "c": whole.view(2, 3).t(), "d": whole})
    loaded = decode_tensors(data, key="k")
    assert loaded["b"].tolist() == [3, 4, 5]
    assert loaded["c"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_names_that_no_part_can_hold() -> None:
    for name in ("", "__metadata__", "x" * 513):
        with pytest.raises(MisuseError):
            encode_tensors({name: torch.zeros(1)})


def _with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


BAD_PARTS = {
    "empty": b"",
    "short": b"\x01\0\0",
    "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94.",
    "zip": b"PK\x03\x04" + bytes(60),
    "header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "not JSON": _with_header(b"hello"),
    "a list": _with_header(b"[1,2]"),
    "unknown dtype": _with_header(b'{"a":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "unknown field": _with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}', bytes(4)),
    "negative extent": _with_header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4)),
    "product too large": _with_header(
        b'{"a":{"dtype":"F32","shape":[1099511627776,4],"data_offsets":[0,4]}}', bytes(4)
    ),
    "extent too large": _with_header(
        b'{"a":{"dtype":"F32","shape":[99999999999999999],"data_offsets":[0,4]}}', bytes(4)
    ),
    "overlap": _with_header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "hole": _with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
    "beyond the end": _with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(4)),
    "left over": _with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(8)),
    "deep": _with_header(b'{"a":' + b"[" * 100_000 + b"}"),
    "too many": _with_header(
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(65_537)) + b"}"
    ),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts_are_refused_by_name(case: str) -> None:
    with pytest.raises(CorruptError, match="the-key is not safetensors"):
        check_tensors(BAD_PARTS[case], key="the-key")


def test_a_pickle_is_called_a_pickle() -> None:
    with pytest.raises(CorruptError, match="pickle"):
        decode_tensors(BAD_PARTS["pickle"], key="k")


async def test_a_damaged_part_is_refused(store: LocalStore, tmp_path: Path) -> None:
    part = await save_part(store, PREFIX, "tok", state_of("tok", 1))
    path = tmp_path / "store" / part_key(PREFIX, part.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=part.digest):
        await load_part(store, PREFIX, part)


async def test_commit_moves_the_head_and_can_be_repeated(store: LocalStore) -> None:
    assert await read_head(store, PREFIX) is None
    first = await save_cut(store, 10)
    assert await read_head(store, PREFIX) == first
    parts = [await save_part(store, PREFIX, vnode, state_of(vnode, 20)) for vnode in VNODES]
    manifest = manifest_of(20, parts, first)
    second = await commit(store, PREFIX, manifest, first)
    assert await commit(store, PREFIX, manifest, first) == second
    assert await read_manifest(store, PREFIX, second.manifest_key, second.manifest_digest) == manifest
    assert second.hash == manifest.hash != first.hash


def test_the_hash_is_of_the_state_alone() -> None:
    base = manifest_of(5, [], None)
    same = manifest_of(5, [], None, epoch=3, term=2, created_s=9.0, environment=["x"])
    assert base.hash == same.hash
    assert base.hash != manifest_of(6, [], None).hash
    assert base.hash != manifest_of(5, [], None, data=DataPosition(step=5, samples=61)).hash
    assert base.hash != manifest_of(5, [], None, counters={"tokens": 1}).hash


async def test_one_of_two_owners_wins(store: LocalStore) -> None:
    head = await save_cut(store, 10)
    parts = [await save_part(store, PREFIX, vnode, state_of(vnode, 20)) for vnode in VNODES]
    results = await asyncio.gather(
        *(commit(store, PREFIX, manifest_of(20, parts, head, epoch=epoch), head) for epoch in (1, 2, 3)),
        return_exceptions=True,
    )
    won = [result for result in results if isinstance(result, Head)]
    lost = [result for result in results if isinstance(result, ConflictError)]
    assert (len(won), len(lost)) == (1, 2)
    assert all(f"superseded by term 0, epoch {won[0].epoch}" in str(error) for error in lost)
    assert await read_head(store, PREFIX) == won[0]


async def test_an_older_epoch_or_a_wrong_parent_is_refused(store: LocalStore) -> None:
    head = await commit(store, PREFIX, manifest_of(1, [], None, epoch=2), None)
    with pytest.raises(ConflictError, match="superseded by term 0, epoch 2"):
        await commit(store, PREFIX, manifest_of(2, [], head, epoch=1), head)
    with pytest.raises(MisuseError, match="parent"):
        await commit(store, PREFIX, manifest_of(2, [], None, epoch=2), head)
    with pytest.raises(ConflictError):
        await commit(store, PREFIX, manifest_of(2, [], None, epoch=2), None)


async def test_missing_parts_are_named(store: LocalStore) -> None:
    part = await save_part(store, PREFIX, "head", state_of("head", 1))
    await store.delete(part_key(PREFIX, part.digest))
    with pytest.raises(MissingPartsError, match="VNode head"):
        await commit(store, PREFIX, manifest_of(1, [part], None), None)
    await store.put(part_key(PREFIX, part.digest), b"short")
    with pytest.raises(MissingPartsError, match="5 bytes"):
        await commit(store, PREFIX, manifest_of(1, [part], None), None)
    with pytest.raises(MisuseError, match="twice"):
        await commit(store, PREFIX, manifest_of(1, [part, part], None), None)
    assert await read_head(store, PREFIX) is None


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("crash", [True, False])
async def test_every_crash_point_of_a_save(tmp_path: Path, mode: str, crash: bool) -> None:
    """The n-th call fails, for every n: afterwards the old checkpoint or the new one, then the run goes on."""
    for fail_at in range(1, 100):
        inner = open_store(str(tmp_path / f"{fail_at}"))
        assert (await save_cut(inner, 10)).step == 10
        faulty = FaultyStore(inner, fail_at=fail_at, mode=mode, crash=crash)
        failed = False
        try:
            await save_cut(faulty, 20)
        except (Crash, Exception):
            failed = True
        found = await load_cut(inner)
        assert found in (10, 20)
        assert found == 20 or failed
        await save_cut(inner, 30)
        assert await load_cut(inner) == 30
        if not failed:
            break
    assert fail_at > len(VNODES) * 2


@pytest.mark.parametrize("mode", ["before", "after"])
async def test_every_crash_point_of_prune_and_collect(tmp_path: Path, mode: str) -> None:
    for fail_at in range(1, 100):
        inner = open_store(str(tmp_path / f"{fail_at}"))
        for step in (1, 2, 3, 4):
            await save_cut(inner, step)
        await save_part(inner, PREFIX, "tok", state_of("tok", 99))
        faulty = FaultyStore(inner, fail_at=fail_at, mode=mode)
        failed = False
        try:
            await prune(faulty, PREFIX, 2)
            await collect(faulty, PREFIX, dry_run=False)
        except Crash:
            failed = True
        assert await load_cut(inner) == 4
        await prune(inner, PREFIX, 2)
        await collect(inner, PREFIX, dry_run=False)
        keys = {entry.key async for entry in inner.list(PREFIX)}
        assert len([key for key in keys if "/manifests/" in key]) == 2
        assert len([key for key in keys if "/parts/" in key]) == 6
        if not failed:
            break
    assert fail_at > 10


@pytest.mark.parametrize("mode", ["before", "after"])
async def test_every_crash_point_of_resume(tmp_path: Path, mode: str) -> None:
    inner = open_store(str(tmp_path))
    await save_cut(inner, 1)
    for fail_at in range(1, 100):
        try:
            assert await load_cut(FaultyStore(inner, fail_at=fail_at, mode=mode)) == 1
            break
        except Crash:
            assert await load_cut(inner) == 1
    assert fail_at > 5


async def test_an_incomplete_checkpoint_is_reported_and_passed_over(store: LocalStore) -> None:
    await save_cut(store, 10)
    head = await save_cut(store, 20)
    manifest = await read_manifest(store, PREFIX, head.manifest_key, head.manifest_digest)
    await store.delete(part_key(PREFIX, manifest.parts[1].digest))
    resume = await newest_complete(store, PREFIX)
    assert resume.manifest is not None
    assert resume.manifest.step == 10
    assert resume.head == head
    assert any("step 20 is incomplete" in text and "h.0.up" in text for text in resume.problems)


async def test_what_was_never_committed_is_reported_and_ignored(store: LocalStore) -> None:
    head = await save_cut(store, 10)
    faulty = FaultyStore(store, fail_at=9, mode="before")
    with pytest.raises(Crash):
        await save_cut(faulty, 20)
    assert faulty.log[-1].startswith("put_if_match")
    resume = await newest_complete(store, PREFIX)
    assert (resume.manifest.step if resume.manifest else None, resume.head) == (10, head)
    assert resume.problems == ["step 20 was never committed: ignored"]


async def test_a_damaged_head_falls_back_and_can_be_replaced(store: LocalStore) -> None:
    await save_cut(store, 10)
    await save_cut(store, 20)
    await store.put(head_key(PREFIX), b'{"sha256":"0","body":{}}')
    with pytest.raises(CorruptError, match=r"head\.json"):
        await read_head(store, PREFIX)
    resume = await newest_complete(store, PREFIX)
    assert resume.manifest is not None
    assert resume.manifest.step == 20
    assert "damaged" in resume.problems[0]
    manifest = manifest_of(30, resume.manifest.parts, resume.head)
    assert (await commit(store, PREFIX, manifest, resume.head)).step == 30
    assert (await newest_complete(store, PREFIX)).problems == []


async def test_a_damaged_manifest_costs_one_step_and_stops_nothing(store: LocalStore) -> None:
    """The line of the head ends at it: older cuts are found all the same, and pruning goes on with the newer ones."""
    await save_cut(store, 10)
    await save_cut(store, 20)
    head = await save_cut(store, 30)
    await store.put(head.manifest_key, b"{}")
    resume = await newest_complete(store, PREFIX)
    assert resume.manifest is not None
    assert resume.manifest.step == 20
    assert "step 30 has no usable manifest" in resume.problems[0]
    with pytest.raises(CorruptError):
        await collect(store, PREFIX, dry_run=False)
    for step in (40, 50, 60):
        parts = [await save_part(store, PREFIX, vnode, state_of(vnode, step)) for vnode in VNODES]
        head = await commit(store, PREFIX, manifest_of(step, parts, head), head)
        await prune(store, PREFIX, 2)
    assert await load_cut(store) == 60
    kept = [entry.key.rpartition("/")[2].partition("-")[0] async for entry in store.list(f"{PREFIX}manifests/")]
    assert [int(step) for step in kept] == [10, 20, 30, 50, 60]


async def test_strangers_in_the_folder_are_no_checkpoints(store: LocalStore, tmp_path: Path) -> None:
    folder = tmp_path / "store" / PREFIX / "manifests"
    folder.mkdir(parents=True)
    (folder / "0000000099").mkdir()
    (folder / "0000000098.json").write_text("{}")
    (folder / f"0000000097-{'a' * 64}.json").write_text("{}")
    resume = await newest_complete(store, PREFIX)
    assert resume.manifest is None
    assert resume.problems == ["step 97 was never committed: ignored"]
    await save_cut(store, 5)
    assert await load_cut(store) == 5


async def test_a_manifest_can_name_nothing_outside(store: LocalStore) -> None:
    for key in (
        "../../x.json",
        f"{PREFIX}manifests/../head.json",
        f"{PREFIX}parts/{'a' * 64}.safetensors",
        "/etc/passwd",
    ):
        with pytest.raises(BadKeyError):
            await read_manifest(store, PREFIX, key, "a" * 64)
    body = msgspec.json.encode({"step": 1})
    key = f"{PREFIX}manifests/0000000001-{digest_of(body)}.json"
    await store.put(key, body)
    with pytest.raises(CorruptError, match="not a manifest"):
        await read_manifest(store, PREFIX, key, digest_of(body))


async def test_prune_keeps_what_is_under_way(store: LocalStore) -> None:
    for step in (1, 2, 3):
        await save_cut(store, step)
    again = await save_part(store, PREFIX, "tok", state_of("tok", 1))
    early = await save_part(store, PREFIX, "tok", state_of("tok", 4))
    await prune(store, PREFIX, 1, under_way={again.digest})
    keys = {entry.key async for entry in store.list(PREFIX)}
    assert part_key(PREFIX, again.digest) in keys
    assert part_key(PREFIX, early.digest) in keys
    assert len(keys) == 2 + len(VNODES) + 2
    with pytest.raises(MisuseError):
        await prune(store, PREFIX, 0)


async def test_dry_run_deletes_nothing(store: LocalStore) -> None:
    await save_cut(store, 1)
    lost = await save_part(store, PREFIX, "tok", state_of("tok", 9))
    found = await collect(store, PREFIX, dry_run=True)
    assert [entry.key for entry in found] == [part_key(PREFIX, lost.digest)]
    assert found == await collect(store, PREFIX, dry_run=False)
    assert await collect(store, PREFIX, dry_run=True) == []
    with pytest.raises(NotFoundError):
        await load_part(store, PREFIX, lost)


async def test_known_parts_are_not_sent_again(store: LocalStore) -> None:
    part = await save_part(store, PREFIX, "tok", state_of("tok", 1))
    counting = FaultyStore(store)
    assert await save_part(counting, PREFIX, "tok", state_of("tok", 1), known={part.digest}) == part
    assert counting.calls == 0
