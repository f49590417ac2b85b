"""A network's canonical bytes as a client reads them: inputs, outputs, who reads what. No torch, no full check.

The cluster checked these bytes when they were registered, and the digest says that they are the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from wire.errors import RemoteError, UsageError

LOSS, LOGITS, TARGETS = "loss", "logits", "targets"


class _Input(msgspec.Struct):
    name: str
    dtype: str
    shape: list[int | str]


class _Node(msgspec.Struct):
    id: str
    type: str


class _Bytes(msgspec.Struct):
    name: str
    inputs: list[_Input]
    nodes: list[_Node]
    edges: list[tuple[str, str]]
    outputs: list[tuple[str, str]]
    train: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Card:
    """What goes in and what comes out. `inputs`: name -> (dtype, shape); `needed`: what more than the loss reads.

    `readers`: the nodes that read an input.
    """

    name: str
    inputs: dict[str, tuple[str, tuple[int | str, ...]]]
    needed: tuple[str, ...]
    outputs: tuple[str, ...]
    readers: frozenset[str]
    batch: int

    @staticmethod
    def of(data: bytes) -> Card:
        """From `Network.to_bytes()`. Raises `RemoteError`."""
        try:
            raw = msgspec.json.decode(data, type=_Bytes)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            raise RemoteError(f"not a network: {problem}") from problem
        loss = next((port.partition(":")[0] for name, port in raw.outputs if name == LOSS), "")
        readers = {src.partition(":")[0] for src, dst in raw.edges if dst.partition(":")[0] != loss}
        inputs = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in raw.inputs}
        batch = raw.train.get("batch", 1)
        return Card(
            raw.name,
            inputs,
            tuple(name for name in inputs if name in readers),
            tuple(name for name, _ in raw.outputs),
            frozenset(dst.partition(":")[0] for src, dst in raw.edges if src.partition(":")[0] in inputs),
            batch if isinstance(batch, int) else 1,
        )

    def wanted(self, names: tuple[str, ...] | list[str]) -> list[str]:
        """The outputs asked for, or all but the loss. Raises `UsageError`."""
        for name in names:
            if name not in self.outputs:
                raise UsageError(f"{self.name} has no output {name!r}", hint=f"it has {', '.join(self.outputs)}")
        return list(names) or [name for name in self.outputs if name != LOSS] or [LOSS]

    def text_input(self) -> tuple[str, int]:
        """The input that takes tokens, and its length. Raises `UsageError` if the network reads no text."""
        for name in self.needed:
            dtype, shape = self.inputs[name]
            if dtype == "int64" and len(shape) == 2 and isinstance(shape[1], int):
                return name, shape[1]
        raise UsageError(f"{self.name} does not read text", hint="give it numbers: --input x.npy")

    @property
    def classifies(self) -> bool:
        """One class for each sample: accuracy makes sense."""
        dtype, shape = self.inputs.get(TARGETS, ("", ()))
        return LOGITS in self.outputs and dtype == "int64" and len(shape) == 1
