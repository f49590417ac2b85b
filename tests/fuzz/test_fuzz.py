"""The fuzzers at a small size: what once broke, some hundred new cases for each target, and that they find something.

New cases come from hypothesis, which shrinks what it finds, and from the campaigns' own mutations.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import engine
from tests.fuzz.engine import SEEDS, campaign, cases_of, judge, keep_seed
from tests.fuzz.mutate import MARKER, change_bytes
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from wire.errors import RemoteError

FEW = {"yaml": 60, "network": 60, "tokenizer": 80, "corpus": 80, "config": 100, "input": 120}
"""Cases here, of the targets that take milliseconds for each."""


def kept() -> list[tuple[str, Path]]:
    return [(path.parent.name, path) for path in sorted(SEEDS.glob("*/*")) if path.parent.name in TARGETS]


@pytest.mark.parametrize(("name", "path"), kept(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_what_once_broke_is_refused(name: str, path: Path) -> None:
    started = time.process_time()
    _, broke = judge(TARGETS[name], path.read_bytes())
    assert not broke
    assert time.process_time() - started < engine.MAX_S


@pytest.mark.parametrize("name", TARGETS)
def test_valid_input_is_accepted_and_changed_input_refused_by_errors_of_ours(name: str) -> None:
    found = campaign(TARGETS[name], cases=FEW.get(name, 300), seconds=60, seed="ci", most=FEW.get(name, 300))
    assert not found.broke
    assert found.good, list(found.lines(name))
    assert not Path(MARKER).exists()


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in FEW])
def test_any_change_of_a_valid_input(name: str) -> None:
    target = TARGETS[name]
    corpus = target.valid()

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.integers(0, len(corpus) - 1), st.integers(), st.binary(max_size=64), st.integers(0, 1 << 16))
    def check(which: int, seed: int, piece: bytes, at: int) -> None:
        data = target.change(Random(seed), corpus[which], corpus)
        at %= len(data) + 1
        for case in (data, data[:at] + piece + data[at:], data[:at] + piece + data[at + len(piece) :], piece):
            _, broke = judge(target, case)
            assert not broke

    check()


# ---------------------------------------------------------------- that the fuzzers themselves work


def planted(data: bytes) -> None:
    if data[:1] == b"!":
        raise IndexError("planted")
    if data[1:2] == b"?":
        raise RemoteError("refused")
    if data[2:3] == b"#":
        bytearray(200 << 20)[:] = b"x" * (200 << 20)


PLANTED = Target("planted", "for tests", lambda: [b"abc"], planted, lambda random, data, _: change_bytes(random, data))


def test_a_fault_is_found_kept_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = campaign(
        PLANTED, cases=2_000, seconds=20, seed="1",
        keep=lambda name, data, why: keep_seed(name, data, why, tmp_path),
    )  # fmt: skip
    assert list(found.broke) == ["IndexError in test_fuzz.py:planted"]
    assert not found.good
    assert Path(found.saved[0]).read_bytes()[:1] == b"!"
    assert 0 < found.accepted < found.cases


def test_memory_that_one_case_takes_is_found() -> None:
    memory = engine.Memory()
    before = memory.begin()
    if not before:
        pytest.skip("the peak of a process's memory can't be reset here")
    judge(PLANTED, b"ab#")
    assert memory.grown(before) > 150 << 20
    before = memory.begin()
    judge(PLANTED, b"abc")
    assert memory.grown(before) < 10 << 20


def test_cases_are_the_same_for_the_same_seed() -> None:
    first, again, other = (list(cases_of(TARGETS["header"], seed, 0)) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
