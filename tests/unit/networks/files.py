"""A small valid network file, and ways to break it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from networks.expressions import VarValue
from networks.load import Network, NetworkFileError, load

MLP = """\
version: 1
name: mlp
vars: {d: 8}
inputs:
  x: {dtype: float32, shape: [batch, 8]}
  targets: {dtype: int64, shape: [batch]}
nodes:
  - {id: fc1, type: linear, in: 8, out: 16}
  - {id: act, type: relu}
  - {id: fc2, type: linear, in: 16, out: 4}
  - {id: loss, type: cross_entropy}
edges:
  - x -> fc1 -> act -> fc2 -> loss.logits
  - targets -> loss.targets
outputs: {logits: fc2, loss: loss}
train:
  batch: 4
  steps: 10
  optimizer: {type: adamw, lr: 1e-3, betas: [0.9, 0.99]}
"""


def changed(*pairs: tuple[str, str]) -> str:
    """MLP with each first text replaced by the second; fails if the first is not there."""
    text = MLP
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Files:
    """Writes network files into a test's folder and reads them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "net.yaml"

    def write(self, text: str | bytes) -> Path:
        self.path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self.path

    def load(
        self, text: str | bytes, *, sets: Sequence[str] = (), given: Mapping[str, VarValue] | None = None
    ) -> Network:
        return load(self.write(text), sets=sets, vars=given)

    def errors(
        self, text: str | bytes, *, sets: Sequence[str] = (), given: Mapping[str, VarValue] | None = None
    ) -> list[str]:
        """Each error as `line:column: text | hint`. Fails if the file loads."""
        try:
            self.load(text, sets=sets, given=given)
        except NetworkFileError as error:
            return [f"{one.line}:{one.column}: {one.text} | {one.hint}" for one in error.diagnostics]
        raise AssertionError("the file loads")
