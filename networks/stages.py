"""Cutting a placed graph into stages and channels; pure, without torch.

level(v) = max over predecessors u of level(u) + [u is on another PNode]; a stage is the VNodes of one PNode with one
level, so the graph of stages has no cycle whatever the placement. A *channel* carries one value (an output port) from
the stage that makes it to one other stage that reads it: the activation travels once per channel and microbatch; its
gradient comes back on the same channel, summed over the channel's edges where that keeps the order of the whole sum
(the edges are a prefix of the value's readers), otherwise one tensor per edge.

Coded groups (networks.codecs) leave on channels of their own. A channel has the group's codec if it carries the whole
group to another PNode; a group that is split, or stays on its PNode, is rounded by the stage that makes the value, and
its channels carry the rounded value as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from networks.codecs import NONE, CodedGroup, group_of, wish_of
from networks.graph import Edge, Graph, NodeId, PortRef


@dataclass(frozen=True, slots=True)
class Channel:
    """One value from stage `src` to stage `dst`; `presum` says that its gradient comes back as one tensor."""

    index: int
    port: PortRef
    src: int
    dst: int
    edges: tuple[Edge, ...]
    presum: bool
    local: bool  # both stages are on one PNode: no hop, handed over in memory
    codec: str = ""  # both directions travel coded


@dataclass(frozen=True, slots=True)
class Stage:
    """The VNodes of one PNode with one level, in topological order."""

    index: int
    pnode: str
    level: int
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """All stages (ascending by level, then by first node), channels, and where each node went."""

    stages: tuple[Stage, ...]
    channels: tuple[Channel, ...]
    stage_of: dict[NodeId, int]
    levels: int
    groups: tuple[CodedGroup, ...] = ()

    def ins(self, stage: int) -> list[Channel]:
        """Channels that end at this stage."""
        return [channel for channel in self.channels if channel.dst == stage]

    def outs(self, stage: int) -> list[Channel]:
        """Channels that start at this stage."""
        return [channel for channel in self.channels if channel.src == stage]


def cut_stages(graph: Graph, placement: Mapping[NodeId, str], groups: Sequence[CodedGroup] = ()) -> StagePlan:
    """Stages and channels of `graph` when each node runs on `placement[node.id]`, with these coded groups.

    Raises KeyError naming a node that has no place. O(nodes + edges).
    """
    level: dict[NodeId, int] = {}
    into = graph.in_edges()
    for node in graph.nodes:
        here = placement[node.id]
        level[node.id] = max(
            (
                level[edge.src.node] + (placement[edge.src.node] != here)
                for edge in into[node.id]
                if edge.src.node not in graph.inputs
            ),
            default=0,
        )
    members: dict[tuple[int, str], list[NodeId]] = {}
    for node in graph.nodes:
        members.setdefault((level[node.id], placement[node.id]), []).append(node.id)
    order = {node.id: node.order for node in graph.nodes}
    keys = sorted(members, key=lambda key: (key[0], order[members[key][0]]))
    stages = tuple(Stage(index, key[1], key[0], tuple(members[key])) for index, key in enumerate(keys))
    stage_of = {node: stage.index for stage in stages for node in stage.nodes}
    channels: list[Channel] = []
    coded = group_of(groups)
    for port, edges in graph.out_edges().items():
        if port.node in graph.inputs:
            continue
        source = stage_of[port.node]
        readers: dict[tuple[CodedGroup | None, int], list[Edge]] = {}
        for edge in edges:
            readers.setdefault((coded.get(edge.index), stage_of[edge.dst.node]), []).append(edge)
        for (group, target), mine in readers.items():
            if target != source:
                whole = edges if group is None else [edge for edge in edges if coded.get(edge.index) is group]
                local = stages[target].pnode == stages[source].pnode
                codec = group.codec if group is not None and not local and len(mine) == len(whole) else ""
                presum = mine == whole[: len(mine)]
                channels.append(Channel(len(channels), port, source, target, tuple(mine), presum, local, codec))
    levels = 1 + max((stage.level for stage in stages), default=0)
    return StagePlan(stages, tuple(channels), stage_of, levels, tuple(groups))


def wished_groups(graph: Graph, placement: Mapping[NodeId, str], default: str) -> list[tuple[Channel, CodedGroup]]:
    """What of a placement's crossings is to be coded: by channel and by what its edges ask for, `auto` still open.

    `default`: the recipe's codec. The channels are those of the placement without any group.
    """
    found: list[tuple[Channel, CodedGroup]] = []
    for channel in cut_stages(graph, placement).channels:
        if channel.local:
            continue
        by_wish: dict[str, list[int]] = {}
        for edge in channel.edges:
            by_wish.setdefault(wish_of(graph, edge.index, default), []).append(edge.index)
        found += [(channel, CodedGroup(wish, tuple(edges))) for wish, edges in by_wish.items() if wish != NONE]
    return found
