"""The three networks of the campaign, made small so that a run consists of faults and not of arithmetic.

A tied GPT with dropout, convolutions with batch statistics, and a mixture of experts (split, fan-out, merge).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cli.chaos.reference import Undisturbed, undisturbed
from cli.preparing import Overrides, Prepared, prepare
from cli.terminal import Terminal


@dataclass(frozen=True, slots=True)
class Net:
    """A shipped network and what makes it small."""

    name: str
    steps: int
    sets: tuple[str, ...]

    def prepared(self, cache: Path, *, steps: int = 0, extra: tuple[str, ...] = ()) -> Prepared:
        """The network and its data; saved every 10 steps."""
        chosen = [*self.sets, "train.checkpoint.every=10", f"train.steps={steps or self.steps}", *extra]
        return prepare(self.name, Overrides.of(chosen), Terminal("json"), cache=cache)


GPT = Net(
    "gpt-char", 700,
    ("vars.d=32", "vars.layers=2", "vars.ctx=16", "vars.heads=2", "vars.dropout=0.1", "train.batch=4",
     "train.data.limit_bytes=200000"),
)  # fmt: skip
CNN = Net("cnn-digits", 900, ("vars.c=4", "train.batch=16"))
MOE = Net("moe-digits", 1200, ("vars.d=16", "vars.e=16", "train.batch=16"))
NETS = (GPT, CNN, MOE)


def truth(prepared: Prepared) -> Undisturbed:
    """The undisturbed run of all its steps, on one thread, with the hash after each."""
    return undisturbed(prepared, prepared.network.recipe.steps, threads=1, each=True)
