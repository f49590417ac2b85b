"""Runs one stage: forward and backward of a microbatch, and inference, on the VNodes of this process.

The stage is one autograd graph, cut only at its borders. Between F(step, m) and B(step, m) the graph of the microbatch
is kept ("stash"), or only its inputs if the recipe says `recompute`. Everything is deterministic in (seed, replica,
step, microbatch): masks come from own generators, a recomputed forward gives the same bits and leaves buffers alone.

Watching for values that are not finite costs one sum per received gradient: only when something is wrong is the
microbatch computed again, node by node, to name the VNode where it began.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from networks.graph import NodeId
from networks.recipe import Recipe
from networks.stages import StagePlan
from networks.types import REGISTRY
from pnode.forks import received as receive
from pnode.forks import tidy
from pnode.kvcache import KVCache
from pnode.liveness import counting_node, needed_nodes
from pnode.program import Op, Program, Slots, compile_stage
from pnode.vnodes import VNodes
from wire.errors import MisuseError

if TYPE_CHECKING:
    from pnode.data import BatchSource

MEASURE_EVERY = 25
"""Steps between two measurements of the time that each VNode takes."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What F gives: tensors by channel; where the loss is here, its sum over `count` targets."""

    sends: dict[int, Tensor]
    loss: Tensor | None
    count: int | None


@dataclass(slots=True)
class _Stash:
    """One microbatch between F and B. `slots` is None if B computes it again from `arrived` and `inputs`."""

    slots: Slots | None
    arrived: dict[int, Tensor]
    inputs: dict[str, Tensor]
    loss: Tensor | None
    clock: list[tuple[NodeId, float]] | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """What a stage does to give certain outputs: calls, slots that must be filled before (and by what), results."""

    ops: list[Op]
    reads: list[tuple[int, str]]
    inputs: set[str]
    channels: set[int]
    sends: list[tuple[int, int]]
    made: list[tuple[str, int]]


