"""What a person gives a network to read."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cli.card import Card
from cli.evaluation import Rows, right_answers, score
from cli.inputs import fit, preview, read_arrays, save
from wire.errors import BadFileError, UsageError


def test_arrays_by_name_and_by_position(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "b.npz", x=np.ones(2), y=np.zeros(2))
    (tmp_path / "c.json").write_text("[[1, 2]]")
    found = read_arrays([str(tmp_path / "a.npy"), f"y={tmp_path / 'c.json'}"], ["x", "y"])
    assert found["x"].tolist() == [0, 1, 2]
    assert found["y"].tolist() == [[1, 2]]
    assert read_arrays([str(tmp_path / "b.npz")], ["x", "y"])["y"].tolist() == [0, 0]


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadFileError, match=r"evil\.npy"):
        read_arrays([str(tmp_path / "evil.npy")], ["x"])
    (tmp_path / "junk.npy").write_bytes(b"junk")
    with pytest.raises(BadFileError):
        read_arrays([str(tmp_path / "junk.npy")], ["x"])
    with pytest.raises(BadFileError, match="no file"):
        read_arrays([str(tmp_path / "none.npy")], ["x"])


def npy_header(shape: str) -> bytes:
    """A version 1.0 header as in NumPy's description of the format, claiming float32 numbers of that shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117) + b"\n"


def test_damaged_and_lying_files_are_bad_files(tmp_path: Path) -> None:
    good = io.BytesIO()
    np.savez_compressed(good, x=np.arange(1000.0))
    files = {f"bit{place}.npz": damaged(good.getvalue(), place) for place in range(0, len(good.getvalue()), 7)}
    files |= {"short.npz": good.getvalue()[:100], "empty.npz": b"", "text.npz": b"PK\x03\x04 not really"}
    claims = ("(10**15,)", f"({10**15},)", f"({10**24},)", "(-5,)", f"({2**33}, {2**33})", "(3,)")
    files |= {f"claim{number}.npy": npy_header(shape) + bytes(8) for number, shape in enumerate(claims)}
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy_header(f"({10**12},)") + bytes(1 << 20))
    with zipfile.ZipFile(odd := io.BytesIO(), "w") as archive:
        archive.writestr("notes.txt", "hello")
    files |= {"bomb.npz": bomb.getvalue(), "odd.npz": odd.getvalue()}
    refused = set()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        try:
            read_arrays([str(tmp_path / name)], ["x"])
        except BadFileError:
            refused.add(name)
    assert {name for name in files if not name.startswith("bit")} <= refused
    assert len(refused) > len(files) / 2


def damaged(data: bytes, place: int) -> bytes:
    """The same with one byte changed."""
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def test_what_a_file_is_decides_not_what_it_is_called(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "b.npz", x=np.ones(2))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    (tmp_path / "b.npz").rename(tmp_path / "b.npy")
    assert read_arrays([str(tmp_path / "a.npz")], ["x"])["x"].tolist() == [0, 1, 2]
    assert read_arrays([str(tmp_path / "b.npy")], ["x"])["x"].tolist() == [1, 1]


def test_numbers_that_an_integer_input_would_change_are_refused() -> None:
    for number in (1.5, 1e30, float("nan"), float("inf"), 2**63):
        with pytest.raises(UsageError, match="tokens takes whole numbers"):
            fit(np.asarray([[1, number]]), "int64", ("batch", 64), "tokens")
    assert fit(np.asarray([[1.0, 2.0]]), "int64", ("batch", 64), "tokens").tolist() == [[1, 2]]


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """Field case B64: a pipe without a writer would be waited for; nesting would end in a traceback."""
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "link.json").symlink_to(tmp_path / "pipe.npy")
    for name in ("pipe.npy", "link.json", "", "/dev/zero"):
        with pytest.raises(BadFileError, match="is not a file"):
            read_arrays([str(tmp_path / name)], ["x"])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("deep.json", "a\0.npy", "x" * 300 + ".npy"):
        with pytest.raises(BadFileError):
            read_arrays([str(tmp_path / name)], ["x"])


def test_fit() -> None:
    assert fit(np.zeros((1, 8, 8)), "float32", ("batch", 1, 8, 8), "x").shape == (1, 1, 8, 8)
    assert fit(np.zeros((5, 1, 8, 8)), "float32", ("batch", 1, 8, 8), "x").dtype == np.float32
    assert fit(np.zeros((1, 3)), "int64", ("batch", 64), "tokens").shape == (1, 3)
    with pytest.raises(UsageError, match=r"x expects \(batch, 64\), got \(2, 63\)"):
        fit(np.zeros((2, 63)), "float32", ("batch", 64), "x")
    with pytest.raises(UsageError, match="not numbers"):
        fit(np.array(["a"]), "float32", ("batch",), "x")


def test_save(tmp_path: Path) -> None:
    values = {"logits": np.eye(2)}
    save(tmp_path / "o.npy", values)
    assert np.load(tmp_path / "o.npy").tolist() == [[1, 0], [0, 1]]
    save(tmp_path / "o.json", values)
    assert json.loads((tmp_path / "o.json").read_text()) == {"logits": [[1, 0], [0, 1]]}
    with pytest.raises(UsageError):
        save(tmp_path / "o.txt", values)
    assert preview(np.arange(20.0)).startswith("float64(20,) [0, 1, 2")


def card(name: str, **vars: int) -> Card:
    from networks.load import load

    return Card.of(load(name, vars=vars).to_bytes())


def test_the_card_of_a_classifier() -> None:
    found = card("mlp-digits")
    assert found.needed == ("pixels",)
    assert found.classifies
    assert found.wanted([]) == ["logits"]
    with pytest.raises(UsageError, match="does not read text"):
        found.text_input()
    with pytest.raises(UsageError, match="no output 'x'"):
        found.wanted(["x"])


def test_the_card_of_a_language_model() -> None:
    found = card("gpt-char", vocab=65)
    assert found.text_input() == ("tokens", 64)
    assert not found.classifies


async def test_scores_are_sums_over_targets_in_any_order() -> None:
    async def ask(start: int, count: int) -> Rows:
        return Rows(float(sum(range(start, start + count))), count, count // 2, 7)

    found = await score(ask, "s-1", "val", 10, rows_each=4, text=True)
    assert (found.samples, found.targets, found.loss, found.step) == (10, 10, 4.5, 7)
    assert found.accuracy == 0.5
    assert found.perplexity == pytest.approx(90.017, rel=1e-4)


def test_accuracy() -> None:
    assert right_answers(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1])) == 1
