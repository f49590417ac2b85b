"""Batches as tensors, from packed data: what input VNodes and the loss VNode compute, each for itself.

`batch` is a pure function of (split, step, microbatch, replica) and the seed: whoever asks again gets the same tensors.
`rows` goes through a split in order, each target exactly once: for the loss over the whole validation split.

Shapes: B rows, T tokens (the context). tokens_BT and targets_BT are int64, targets shifted by one; a target of -1
(`IGNORE`) is padding and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from pnode.data.corpus import DataError
from pnode.data.packed import SPLITS, Array, PackedData, open_packed
from pnode.data.samplers import Sampler, make_sampler, microbatch_rows
from storage.checkpoints import DataPosition
from wire.errors import MisuseError

if TYPE_CHECKING:
    from networks.graph import TensorSpec
    from networks.recipe import Recipe

IGNORE = -1
TARGETS = "targets"
_TARGET_NAMES = (TARGETS, "target", "labels", "label", "y")


class BatchSource(Protocol):
    """Samples of both splits ("train", "val") by name of the network's inputs."""

    def batch(self, split: str, step: int, microbatch: int, replica: int = 0) -> dict[str, Tensor]:
        """The tensors of one microbatch; step 0 is the first."""

    def rows(self, split: str, start: int, count: int) -> dict[str, Tensor]:
        """Rows `start` … `start` + `count` - 1 of the split in order; fewer at its end."""

    def size(self, split: str) -> int:
        """Number of rows that `rows` can give."""

    def sample_ids(self, step: int, replica: int = 0) -> list[int]:
        """Which samples the step trains on: offsets of windows (text, random), else numbers of samples."""

    def position(self, step: int) -> DataPosition:
        """Where in the data a run is when `step` steps are applied; goes into the checkpoint."""


class _Base:
    """What both kinds share: sampling by split, cutting into microbatches, naming of inputs."""

    def __init__(
        self,
        packed: PackedData,
        recipe: Recipe,
        seed: int,
        names: tuple[str, str],
        digest: str,
        sizes: Mapping[str, int],
    ) -> None:
        if recipe.data is None:
            raise MisuseError("the recipe has no data section")
        self._packed = packed
        self._seed = seed
        self._batch = recipe.batch
        self._microbatches = recipe.microbatches
        self._names = names
        self._digest = digest
        self._kind = recipe.data.sampler
        self._samplers: dict[str, Sampler] = {
            split: make_sampler(self._kind, size=sizes[split], batch=recipe.batch, seed=seed, split=split)
            for split in SPLITS
            if sizes[split] > 0
        }
        self._last: tuple[tuple[str, int, int], list[int]] = (("", -1, -1), [])

    def _ids(self, split: str, step: int, replica: int) -> list[int]:
        key = (split, step, replica)
        asked, ids = self._last
        if asked != key:
            if split not in self._samplers:
                raise MisuseError(f"split {split!r} has no sample to draw", hint="'train' or 'val'; more data")
            ids = self._samplers[split].ids(step, replica)
            self._last = (key, ids)
        return ids

    def batch(self, split: str, step: int, microbatch: int, replica: int = 0) -> dict[str, Tensor]:
        """See BatchSource."""
        if not 0 <= microbatch < self._microbatches:
            raise MisuseError(f"microbatch {microbatch} of {self._microbatches}")
        rows = microbatch_rows(self._batch, self._microbatches, microbatch)
        return self._tensors(split, self._ids(split, step, replica)[rows.start : rows.stop])

    def sample_ids(self, step: int, replica: int = 0) -> list[int]:
        """See BatchSource."""
        return list(self._ids("train", step, replica))

    def position(self, step: int) -> DataPosition:
        """See BatchSource."""
        return DataPosition(
            data_digest=self._digest, tokenizer_digest=self._packed.header.tokenizer_digest, sampler=self._kind,
            seed=self._seed, step=step, samples=step * self._batch,
        )  # fmt: skip

    def _tensors(self, split: str, ids: Sequence[int]) -> dict[str, Tensor]:
        raise NotImplementedError

    def size(self, split: str) -> int:
        """See BatchSource."""
        raise NotImplementedError

    def _range(self, split: str, start: int, count: int) -> range:
        size = self.size(split)
        if not 0 <= start < size or count < 1:
            raise MisuseError(f"rows {start} … {start + count - 1} of {split}, which has {size}")
        return range(start, min(start + count, size))


