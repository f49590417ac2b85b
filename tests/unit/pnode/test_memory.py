from __future__ import annotations

import random

from pnode.memory import CutMemory


def saved(memory: CutMemory, step: int, *vnodes: str) -> None:
    memory.made(step, {vnode: {"param.w": f"{vnode} {step}"} for vnode in vnodes})
    for vnode in vnodes:
        memory.part_saved(step, vnode, f"digest of {vnode} {step}")
    memory.saved(step)


def test_the_last_committed_cut_and_the_two_newest_are_kept() -> None:
    memory = CutMemory()
    for step in (10, 20, 30, 40):
        saved(memory, step, "a")
    assert memory.steps == [30, 40]
    memory.committed(30)
    for step in (50, 60, 70):
        saved(memory, step, "a")
    assert memory.steps == [30, 60, 70]
    memory.committed(60)
    assert memory.steps == [60, 70]


def test_more_are_kept_where_there_is_room_for_more() -> None:
    memory = CutMemory(4)
    for step in range(10, 100, 10):
        saved(memory, step, "a")
    assert memory.steps == [60, 70, 80, 90]
    memory.committed(80)
    assert memory.steps == [80, 90]


def test_what_the_store_does_not_have_yet_is_kept_whatever_comes() -> None:
    memory = CutMemory()
    memory.made(10, {"a": {}})
    for step in (20, 30, 40):
        saved(memory, step, "a")
    assert memory.steps == [10, 30, 40]
    memory.saved(10)
    assert memory.steps == [30, 40]


def test_a_state_is_found_by_step_and_digest_only() -> None:
    memory = CutMemory()
    saved(memory, 10, "a", "b")
    assert memory.find(10, "a", "digest of a 10") == {"param.w": "a 10"}
    for step, vnode, digest in [(10, "a", "digest of b 10"), (11, "a", "digest of a 10"), (10, "c", ""), (10, "a", "")]:
        assert memory.find(step, vnode, digest) is None


def test_a_state_that_was_never_saved_is_never_found() -> None:
    """It has no digest, so nobody can say that it is what a manifest names."""
    memory = CutMemory()
    memory.made(10, {"a": {"param.w": "a 10"}})
    memory.part_saved(9, "a", "d")
    memory.part_saved(10, "b", "d")
    assert memory.find(10, "a", "") is None
    assert memory.find(10, "a", "d") is None


def test_what_was_fetched_for_a_deployment_serves_the_next_one() -> None:
    memory = CutMemory()
    saved(memory, 10, "a")
    saved(memory, 20, "a")
    memory.add(10, "b", {"param.w": "b 10"}, "digest of b 10")
    assert memory.find(10, "b", "digest of b 10") is not None
    memory.restart(10, {"a", "b"})
    assert memory.steps == [10]
    assert memory.find(10, "a", "digest of a 10") is not None
    assert memory.find(10, "b", "digest of b 10") is not None


def test_after_a_restart_the_cut_that_it_began_from_counts_as_committed() -> None:
    memory = CutMemory()
    saved(memory, 10, "a", "gone")
    memory.committed(10)
    memory.restart(10, {"a"})
    assert memory.find(10, "gone", "digest of gone 10") is None
    for step in (20, 30, 40):
        saved(memory, step, "a")
    assert memory.steps == [10, 30, 40]
    memory.restart(0, {"a"})
    assert memory.steps == []


def test_memory_is_bounded_whatever_happens() -> None:
    pick = random.Random(5)
    memory = CutMemory(3)
    unsaved: set[int] = set()
    committed = step = 0
    for _ in range(2000):
        match pick.randrange(3):
            case 0 if len(unsaved) < 3:
                step += 1
                memory.made(step, {"a": {}})
                unsaved.add(step)
            case 1 if unsaved:
                done = unsaved.pop()
                memory.saved(done)
            case _:
                committed = pick.randint(committed, step)
                memory.committed(committed)
        assert len(memory.steps) <= 3 + 3 + 1
        assert set(memory.steps) >= {kept for kept in unsaved if kept > committed}
