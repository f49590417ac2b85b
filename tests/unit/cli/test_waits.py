"""Sentences about who waits for whom, made short."""

from __future__ import annotations

import pytest

from cli.waits import about, limit, readable, waits_for

DIGEST = "3f21343062afb2f97c73a922953ffde222b4e0295f4f750290b43544645e4b44"


def test_cuts_that_one_store_owes_are_told_once() -> None:
    told = [f"store: commit of step {step}, for 1 s (at most 86400 s)" for step in range(20, 120, 20)]
    assert readable([*told, "p2: hold, for 3 s (at most 60 s)"]) == [
        "store: commit of step 20, for 1 s (at most 24 h), and 4 more like it",
        "p2: hold, for 3 s (at most 60 s)",
    ]


def test_what_two_pnodes_wait_for_is_told_of_both() -> None:
    told = [f"{pnode} waits for p3: verdict on step 7, for 3 s (at most 900 s)" for pnode in ("p1", "p2")]
    assert readable(told) == [line.replace("900 s", "15 min") for line in told]


def test_digests_and_folders_are_cut() -> None:
    key = f"networks/mlp/sessions/mlp-1/parts/{DIGEST}.safetensors"
    (line,) = readable([f"p2 waits for store: cut of step 90: file:///s: write {key}: no space, for 3 s"])
    assert line == "p2 waits for store: cut of step 90: file:///s: write 3f213430….safetensors: no space, for 3 s"


@pytest.mark.parametrize(("seconds", "text"), [(90, "90 s"), (180, "180 s"), (900, "15 min"), (3600, "1 h"),
                                               (86400, "24 h"), (901, "901 s")])  # fmt: skip
def test_limits(seconds: int, text: str) -> None:
    assert limit(seconds) == text


def test_a_sentence_says_who_waits() -> None:
    assert waits_for("p2: hold") == "waiting for p2: hold"
    assert waits_for("p1 waits for p2: hold") == "p1 waits for p2: hold"
    assert about("p2: hold, for 3 s") == about("p2: hold, for 14 s")