class StageExecutor:
    """One stage of one session; see the module's docstring. Only the compute thread calls it."""

    def __init__(
        self, vnodes: VNodes, plan: StagePlan, stage: int, *, data: BatchSource | None, recipe: Recipe
    ) -> None:
        self.vnodes, self.stage, self.data, self.recipe = vnodes, stage, data, recipe
        self.graph, self.device, self.context = vnodes.graph, vnodes.device, vnodes.context
        self.live = vnodes.liveness
        self.program: Program = compile_stage(self.graph, plan, stage, vnodes.modules, self.live)
        members = set(plan.stages[stage].nodes)
        self._channels = {channel.index: channel for channel in (*plan.ins(stage), *plan.outs(stage))}
        loss = self.graph.loss
        self._loss_slot: int | None = None
        if loss is not None and loss in members:
            self._loss_slot = next(slot for port, slot in self.program.ports.items() if port.node == loss)
        self._counting = counting_node(self.graph) if self._loss_slot is not None else None
        self._targets = self._find_targets(members)
        self._runs_backward = bool(members & self.live.trainable) or any(
            leave.leaves for leave in self.program.arrivals
        )
        self._stash: dict[tuple[int, int], _Stash] = {}
        self._requests: dict[frozenset[str], _Request] = {}
        self._times: dict[NodeId, list[float]] = {}

    # ------------------------------------------------------------ what is known at deploy

    def needs_gradient(self, channel: int) -> bool:
        """Whether a gradient comes back on this channel (one that starts or ends here)."""
        return bool(self.live.edges(self._channels[channel].edges))

    @property
    def stash_count(self) -> int:
        """Microbatches between F and B."""
        return len(self._stash)

    def times(self) -> dict[NodeId, tuple[float, float]]:
        """Seconds per microbatch in forward and backward of each VNode, when last measured."""
        return {node: (pair[0], pair[1]) for node, pair in self._times.items()}

    # ------------------------------------------------------------ training

    def forward(self, step: int, microbatch: int, received: Mapping[int, Tensor]) -> Forwarded:
        """F(step, microbatch): `received` holds the tensor of every channel that ends here."""
        if (step, microbatch) in self._stash:
            raise MisuseError(f"F({step}, {microbatch}) of stage {self.stage} ran already")
        inputs = self._fetch(step, microbatch)
        arrived = {}
        for arrival in self.program.arrivals:
            index = arrival.channel.index
            if index not in received:
                raise MisuseError(f"F({step}, {microbatch}) of stage {self.stage}: nothing came on channel {index}")
            arrived[index] = receive(received[index], self.device)
        self._enter(step, microbatch, update_buffers=True)
        slots = self._prepare(arrived, inputs)
        stash = _Stash(slots, arrived, inputs, None)
        if microbatch == 0 and step % MEASURE_EVERY == 1 and not self.recipe.recompute:
            stash.clock = []
            self._run_measured(slots, stash.clock)
        else:
            with self._precision():
                self.program.run(slots, self.program.fused)
        sends = {leave.channel.index: slots[leave.plain].detach() for leave in self.program.departures}
        loss = count = None
        if self._loss_slot is not None:
            stash.loss = slots[self._loss_slot].detach()
            loss, count = stash.loss, self._count(slots, inputs)
        if self.recipe.recompute:
            stash.slots = None
        if self._runs_backward:
            self._stash[step, microbatch] = stash
        return Forwarded(sends, loss, count)

    def backward(
        self, step: int, microbatch: int, gradients: Mapping[int, Sequence[Tensor]]
    ) -> dict[int, list[Tensor]]:
        """B(step, microbatch): gradients of the channels that start here -> gradients of those that end here.

        One tensor per channel if it sums its edges, else one per live edge in order; none where no gradient flows.
        """
        if not self._runs_backward:
            return {arrival.channel.index: [] for arrival in self.program.arrivals}
        stash = self._stash.pop((step, microbatch), None)
        if stash is None:
            raise MisuseError(f"B({step}, {microbatch}) of stage {self.stage} without its F")
        roots: list[int] = []
        incoming: list[Tensor] = []
        for leave in self.program.departures:
            came = gradients.get(leave.channel.index, ())
            if len(came) != len(leave.roots):
                raise MisuseError(
                    f"B({step}, {microbatch}) of stage {self.stage}: expected {len(leave.roots)} gradients on channel "
                    f"{leave.channel.index}, got {len(came)}"
                )
            roots.extend(leave.roots)
            incoming.extend(receive(gradient, self.device) for gradient in came)
        self._watch(step, microbatch, stash, incoming)
        slots = stash.slots
        if slots is None:
            self._enter(step, microbatch, update_buffers=False)
            slots = self._prepare(stash.arrived, stash.inputs)
            with self._precision():
                self.program.run(slots, self.program.fused)
        self._backward(slots, roots, incoming)
        if stash.clock is not None:
            self._read_clock(stash.clock)
        return {arrival.channel.index: self._harvest(arrival.leaves, slots) for arrival in self.program.arrivals}

    def drop_stash(self) -> None:
        """Forget every microbatch between F and B."""
        self._stash.clear()

    def _backward(self, slots: Slots, roots: Sequence[int], incoming: Sequence[Tensor]) -> None:
        tensors: list[Tensor] = [slots[slot] for slot in roots]
        grads: list[Tensor | None] = list(incoming)
        if self._loss_slot is not None and slots[self._loss_slot].requires_grad:
            tensors.append(slots[self._loss_slot])
            grads.append(None)
        if tensors:
            torch.autograd.backward(tensors, grads)

    def _harvest(self, leaves: Sequence[int], slots: Slots) -> list[Tensor]:
        found: list[Tensor] = []
        for leaf in leaves:
            gradient = slots[leaf].grad
            found.append(torch.zeros_like(slots[leaf]).detach() if gradient is None else tidy(gradient))
        return found

    def _enter(self, step: int, microbatch: int, *, update_buffers: bool) -> None:
        context = self.context
        context.training, context.step, context.microbatch = True, step, microbatch
        context.update_buffers, context.position, context.cache = update_buffers, 0, None

    def _precision(self) -> AbstractContextManager[Any]:
        if self.recipe.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _fetch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        wanted = [*self.program.inputs]
        if isinstance(self._targets, str) and self._targets not in wanted:
            wanted.append(self._targets)
        if not wanted:
            return {}
        if self.data is None:
            raise MisuseError(f"stage {self.stage} reads {wanted}, but this session has no data")
        batch = self.data.batch("train", step, microbatch, self.context.replica)
        missing = [name for name in wanted if name not in batch]
        if missing:
            raise MisuseError(f"the data have no {missing}, which the network reads; they have {sorted(batch)}")
        return {name: batch[name].to(self.device) for name in wanted}

    def _prepare(self, arrived: Mapping[int, Tensor], inputs: Mapping[str, Tensor]) -> Slots:
        slots: Slots = [None] * self.program.size
        for name, slot in self.program.inputs.items():
            slots[slot] = inputs[name]
        for arrival in self.program.arrivals:
            value = arrived[arrival.channel.index]
            slots[arrival.plain] = value
            for leaf in arrival.leaves:
                slots[leaf] = value.detach().requires_grad_()
        return slots

    # ------------------------------------------------------------ counting targets

    def _find_targets(self, members: set[NodeId]) -> int | str | None:
        """Where the targets are that make the count: a slot here, or an input of the network to be fetched."""
        if self._counting is None:
            return None
        edge = next(edge for edge in self.graph.in_edges()[self._counting] if edge.dst.port == "targets")
        if self._counting in members:
            return self.program.reads[edge.index]
        if edge.src.node in self.graph.inputs:
            return str(edge.src.node)
        raise MisuseError(
            f"the loss '{self.graph.loss}' can't count the targets of '{self._counting}' on another PNode",
            hint="place both on one PNode",
        )

    def _count(self, slots: Slots, inputs: Mapping[str, Tensor]) -> int:
        if self._counting is None or self._targets is None:
            return 1
        node = self.graph.node(self._counting)
        targets = inputs[self._targets] if isinstance(self._targets, str) else slots[self._targets]
        return REGISTRY[node.type].counts([targets, targets], node.params)

    # ------------------------------------------------------------ inference

    def infer(
        self,
        received: Mapping[int, Tensor],
        inputs: Mapping[str, Tensor],
        outputs: set[str],
        cache: KVCache | None = None,
        position: int = 0,
    ) -> tuple[dict[int, Tensor], dict[str, Tensor], int | None]:
        """One forward request in evaluation mode, without gradients.

        Returns the tensors to send by channel, the network outputs of `outputs` that are made here, and the number of
        targets if the loss is one of them. Nodes that no wanted output needs do not run.
        """
        request = self._request(outputs)
        slots: Slots = [None] * self.program.size
        for name, slot in self.program.inputs.items():
            if name in inputs:
                slots[slot] = inputs[name].to(self.device)
        for arrival in self.program.arrivals:
            index = arrival.channel.index
            if index in received:
                value = receive(received[index], self.device)
                for slot in (arrival.plain, *arrival.leaves):
                    slots[slot] = value
        for slot, what in request.reads:
            if slots[slot] is None:
                raise MisuseError(f"stage {self.stage} needs {what}, which did not come")
        context = self.context
        context.training, context.position, context.cache = False, position, cache
        try:
            with torch.no_grad(), self._precision():
                self.program.run(slots, request.ops)
        finally:
            context.training, context.position, context.cache = True, 0, None
        sends = {channel: slots[slot] for channel, slot in request.sends}
        made = {name: slots[slot] for name, slot in request.made}
        count = None
        if self._loss_slot is not None and slots[self._loss_slot] is not None:
            count = self._count(slots, inputs)
        return sends, made, count

    def infer_channels(self, outputs: set[str]) -> set[int]:
        """Channels (that start or end here) on which a request for these outputs sends a tensor."""
        return self._request(outputs).channels

    def infer_inputs(self, outputs: set[str]) -> set[str]:
        """Network inputs that this stage reads to give these outputs."""
        return self._request(outputs).inputs

    def _request(self, outputs: set[str]) -> _Request:
        key = frozenset(outputs)
        if key not in self._requests:
            unknown = sorted(key - self.graph.outputs.keys())
            if unknown:
                raise MisuseError(f"the network has no output {unknown}; it has {sorted(self.graph.outputs)}")
            self._requests[key] = self._plan_request(key)
        return self._requests[key]

    def _plan_request(self, outputs: frozenset[str]) -> _Request:
        program, needed = self.program, needed_nodes(self.graph, outputs)
        ops = [op for op in program.ops if op.node in needed]
        used = {slot for op in ops for slot in op.ins}
        given = [(slot, f"the input '{name}'") for name, slot in program.inputs.items()]
        for arrival in program.arrivals:
            what = f"'{arrival.channel.port}' on channel {arrival.channel.index}"
            given += [(slot, what) for slot in (arrival.plain, *arrival.leaves)]
        channels = {
            index for index, channel in self._channels.items() if any(edge.dst.node in needed for edge in channel.edges)
        }
        leaving = [(leave.channel.index, leave.plain) for leave in program.departures]
        ports = {name: self.graph.outputs[name] for name in sorted(outputs)}
        return _Request(
            ops=ops,
            reads=[(slot, what) for slot, what in given if slot in used],
            inputs={name for name, slot in program.inputs.items() if slot in used},
            channels=channels,
            sends=[(channel, slot) for channel, slot in leaving if channel in channels],
            made=[(name, program.ports[port]) for name, port in ports.items() if port in program.ports],
        )

    # ------------------------------------------------------------ values that are not finite

    def _watch(self, step: int, microbatch: int, stash: _Stash, incoming: Sequence[Tensor]) -> None:
        watch = self.vnodes.watch
        bad = bool(incoming) and not bool(torch.isfinite(sum(gradient.sum() for gradient in incoming)))  # type: ignore[arg-type]
        if bad:
            watch.incoming = True
        if bad or (stash.loss is not None and not bool(torch.isfinite(stash.loss))):
            watch.seen = True
            if watch.culprit is None:
                watch.culprit = self._find_culprit(step, microbatch, stash)

    def _find_culprit(self, step: int, microbatch: int, stash: _Stash) -> NodeId | None:
        """The first VNode of this stage that makes a value that is not finite out of finite ones."""
        self._enter(step, microbatch, update_buffers=False)
        with torch.no_grad(), self._precision():
            slots = self._prepare(stash.arrived, stash.inputs)
            for op in self.program.ops:
                self.program.run(slots, [op])
                if not op.between and not all(_finite(slots[slot]) for slot in op.outs):
                    return op.node if all(_finite(slots[slot]) for slot in op.ins) else None
        return None

    # ------------------------------------------------------------ time per VNode

    def _run_measured(self, slots: Slots, clock: list[tuple[NodeId, float]]) -> None:
        with self._precision():
            for op in self.program.ops:
                start = time.perf_counter()
                self.program.run(slots, [op])
                took = time.perf_counter() - start
                if op.between:
                    continue
                self._times[op.node] = [took, 0.0]
                for slot in op.outs:
                    if slots[slot].requires_grad:
                        slots[slot].register_hook(_mark(clock, op.node))

    def _read_clock(self, clock: list[tuple[NodeId, float]]) -> None:
        """A node's backward lasts from when its output's gradient is there to when the next one is."""
        end = time.perf_counter()
        for (node, start), (_, stop) in zip(clock, [*clock[1:], (NodeId(""), end)], strict=True):
            self._times[node][1] += stop - start
        clock.clear()


def _mark(clock: list[tuple[NodeId, float]], node: NodeId) -> Any:
    def hook(gradient: Tensor) -> None:
        clock.append((node, time.perf_counter()))

    return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
