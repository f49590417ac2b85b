"""The same network as one stage in one process: what every distributed run must equal.

There is no link, schedule or placement in the path of this module: it drives one `StageExecutor` over the whole graph,
microbatch after microbatch. `dcnr train --local` and `dcnr verify` use it. A run with codecs equals the reference that
is given the run's coded groups, and no other: without them nothing is rounded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from networks.codecs import CodedGroup
from networks.graph import NodeId
from networks.recipe import lr_at
from networks.stages import cut_stages
from pnode.executor import StageExecutor
from pnode.vnodes import VNodes
from wire.errors import DCNRError, MisuseError

if TYPE_CHECKING:
    from networks.network import Network
    from pnode.data import BatchSource

HERE = "here"


class NotFinite(DCNRError):
    """A loss or gradient stopped being a number; the step was not applied."""

    def __init__(self, vnode: str, step: int, loss: float) -> None:
        super().__init__(
            f"step {step} was not applied: '{vnode or 'unknown'}' gave a value that is not finite (loss {loss:g})",
            hint="lower the learning rate, clip, or look at the data of that step",
        )
        self.vnode, self.step, self.loss = vnode, step, loss


@dataclass(frozen=True, slots=True)
class Step:
    """One applied step. `step` counts from 1; `loss` is the mean per target; `gradient_norm` is before clipping."""

    step: int
    loss: float
    count: int
    gradient_norm: float
    lr: float
    seconds: float
    samples: int


def clip_scale(norms: Mapping[int, float], count: int, clip: float | None) -> tuple[float, float]:
    """(scale for `update`, norm of the mean gradient) from squared norms by parameter index.

    As torch's clip_grad_norm_: max_norm / (norm + 1e-6), at most 1. The squares are added in network order.
    """
    total = 0.0
    for index in sorted(norms):
        total += norms[index]
    norm = math.sqrt(total) / count
    coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return coefficient / count, norm


class Reference:
    """One process that trains the whole network; a step at a time."""

    def __init__(
        self,
        network: Network,
        source: BatchSource | None,
        *,
        seed: int | None = None,
        device: torch.device | None = None,
        trace: bool = False,
        groups: Sequence[CodedGroup] = (),
    ) -> None:
        seed = network.recipe.seed if seed is None else seed
        self.network = network
        nodes = [node.id for node in network.graph.nodes]
        self.vnodes = VNodes(network, nodes, device=device or torch.device("cpu"), seed=seed, trace=trace)
        plan = cut_stages(network.graph, dict.fromkeys(nodes, HERE), groups)
        self.executor = StageExecutor(self.vnodes, plan, 0, data=source, recipe=network.recipe)

    def step(self, step: int) -> Step:
        """Train step `step` (0 is the first). Raises NotFinite, with the step not applied."""
        recipe, began = self.network.recipe, time.perf_counter()
        loss, count = 0.0, 0
        for microbatch in range(recipe.microbatches):
            done = self.executor.forward(step, microbatch, {})
            if done.loss is None or done.count is None:
                raise MisuseError(f"network '{self.network.graph.name}' has no loss to train on")
            self.executor.backward(step, microbatch, {})
            loss += float(done.loss)
            count += done.count
        summary = self.vnodes.report()
        if count == 0:
            self.vnodes.discard()
            raise MisuseError(f"step {step + 1} has no target that counts")
        scale, norm = clip_scale(dict(summary.norms), count, recipe.optimizer.clip)
        if not summary.finite or not math.isfinite(loss):
            self.vnodes.discard()
            raise NotFinite(summary.culprit or str(self.network.graph.loss or ""), step + 1, loss / count)
        self.vnodes.update(step, scale, count)
        seconds = time.perf_counter() - began
        return Step(step + 1, loss / count, count, norm, lr_at(recipe, step), seconds, recipe.batch)

    def state(self) -> dict[NodeId, dict[str, Tensor]]:
        """The state of every VNode that has one, as a checkpoint holds it."""
        states = {node: self.vnodes.state(node) for node in self.vnodes.modules}
        return {node: state for node, state in states.items() if state}

    def load_state(self, states: Mapping[NodeId, Mapping[str, Tensor]]) -> None:
        """Replace the state of every VNode. Raises pnode.vnodes.StateError."""
        for node in self.vnodes.modules:
            self.vnodes.load_state(node, states.get(node, {}))

    def infer(self, inputs: Mapping[str, Tensor], outputs: set[str]) -> tuple[dict[str, Tensor], int | None]:
        """Network outputs in evaluation mode, and the number of targets if the loss is asked for."""
        _, made, count = self.executor.infer({}, inputs, outputs)
        return made, count


def train(
    network: Network,
    source: BatchSource,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: torch.device | None = None,
    threads: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    trace: Callable[[int, VNodes], None] | None = None,
    start_step: int = 0,
    start: Mapping[NodeId, Mapping[str, Tensor]] | None = None,
    groups: Sequence[CodedGroup] = (),
) -> Reference:
    """Train from `start_step` up to `steps` (the recipe's unless given) and return the trained network.

    `groups`: edges that are rounded as if they were coded.
    `trace(step, vnodes)` is called after each step (1 is the first) with gradients kept. Raises NotFinite.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    reference = Reference(network, source, seed=seed, device=device, trace=trace is not None, groups=groups)
    if start is not None:
        reference.load_state(start)
    for step in range(start_step, network.recipe.steps if steps is None else steps):
        done = reference.step(step)
        if on_step is not None:
            on_step(done)
        if trace is not None:
            trace(done.step, reference.vnodes)
    return reference
