"""The torch side of one session on one PNode: carries out the core's jobs. Lives in the compute thread.

Everything that stays between two jobs is here: the VNodes, the stages' executors, values on their way between stages
of this PNode, and the losses of the running step. Payloads for the wire are packed and coded here, off the event loop.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from networks.graph import NodeId
from networks.stages import Channel
from pnode.events import Done, Job, JobKind
from pnode.executor import StageExecutor
from pnode.kvcache import KVCaches
from pnode.share import Share
from pnode.tensors import Packed, Received, pack, unpack
from pnode.vnodes import VNodes
from storage.tensors import encode_tensors
from wire.errors import MisuseError, RemoteError
from wire.messages import VNodeReport

if TYPE_CHECKING:
    from networks.network import Network
    from pnode.data import BatchSource


TRACE_WAIT_S = 120.0


def ids_digest(ids: Sequence[int]) -> str:
    """Digest of a step's sample ids: SHA-256 over them as little-endian 64-bit numbers."""
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in ids)
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of all VNodes here after `applied` steps; copies."""

    applied: int
    states: dict[str, dict[str, Tensor]]


@dataclass(slots=True)
class Work:
    """See the module. Built and used in the compute thread only."""

    network: Network
    share: Share
    vnodes: VNodes
    executors: dict[int, StageExecutor]
    source: BatchSource | None
    device: torch.device
    trace: bool = False
    local: dict[tuple[str, int, int, int], list[Tensor]] = field(default_factory=dict)
    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    applied: int = 0
    caches: KVCaches = field(default_factory=lambda: KVCaches(1 << 30, 600.0))
    trace_gate: threading.BoundedSemaphore | None = None

    def run(self, job: Job, inputs: Mapping[int | str, object]) -> Done:
        """Carry out one job. Raises whatever the stage raises; the driver tells which job it was."""
        match job.kind:
            case JobKind.FORWARD:
                return self._forward(job, inputs)
            case JobKind.BACKWARD:
                return self._backward(job, inputs)
            case JobKind.TIES:
                found = {user: self.vnodes.tie_gradient(user) for user in self.share.borrowed}
                return Done(shared={str(user): pack([] if g is None else [g]) for user, g in found.items()})
            case JobKind.REPORT:
                return self._report(job, inputs)
            case JobKind.UPDATE:
                return self._update(job)
            case JobKind.DISCARD:
                self.vnodes.discard()
                self.losses.clear()
                return Done()
            case JobKind.VERSION:
                (tensor,) = self._unpack(inputs[job.vnode])
                self.vnodes.set_tie_version(job.vnode, tensor)
                return Done()
            case JobKind.CUT:
                return Done(cut=self.cut(job.step + 1))

    def cut(self, applied: int) -> Cut:
        """Copies of the state of every VNode here that has any."""
        states = {str(node): self.vnodes.state(node) for node in self.share.nodes}
        return Cut(applied, {node: state for node, state in states.items() if state})

    def state_bytes(self) -> int:
        """Bytes of one cut."""
        return sum(self.vnodes.state_bytes(node) for node in self.share.nodes)

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a checkpoint: the VNodes here and the borrowed parameters of owners elsewhere."""
        borrowed = {str(owner) for owner in self.share.owner_of.values()}
        for node, state in states.items():
            if node in self.share.nodes:
                self.vnodes.load_state(node, state)
            elif node in borrowed:
                self.vnodes.set_tie_version(node, state[f"param.{tie_parameter(self.network, node)}"])

    # ------------------------------------------------------------------------------------ passes

    def _unpack(self, payload: object, codec: str = "") -> list[Tensor]:
        if not isinstance(payload, Received):
            raise MisuseError(f"expected received tensors, got {type(payload).__name__}")
        return unpack(payload, self.device, codec)

    def _forward(self, job: Job, inputs: Mapping[int | str, object]) -> Done:
        received: dict[int, Tensor] = {}
        for channel in self.share.plan.ins(job.stage):
            if channel.local:
                (received[channel.index],) = self.local.pop(("F", channel.index, job.step, job.microbatch))
            else:
                (received[channel.index],) = self._unpack(inputs[channel.index], channel.codec)
        result = self.executors[job.stage].forward(job.step, job.microbatch, received)
        if result.loss is not None:
            self.losses.append((result.loss.detach(), result.count or 0))
        sends = self._sort(job, "F", self.share.plan.outs(job.stage), {c: [t] for c, t in result.sends.items()})
        return Done(sends=sends, count=result.count or 0)

    def _backward(self, job: Job, inputs: Mapping[int | str, object]) -> Done:
        gradients: dict[int, list[Tensor]] = {}
        for channel in self.share.plan.outs(job.stage):
            if channel.index not in self.share.flow.channels:
                continue
            if channel.local:
                gradients[channel.index] = self.local.pop(("B", channel.index, job.step, job.microbatch))
            else:
                gradients[channel.index] = self._unpack(inputs[channel.index], channel.codec)
        result = self.executors[job.stage].backward(job.step, job.microbatch, gradients)
        ins = [c for c in self.share.plan.ins(job.stage) if c.index in self.share.flow.channels]
        sends = self._sort(job, "B", ins, result)
        return Done(sends=sends)

    def _sort(
        self, job: Job, way: str, channels: Sequence[Channel], values: Mapping[int, list[Tensor]]
    ) -> dict[int, Packed]:
        """Keep what stays on this PNode, pack what leaves it."""
        leaving: dict[int, Packed] = {}
        for channel in channels:
            tensors = [tensor.detach() for tensor in values.get(channel.index, [])]
            if channel.local:
                self.local[way, channel.index, job.step, job.microbatch] = tensors
            else:
                leaving[channel.index] = pack(tensors, channel.codec)
        return leaving

    # ------------------------------------------------------------------------------------ end of a step

    def _report(self, job: Job, inputs: Mapping[int | str, object]) -> Done:
        for user, payload in inputs.items():
            for tensor in self._unpack(payload):
                self.vnodes.add_tie_gradient(str(user), tensor)
        summary = self.vnodes.report()
        loss, count, note = 0.0, 0, ""
        if self.share.pnode == self.share.loss_pnode:
            for value, targets in self.losses:
                loss += float(value)
                count += targets
            if self.source is not None:
                note = ids_digest(self.source.sample_ids(job.step, self.share.replica))
        self.losses.clear()
        return Done(
            norms=tuple(summary.norms),
            finite=summary.finite,
            culprit=summary.culprit,
            loss=loss,
            count=count,
            note=note,
        )

    def _update(self, job: Job) -> Done:
        self.vnodes.update(job.step, job.scale, job.count)
        if self.local:
            raise MisuseError(f"values were left between stages after step {job.step + 1}: {list(self.local)[:4]}")
        self.applied = job.step + 1
        shared = {str(owner): pack([self.vnodes.tie_version(owner)]) for owner in self.share.lent}
        return Done(shared=shared, trace=self._trace() if self.trace else None)

    def _trace(self) -> dict[str, bytes]:
        """Per VNode with state: parameters after the update and the gradients that it used, as safetensors."""
        if self.trace_gate is not None and not self.trace_gate.acquire(timeout=TRACE_WAIT_S):
            raise MisuseError("the trace of earlier steps could not be written", hint="is the store reachable?")
        found: dict[str, bytes] = {}
        for node in self.share.nodes:
            tensors = {k: t for k, t in self.vnodes.state(node).items() if k.startswith(("param.", "buffer."))}
            tensors.update({f"grad.{name}": t for name, t in self.vnodes.gradients(node).items()})
            if tensors:
                found[str(node)] = encode_tensors(tensors)
        return found

    # ------------------------------------------------------------------------------------ for people and inference

    def inspect(self, applied: int, bytes_out: Mapping[str, int]) -> list[VNodeReport]:
        """What each VNode here is and does."""
        stats = self.vnodes.stats()
        times: dict[NodeId, tuple[float, float]] = {}
        for executor in self.executors.values():
            times.update(executor.times())
        found = []
        for node in self.share.nodes:
            forward_s, backward_s = times.get(node, (0.0, 0.0))
            count = sum(math.prod(shape) for shape in stats[node].parameters.values())
            found.append(
                VNodeReport(
                    str(node), self.network.graph.node(node).type, self.share.pnode, self.share.plan.stage_of[node],
                    applied, stats[node].parameters, count, stats[node].weight_norm, stats[node].gradient_norm,
                    forward_s, backward_s, bytes_out.get(str(node), 0),
                )
            )  # fmt: skip
        return found


def tie_parameter(network: Network, owner: str) -> str:
    """The name of the parameter of `owner` that others may share."""
    from networks.types import REGISTRY

    name = REGISTRY[network.graph.node(owner).type].uses_tie
    if name is None:
        raise RemoteError(f"VNode '{owner}' has no parameter that can be shared")
    return name


def build_work(
    network: Network, share: Share, *, seed: int, device: torch.device, source: BatchSource | None, trace: bool
) -> Work:
    """VNodes and executors of a share, initialised from the seed."""
    nodes: list[NodeId] = share.nodes
    vnodes = VNodes(network, nodes, device=device, seed=seed, replica=share.replica, trace=trace)
    executors = {
        stage: StageExecutor(vnodes, share.plan, stage, data=source, recipe=network.recipe) for stage in share.stages
    }
    for stage, executor in executors.items():
        for channel in [*share.plan.ins(stage), *share.plan.outs(stage)]:
            if executor.needs_gradient(channel.index) != (channel.index in share.flow.channels):
                raise MisuseError(f"channel {channel.index} ({channel.port}): schedule and stage disagree on gradients")
    return Work(network, share, vnodes, executors, source, device, trace, applied=share.start_step)
