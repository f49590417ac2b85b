"""A network cut at any placement, run in one process by hand: executors in topological order, tensors as raw bytes.

Every tensor that crosses stages is copied to an odd address, as it may come out of a frame.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor

from networks.codecs import CODECS, CodedGroup
from networks.graph import NodeId
from networks.network import Network
from networks.stages import Channel, cut_stages, wished_groups
from pnode.executor import StageExecutor
from pnode.reference import clip_scale
from pnode.tensors import Received, pack, unpack
from pnode.vnodes import GradientSummary, VNodes
from wire.coded import coded_bytes


def through_bytes(tensor: Tensor, offset: int = 4) -> Tensor:
    """The tensor as a receiver sees it: a view of raw bytes that begin at an unaligned address."""
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    raw = tensor.view(-1).view(torch.uint8)
    frame = bytearray(offset + raw.numel())
    frame[offset:] = raw.numpy().tobytes()
    return torch.frombuffer(frame, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)


def random_placement(network: Network, pnodes: int, seed: int) -> dict[NodeId, str]:
    """Each node on a random PNode; every other seed in runs, as a planner would."""
    draw = random.Random(seed)
    nodes = [node.id for node in network.graph.nodes]
    if seed % 2:
        cuts = sorted(draw.sample(range(1, len(nodes)), min(pnodes - 1, len(nodes) - 1)))
        return {node: f"p{sum(i >= cut for cut in cuts)}" for i, node in enumerate(nodes)}
    return {node: f"p{draw.randrange(pnodes)}" for node in nodes}


def random_groups(network: Network, placement: Mapping[NodeId, str], seed: int) -> tuple[CodedGroup, ...]:
    """Codecs for most of what crosses in a placement, drawn at random."""
    draw = random.Random(seed)
    found = []
    for _, group in wished_groups(network.graph, placement, "auto"):
        codec = draw.choice([*CODECS, *CODECS, ""])
        if codec:
            found.append(CodedGroup(codec, group.edges))
    return tuple(found)


def travel(tensor: Tensor, channel: Channel) -> Tensor:
    """A tensor that went along a channel: as raw bytes, or coded as the shipped code packs it."""
    if not channel.codec:
        return through_bytes(tensor)
    packed = pack([tensor], channel.codec)
    assert packed.size_bytes == coded_bytes(channel.codec, tensor.shape)
    (found,) = unpack(Received(packed.metas, packed.frames), None, channel.codec)
    return through_bytes(found)


class Cut:
    """All PNodes of a placement; `step` does what daemons and links do between them."""

    def __init__(
        self,
        network: Network,
        source: object,
        placement: Mapping[NodeId, str],
        *,
        seed: int = 0,
        trace: bool = False,
        device: torch.device | None = None,
        groups: tuple[CodedGroup, ...] = (),
    ) -> None:
        self.network, self.source = network, source
        self.plan = cut_stages(network.graph, placement, groups)
        self.placement = placement
        self.vnodes = {
            name: VNodes(
                network,
                [node for node in placement if placement[node] == name],
                device=device or torch.device("cpu"),
                seed=seed,
                trace=trace,
            )
            for name in sorted(set(placement.values()))
        }
        self.stages = [
            StageExecutor(self.vnodes[stage.pnode], self.plan, stage.index, data=source, recipe=network.recipe)  # type: ignore[arg-type]
            for stage in self.plan.stages
        ]
        self.hops = 0
        self.coded = 0

    def forward(self, step: int, microbatch: int) -> tuple[float, int]:
        """F of every stage."""
        wires: dict[int, Tensor] = {}
        loss, count = 0.0, 0
        for index, stage in enumerate(self.stages):
            arrived = {channel.index: wires[channel.index] for channel in self.plan.ins(index)}
            done = stage.forward(step, microbatch, arrived)
            for channel, tensor in done.sends.items():
                wires[channel] = travel(tensor, self.plan.channels[channel])
                self.hops += 1
                self.coded += bool(self.plan.channels[channel].codec)
            if done.loss is not None and done.count is not None:
                loss, count = float(done.loss), done.count
        return loss, count

    def backward(self, step: int, microbatch: int) -> None:
        """B of every stage."""
        wires: dict[int, list[Tensor]] = {}
        for index in reversed(range(len(self.stages))):
            came = {channel.index: wires[channel.index] for channel in self.plan.outs(index)}
            for channel, tensors in self.stages[index].backward(step, microbatch, came).items():
                assert bool(tensors) == self.stages[index].needs_gradient(channel)
                wires[channel] = [travel(tensor, self.plan.channels[channel]) for tensor in tensors]

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs of one forward request."""
        wires: dict[int, Tensor] = {}
        found: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            arrived = {channel.index: wires[channel.index] for channel in self.plan.ins(index)}
            sends, made, _ = stage.infer(arrived, inputs, set(self.network.graph.outputs))
            found |= made
            wires |= {channel: travel(tensor, self.plan.channels[channel]) for channel, tensor in sends.items()}
        return found

    def report(self) -> list[GradientSummary]:
        """Tie gradients to their owners, then everybody's report."""
        for owner, users in self.network.graph.ties().items():
            for user in users:
                if self.placement[user] != self.placement[owner]:
                    gradient = self.vnodes[self.placement[user]].tie_gradient(user)
                    if gradient is not None:
                        self.vnodes[self.placement[owner]].add_tie_gradient(user, through_bytes(gradient))
        return [vnodes.report() for vnodes in self.vnodes.values()]

    def step(self, step: int) -> tuple[float, float]:
        """One step: loss per target and gradient norm."""
        loss, count = 0.0, 0
        recipe = self.network.recipe
        for microbatch in range(recipe.microbatches):
            part, targets = self.forward(step, microbatch)
            self.backward(step, microbatch)
            loss, count = loss + part, count + targets
        norms = {index: square for report in self.report() for index, square in report.norms}
        scale, norm = clip_scale(norms, count, recipe.optimizer.clip)
        for vnodes in self.vnodes.values():
            vnodes.update(step, scale, count)
        for owner, users in self.network.graph.ties().items():
            version = self.vnodes[self.placement[owner]].tie_version(owner)
            for user in users:
                if self.placement[user] != self.placement[owner]:
                    self.vnodes[self.placement[user]].set_tie_version(owner, through_bytes(version))
        return loss / count, norm

    def state(self) -> dict[NodeId, dict[str, Tensor]]:
        """The state of every VNode that has one."""
        states = {node: self.vnodes[self.placement[node]].state(node) for node in self.placement}
        return {node: state for node, state in states.items() if state}
