"""Collecting parts into cuts."""

from __future__ import annotations

import pytest

from orchestrator.commits import MAX_OPEN_CUTS, BadPartsError, CutCollector, environment_note, manifest_of
from tests.unit.orchestrator.story import make_record
from wire.messages import Part

PLACEMENT = {"tok": "p1", "add": "p1", "head": "p2", "loss": "p2"}


def part(vnode: str, letter: str = "a") -> Part:
    return Part(vnode, letter * 64, 10)


def collector() -> CutCollector:
    return CutCollector(2, PLACEMENT, ["tok", "head"])


def test_a_cut_is_complete_when_every_pnode_told() -> None:
    cuts = collector()
    assert cuts.add("p2", 10, [part("head", "b")], ["x"]) is None
    assert cuts.awaited() == {10: ["p1"]}
    cut = cuts.add("p1", 10, [part("tok")], ["x"])
    assert cut is not None
    assert [one.vnode for one in cuts.ordered(cut)] == ["tok", "head"]
    assert cut.environments == {"x"}
    cuts.done(10)
    assert cuts.awaited() == {}


def test_a_pnode_without_state_tells_an_empty_list() -> None:
    cuts = CutCollector(1, PLACEMENT, ["tok"])
    cuts.add("p2", 3, [], [])
    assert cuts.add("p1", 3, [part("tok")], []) is not None


def test_a_cut_without_a_part_that_has_to_be_there() -> None:
    cuts = collector()
    cuts.add("p1", 10, [], [])
    with pytest.raises(BadPartsError, match="step 10 lacks parts of tok"):
        cuts.add("p2", 10, [part("head")], [])


@pytest.mark.parametrize(
    ("pnode", "parts"),
    [
        ("p3", []),
        ("p1", [part("head")]),
        ("p1", [part("nope")]),
        ("p1", [Part("tok", "../../etc/passwd", 1)]),
        ("p1", [Part("tok", "a" * 64, -1)]),
    ],
)
def test_parts_that_can_not_be_ones_own(pnode: str, parts: list[Part]) -> None:
    with pytest.raises(BadPartsError):
        collector().add(pnode, 10, parts, [])


def test_telling_again_changes_nothing() -> None:
    cuts = collector()
    cuts.add("p1", 10, [part("tok")], ["x"])
    cuts.add("p1", 10, [part("tok")], ["x"])
    assert cuts.awaited() == {10: ["p2"]}


def test_open_cuts_are_bounded_and_named_for_the_pruner() -> None:
    cuts = collector()
    for step in range(MAX_OPEN_CUTS + 5):
        cuts.add("p1", step, [part("tok", "abcdef"[step % 6])], [])
    assert len(cuts.awaited()) == MAX_OPEN_CUTS
    assert min(cuts.awaited()) == 5
    assert "a" * 64 in cuts.under_way()
    cuts.done(MAX_OPEN_CUTS + 5)
    assert cuts.under_way() == set()


def environment(torch: str = "2.8 AVX2", cpu: str = "Ryzen 5", threads: int = 1) -> str:
    return f"torch {torch}; device cpu; cpu {cpu}; threads {threads}"


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [
        ([], [environment()], ""),
        ([environment()], [environment()], ""),
        ([environment()], [environment(threads=2)], "not bit-exact: threads 1→2"),
        ([environment(threads=6)], [environment(threads=1)], "not bit-exact: threads 6→1"),
        ([environment()], [environment("2.9 AVX2")], "not bit-exact: torch 2.8 AVX2→2.9 AVX2"),
        ([environment()], [environment("2.8 AVX512", "Xeon", 4)],
         "not bit-exact: torch 2.8 AVX2→2.8 AVX512, cpu Ryzen 5→Xeon, threads 1→4"),
        ([environment()], [environment(), environment(threads=2)], "not bit-exact: threads 1→1|2"),
        ([environment(), environment(threads=2)], [environment(), environment(threads=2)],
         "not bit-exact: its PNodes differ: threads 1|2"),
        ([], [environment(), environment(cpu="Xeon")], "not bit-exact: its PNodes differ: cpu Ryzen 5|Xeon"),
        ([environment("a", "b"), environment("b", "a")], [environment("a", "a"), environment("b", "b")],
         "not bit-exact: its PNodes differ otherwise than before"),
        ([environment()], ["torch 2.8 AVX2; device cpu; cpu Ryzen 5"], "not bit-exact: threads 1→?"),
        (["a"], ["b"], "not bit-exact: a →?, b ?→"),
    ],
)  # fmt: skip
def test_notes_about_bits(before: list[str], now: list[str], note: str) -> None:
    """Field case B58: what bit-exact resume depends on is recorded, and a difference is said in one phrase."""
    assert environment_note(before, now) == note


def test_the_hash_is_of_the_state_alone() -> None:
    record = make_record(epoch=2)
    common = {"step": 10, "batch": 12, "sampler": "random"}
    one = manifest_of(
        record, [part("tok"), part("head", "b")], head=None, term=1, environment=["x"], created_s=1.0, **common
    )
    record.epoch = 9
    two = manifest_of(
        record, [part("tok"), part("head", "b")], head=None, term=7, environment=["y"], created_s=9.0, **common
    )
    assert one.hash == two.hash
    assert one.data.samples == 120
    three = manifest_of(
        record, [part("tok"), part("head", "c")], head=None, term=7, environment=["y"], created_s=9.0, **common
    )
    assert three.hash != one.hash
