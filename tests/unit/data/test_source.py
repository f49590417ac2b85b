"""Batches: shapes, shift by one, replay, coverage of the validation split, data position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from networks.graph import TensorSpec
from networks.recipe import DataRecipe, Recipe
from pnode.data import DataError, open_source
from pnode.data.packed import encode_packed
from pnode.data.source import SampleSource, TokenSource
from wire.errors import MisuseError


def token_bytes(train: int = 90, val: int = 31) -> bytes:
    tokens = np.arange(train + val, dtype=np.uint16)
    return b"".join(
        encode_packed("tokens", train + val, {"train.tokens": tokens[:train], "val.tokens": tokens[train:]})
    )


def sample_bytes(train: int = 20, val: int = 7) -> bytes:
    arrays = {}
    for split, count, start in (("train", train, 0), ("val", val, train)):
        ids = np.arange(start, start + count)
        arrays |= {
            f"{split}.features": np.repeat(ids[:, None], 4, 1).astype(np.float32),
            f"{split}.targets": ids % 3,
            f"{split}.ids": ids,
        }
    return b"".join(encode_packed("samples", 3, arrays))


def recipe(sampler: str = "random", batch: int = 5, microbatches: int = 1, **data: object) -> Recipe:
    return Recipe(
        data=DataRecipe.model_validate({"text": "x", "sampler": sampler} | data), batch=batch,
        microbatches=microbatches, steps=10,
    )  # fmt: skip


@pytest.mark.parametrize("sampler", ["random", "shuffle"])
def test_targets_are_the_next_tokens(sampler: str) -> None:
    source = open_source(token_bytes(), recipe(sampler), 8, 1)
    for step in range(20):
        batch = source.batch("train", step, 0)
        assert batch["tokens"].shape == batch["targets"].shape == (5, 8)
        assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
        assert torch.equal(batch["targets"], batch["tokens"] + 1)
        assert batch["targets"].max() < 90
        assert batch["tokens"].is_contiguous()
        starts = batch["tokens"][:, 0].tolist()
        assert starts == [number * (8 if sampler == "shuffle" else 1) for number in source.sample_ids(step)]


@pytest.mark.parametrize("data", [token_bytes(), sample_bytes()], ids=["tokens", "samples"])
@pytest.mark.parametrize("sampler", ["random", "shuffle"])
def test_microbatches_cut_one_batch(sampler: str, data: bytes) -> None:
    whole = open_source(data, recipe(sampler, 7, 1), 8, 3)
    for microbatches in (1, 2, 3, 7):
        parts = open_source(data, recipe(sampler, 7, microbatches), 8, 3)
        for step in (0, 4, 2):
            expected = whole.batch("train", step, 0)
            got = [parts.batch("train", step, number) for number in range(microbatches)]
            for name in expected:
                assert torch.equal(torch.cat([part[name] for part in got]), expected[name])
            assert parts.sample_ids(step) == whole.sample_ids(step)
        with pytest.raises(MisuseError):
            parts.batch("train", 0, microbatches)


def test_a_batch_depends_on_its_names_alone() -> None:
    one = open_source(token_bytes(), recipe(batch=6, microbatches=2), 8, 3)
    other = open_source(token_bytes(), recipe(batch=6, microbatches=2), 8, 3)
    order = [(step, microbatch, replica) for step in range(4) for microbatch in range(2) for replica in range(2)]
    first = {name: one.batch("train", *name)["tokens"].tolist() for name in order}
    again = {name: other.batch("train", *name)["tokens"].tolist() for name in reversed(order)}
    assert first == again
    assert len({str(batch) for batch in first.values()}) == len(order)
    seeded = open_source(token_bytes(), recipe(batch=6, microbatches=2), 8, 4)
    assert seeded.sample_ids(0) != one.sample_ids(0)
    assert one.sample_ids(0, 1) != one.sample_ids(0, 0)


def test_stopping_and_going_on_gives_the_same_list() -> None:
    """Case: a run of 40 steps against one that stops at 17 and goes on in a new process."""
    whole = open_source(sample_bytes(), recipe("shuffle", 6), None, 9)
    uninterrupted = [whole.sample_ids(step) for step in range(40)]
    before = open_source(sample_bytes(), recipe("shuffle", 6), None, 9)
    first = [before.sample_ids(step) for step in range(17)]
    position = before.position(17)
    after = open_source(sample_bytes(), recipe("shuffle", 6), None, position.seed)
    assert first + [after.sample_ids(step) for step in range(position.step, 40)] == uninterrupted
    assert position.samples == 17 * 6
    assert position == after.position(17) != after.position(18)


@pytest.mark.parametrize("val", [2, 8, 9, 10, 31, 33])
def test_validation_rows_take_in_each_target_once(val: int) -> None:
    source = open_source(token_bytes(90, val), recipe(), 8, 1)
    assert source.size("val") == -(-(val - 1) // 8)
    seen: list[int] = []
    for start in range(0, source.size("val"), 2):
        rows = source.rows("val", start, 2)
        assert rows["tokens"].shape == rows["targets"].shape
        assert rows["tokens"].min() >= 0
        counted = rows["targets"] != -1
        assert torch.equal(rows["targets"][counted], rows["tokens"][counted] + 1)
        seen += rows["targets"][counted].tolist()
    assert seen == list(range(91, 90 + val))
    for start, count in ((source.size("val"), 1), (-1, 1), (0, 0)):
        with pytest.raises(MisuseError):
            source.rows("val", start, count)


def test_an_empty_validation_split_has_no_rows() -> None:
    for val in (0, 1):
        source = open_source(token_bytes(90, val), recipe(), 8, 1)
        assert source.size("val") == 0
        with pytest.raises(MisuseError):
            source.rows("val", 0, 1)
        with pytest.raises(MisuseError):
            source.batch("val", 0, 0)
    with pytest.raises(MisuseError):
        source.size("test")


def test_samples_come_with_their_classes() -> None:
    source = open_source(sample_bytes(), recipe("shuffle", 20), None, 0)
    batch = source.batch("train", 0, 0)
    assert batch["x"].dtype == torch.float32
    assert batch["x"][:, 0].tolist() == source.sample_ids(0)
    assert torch.equal(batch["targets"], batch["x"][:, 0].long() % 3)
    assert source.rows("val", 5, 10)["x"][:, 0].tolist() == [25, 26]
    assert source.size("val") == 7


def test_inputs_of_the_network_name_and_shape_the_tensors() -> None:
    image = {"image": TensorSpec("float32", ("batch", 1, 2, 2)), "label": TensorSpec("int64", ("batch",))}
    source = open_source(sample_bytes(), recipe("shuffle"), None, 0, inputs=image)
    batch = source.batch("train", 0, 0)
    assert batch.keys() == {"image", "label"}
    assert batch["image"].shape == (5, 1, 2, 2)
    text = {"targets": TensorSpec("int64", ("batch", 16)), "ids": TensorSpec("int64", ("batch", 16))}
    assert open_source(token_bytes(), recipe(), None, 0, inputs=text).batch("train", 0, 0)["ids"].shape == (5, 16)
    with pytest.raises(DataError, match="float32"):
        open_source(token_bytes(), recipe(), 8, 0, inputs=image)
    with pytest.raises(DataError, match="numbers"):
        open_source(sample_bytes(), recipe(), 8, 0, inputs=text)
    with pytest.raises(DataError, match="one input and targets"):
        open_source(token_bytes(), recipe(), 8, 0, inputs=text | {"more": text["ids"]})


def test_what_is_missing_is_said() -> None:
    with pytest.raises(DataError, match="context"):
        open_source(token_bytes(), recipe(), None, 0)
    assert open_source(token_bytes(), recipe(context=4), None, 0).batch("train", 0, 0)["tokens"].shape == (5, 4)
    with pytest.raises(DataError, match="90 tokens, a sample takes 91"):
        open_source(token_bytes(), recipe(), 90, 0)
    with pytest.raises(DataError, match="90 tokens"):
        open_source(token_bytes(), recipe("shuffle"), 90, 0)
    assert isinstance(open_source(token_bytes(), recipe("shuffle"), 89, 0), TokenSource)
    assert isinstance(open_source(sample_bytes(), recipe(), None, 0), SampleSource)


def test_a_mapped_file_gives_what_its_bytes_give(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(token_bytes())
    mapped, held = open_source(path, recipe(), 8, 1), open_source(token_bytes(), recipe(), 8, 1)
    assert torch.equal(mapped.batch("train", 3, 0)["tokens"], held.batch("train", 3, 0)["tokens"])
    assert torch.equal(mapped.rows("val", 0, 9)["targets"], held.rows("val", 0, 9)["targets"])