class TokenSource(_Base):
    """Windows of `context` tokens of a long text."""

    def __init__(
        self, packed: PackedData, recipe: Recipe, context: int, seed: int, names: tuple[str, str], digest: str
    ) -> None:
        self._context = context
        lengths = {split: len(packed.arrays[f"{split}.tokens"]) for split in SPLITS}
        if lengths["train"] <= context:
            raise DataError(
                f"the training split has {lengths['train']} tokens, a sample takes {context + 1}",
                hint="more text, or a smaller context",
            )
        random = recipe.data is not None and recipe.data.sampler == "random"
        sizes = {
            split: max(length - context if random else (length - 1) // context, 0) for split, length in lengths.items()
        }
        self._stride = 1 if random else context
        super().__init__(packed, recipe, seed, names, digest, sizes)

    def size(self, split: str) -> int:
        """Non-overlapping windows that take in each target once; the last one may be padded."""
        if split not in SPLITS:
            raise MisuseError(f"there is no split {split!r}", hint="'train' or 'val'")
        return -(-(len(self._packed.arrays[f"{split}.tokens"]) - 1) // self._context)

    def _tensors(self, split: str, ids: Sequence[int]) -> dict[str, Tensor]:
        tokens = self._packed.arrays[f"{split}.tokens"]
        windows = [tokens[start : start + self._context + 1] for start in (number * self._stride for number in ids)]
        return self._named(
            np.stack(windows).astype(np.int64) if windows else np.zeros((0, self._context + 1), np.int64)
        )

    def _named(self, windows: Array) -> dict[str, Tensor]:
        whole = torch.from_numpy(windows)
        return {
            self._names[0]: whole[:, :-1].clone(memory_format=torch.contiguous_format),
            self._names[1]: whole[:, 1:].clone(memory_format=torch.contiguous_format),
        }

    def rows(self, split: str, start: int, count: int) -> dict[str, Tensor]:
        """See BatchSource. Padding: token 0, target -1."""
        wanted = self._range(split, start, count)
        tokens = self._packed.arrays[f"{split}.tokens"]
        context = self._context
        windows = np.full((len(wanted), context + 1), IGNORE, np.int64)
        for row, number in enumerate(wanted):
            window = tokens[number * context : (number + 1) * context + 1]
            windows[row, : len(window)] = window
        found = self._named(windows)
        found[self._names[0]].clamp_(min=0)
        return found


class SampleSource(_Base):
    """Samples with one class each, such as the digits."""

    def __init__(
        self, packed: PackedData, recipe: Recipe, seed: int, names: tuple[str, str], digest: str, shape: tuple[int, ...]
    ) -> None:
        self._shape = shape
        sizes = {split: len(packed.arrays[f"{split}.targets"]) for split in SPLITS}
        super().__init__(packed, recipe, seed, names, digest, sizes)

    def size(self, split: str) -> int:
        """Number of samples."""
        if split not in SPLITS:
            raise MisuseError(f"there is no split {split!r}", hint="'train' or 'val'")
        return len(self._packed.arrays[f"{split}.targets"])

    def _tensors(self, split: str, ids: Sequence[int]) -> dict[str, Tensor]:
        chosen = np.asarray(ids, np.int64)
        features = np.array(self._packed.arrays[f"{split}.features"][chosen], np.float32)
        targets = np.array(self._packed.arrays[f"{split}.targets"][chosen], np.int64)
        return {
            self._names[0]: torch.from_numpy(features.reshape(len(chosen), *self._shape)),
            self._names[1]: torch.from_numpy(targets),
        }

    def rows(self, split: str, start: int, count: int) -> dict[str, Tensor]:
        """See BatchSource."""
        return self._tensors(split, self._range(split, start, count))


def open_source(
    packed: Path | bytes,
    recipe: Recipe,
    context: int | None,
    seed: int,
    *,
    inputs: Mapping[str, TensorSpec] | None = None,
    digest: str = "",
) -> TokenSource | SampleSource:
    """The batches of a packed data set.

    `context`: tokens in a sample; without it, the recipe's, then the length in `inputs`. `inputs`: the network's (name
    -> spec), which names the tensors and shapes the features; without it they are "tokens" or "x", and "targets".
    `digest`: of the packed data, for the data position. Raises DataError.
    """
    data = open_packed(packed)
    names = _input_names(inputs, "tokens" if data.header.kind == "tokens" else "x")
    spec = inputs[names[0]] if inputs else None
    extents = tuple(int(extent) for extent in spec.shape[1:]) if spec else ()
    if data.header.kind == "tokens":
        wanted = context or (recipe.data.context if recipe.data else None) or (extents[0] if extents else None)
        if wanted is None:
            raise DataError("nothing says how many tokens a sample has", hint="set train.data.context")
        if spec is not None and not spec.dtype.startswith("int"):
            raise DataError(f"the data are tokens, the network's input {names[0]!r} is {spec}")
        return TokenSource(data, recipe, wanted, seed, names, digest)
    own = data.arrays["train.features"].shape[1:]
    if spec is not None and (not spec.dtype.startswith("float") or np.prod(extents) != np.prod(own)):
        raise DataError(f"a sample of the data has {own} numbers, the network's input {names[0]!r} is {spec}")
    return SampleSource(data, recipe, seed, names, digest, extents or own)


def _input_names(inputs: Mapping[str, TensorSpec] | None, default: str) -> tuple[str, str]:
    if inputs is None:
        return default, TARGETS
    targets = next((name for name in _TARGET_NAMES if name in inputs), None)
    others = [name for name in inputs if name != targets]
    if len(others) != 1:
        raise DataError(
            f"the data give one input and targets, the network has the inputs {', '.join(inputs)}",
            hint="name the targets 'targets'",
        )
    return others[0], targets or TARGETS
