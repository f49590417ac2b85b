"""The undisturbed run: the same network in this one process, with the loss of each step and the hash of its state.

The hash is that of a committed checkpoint (`storage.checkpoints.Manifest.hash`): the state of every VNode as it would
be stored, with counters and data position. So a run under fire can be held against it at whatever step it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.preparing import Prepared
    from pnode.reference import Reference


@dataclass(slots=True)
class Undisturbed:
    """What every run of this network, seed and data has to give."""

    losses: list[float] = field(default_factory=list)
    """Of step 1, 2, …"""
    hashes: dict[int, str] = field(default_factory=dict)
    """By step, where asked for."""


def undisturbed(
    prepared: Prepared,
    steps: int,
    *,
    threads: int,
    moved: Callable[[int], None] = lambda step: None,
    each: bool = False,
) -> Undisturbed:
    """Train `steps` steps in this process; the hash of the last, or of each. Blocks.

    Raises `pnode.reference.NotFinite`.
    """
    import torch

    from cli.local import batches
    from pnode.reference import Reference
    from pnode.waiting import sleep_while_waiting

    sleep_while_waiting()
    torch.set_num_threads(threads)
    found = Undisturbed()
    reference = Reference(prepared.network, batches(prepared))
    for step in range(steps):
        done = reference.step(step)
        found.losses.append(done.loss)
        if each or done.step == steps:
            found.hashes[done.step] = state_hash(prepared, reference, done.step)
        moved(done.step)
    return found


def state_hash(prepared: Prepared, trained: Reference, step: int) -> str:
    """The hash that a checkpoint of this state would have."""
    from storage.checkpoints import DataPosition, Manifest
    from storage.store import digest_of
    from storage.tensors import encode_tensors
    from wire.messages import Part

    network, packed = prepared.network, prepared.packed
    recipe = network.recipe
    parts = []
    for node, state in trained.state().items():
        data = encode_tensors(state)
        parts.append(Part(str(node), digest_of(data), len(data)))
    sampler = recipe.data.sampler if recipe.data is not None else ""
    return Manifest(
        session="",
        network=network.id,
        network_digest=digest_of(network.to_bytes()),
        step=step,
        parts=parts,
        data=DataPosition(packed.digest, packed.tokenizer_digest, sampler, recipe.seed, step, step * recipe.batch),
        counters={"step": step},
        seed=recipe.seed,
    ).hash
