"""From a network file and what a person overrides to a network that can be trained: the client's half of the work.

The data are read and packed here, on the client's machine; everything else is named by digest from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.bars import bar
from wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Terminal
    from networks.load import Network
    from pnode.data import Packed


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line changes in the network file, as `key=value` texts."""

    sets: tuple[str, ...] = ()
    data: str = ""

    @staticmethod
    def of(sets: Sequence[str] | None, *, steps: int = 0, seed: int | None = None, data: str = "") -> Overrides:
        """From the options of `train`. Raises `UsageError` for a `--set` without a value."""
        given = list(sets or ())
        for text in given:
            if not text.partition("=")[0].strip() or "=" not in text:
                raise UsageError(f"--set {text!r} has no value", hint="write it as --set train.batch=8")
        if steps:
            given.append(f"train.steps={steps}")
        if seed is not None:
            given.append(f"train.seed={seed}")
        if data:
            given.append(f"train.data.text={data}")
        return Overrides(tuple(given), data)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network, complete, and its packed data."""

    network: Network
    packed: Packed


def prepare(source: str, overrides: Overrides, terminal: Terminal, *, cache: Path) -> Prepared:
    """Read the recipe, pack the data (shown as it goes), and load the network with the vocabulary's size.

    Raises: `BadFileError` for the network file or the data.
    """
    from networks.load import load, read_recipe
    from pnode.data import pack

    if overrides.data and (own := read_recipe(source, _without_data(overrides)).data) is not None and own.dataset:
        raise UsageError(
            f"--data gives text, but {source} is made for the data set {own.dataset!r}",
            hint="dcnr net new NAME --from gpt-char starts from a network for text",
        )
    recipe = read_recipe(source, overrides.sets)
    if recipe.data is None:
        raise UsageError(
            f"{source} names no data to train on", hint="--data python-stdlib, or a train.data section in the file"
        )
    with bar(terminal) as moved:
        packed = pack(recipe.data, cache_dir=cache, progress=lambda what, done, of: moved(f"data: {what}", done, of))
    names = {"vocab": packed.vocab} if packed.vocab is not None else {}
    network = load(source, sets=overrides.sets, vars=names)
    return Prepared(network, packed)


def _without_data(overrides: Overrides) -> list[str]:
    return [text for text in overrides.sets if not text.startswith("train.data")]
