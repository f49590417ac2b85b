"""scikit-learn's digits: 1,797 images of 8x8, ten classes (UCI, Alpaydin and Kaynak 1998); an extra.

Values are scaled from 0 … 16 to 0 … 1. The split is stratified: within each class the images are shuffled by a fixed
seed, and the first share of them is trained on: every class has the same share, and the split is the same everywhere.
"""

from __future__ import annotations

import numpy as np

from pnode.data.corpus import DataError
from pnode.data.packed import Array
from pnode.data.samplers import permutation

SPLIT_SEED = 0
CLASSES = 10


def digits_arrays(split: float) -> tuple[dict[str, Array], str]:
    """Arrays of both splits for `encode_packed`, and one line about them. Raises DataError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which isn't installed", hint="pip install 'dcnr[digits]'"
        ) from error
    features, targets = load_digits(return_X_y=True)
    features = (np.asarray(features) / 16.0).astype(np.float32)
    targets = np.asarray(targets, np.int64)
    chosen: dict[str, list[Array]] = {"train": [], "val": []}
    for number in range(CLASSES):
        rows = np.nonzero(targets == number)[0]
        rows = rows[permutation(len(rows), f"digits/{SPLIT_SEED}/{number}")]
        cut = int(len(rows) * split)
        chosen["train"].append(rows[:cut])
        chosen["val"].append(rows[cut:])
    arrays: dict[str, Array] = {}
    for name, parts in chosen.items():
        ids = np.sort(np.concatenate(parts)).astype(np.int64)
        if not len(ids):
            raise DataError(f"split {split} leaves no image for {name}")
        arrays |= {f"{name}.features": features[ids], f"{name}.targets": targets[ids], f"{name}.ids": ids}
    counts = f"{len(arrays['train.ids'])} to train, {len(arrays['val.ids'])} held out"
    return arrays, f"digits: {len(targets)} images of 8x8; {counts}, stratified by class, seed {SPLIT_SEED}"
