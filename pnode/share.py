"""One PNode's share of one session: everything that its core has to know, worked out once from graph and placement.

Pure; every member derives its share from the same graph and placement, so all agree on windows, on who reports to whom
and on which hop is answered by what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from networks.codecs import CodedGroup, codec_text
from networks.graph import DTYPE_BYTES, Graph, NodeId, TensorSpec
from networks.stages import Channel, StagePlan, cut_stages
from pnode.flow import GradientFlow, gradient_flow
from pnode.schedule import Schedule, make_schedules, window
from wire.errors import MisuseError


@dataclass(frozen=True, slots=True)
class Share:
    """See the module. `loss_pnode` is "" where the network has no loss and so can't train."""

    session: str
    epoch: int
    replica: int
    pnode: str
    plan: StagePlan
    flow: GradientFlow
    schedules: dict[int, Schedule]  # of this PNode's stages
    windows: dict[int, int]  # of all stages
    microbatches: int
    steps: int
    start_step: int
    checkpoint_every: int
    members: tuple[str, ...]  # PNodes that hold a stage, in order of their first stage
    loss_pnode: str
    loss_vnode: str
    loss_stage: int
    borrowed: dict[NodeId, str]  # user of a tie here whose owner is elsewhere -> the owner's PNode
    owner_of: dict[NodeId, NodeId]  # user -> owner, for `borrowed`
    lent: dict[NodeId, tuple[tuple[NodeId, str], ...]]  # owner here -> its users elsewhere (user, PNode), in order
    order: dict[str, int]  # VNode -> place in network order
    clip: float | None = None

    @property
    def stages(self) -> list[int]:
        """This PNode's stages, ascending."""
        return sorted(self.schedules)

    @property
    def nodes(self) -> list[NodeId]:
        """This PNode's VNodes in network order within each stage."""
        return [node for stage in self.stages for node in self.plan.stages[stage].nodes]

    def pnode_of(self, node: NodeId) -> str:
        """The PNode of any VNode of the session."""
        return self.plan.stages[self.plan.stage_of[node]].pnode


def make_share(
    graph: Graph,
    placement: Mapping[NodeId, str],
    pnode: str,
    *,
    live: AbstractSet[int],
    trainable: AbstractSet[NodeId],
    session: str,
    epoch: int,
    microbatches: int,
    steps: int,
    replica: int = 0,
    start_step: int = 0,
    checkpoint_every: int = 0,
    clip: float | None = None,
    groups: Sequence[CodedGroup] = (),
) -> Share:
    """Work out the share of `pnode`; `live` and `trainable` as `pnode.liveness` finds them.

    Raises `MisuseError` if it holds nothing of this placement.
    """
    plan = cut_stages(graph, placement, groups)
    flow = gradient_flow(plan, live, trainable)
    schedules = {i: s for i, s in make_schedules(plan, flow, microbatches).items() if plan.stages[i].pnode == pnode}
    if not schedules:
        raise MisuseError(f"the placement of {session} gives nothing to {pnode}")
    members = tuple(dict.fromkeys(stage.pnode for stage in plan.stages))
    loss_stage = plan.stage_of[graph.loss] if graph.loss is not None else -1
    loss_pnode = plan.stages[loss_stage].pnode if graph.loss is not None else ""
    borrowed: dict[NodeId, str] = {}
    owner_of: dict[NodeId, NodeId] = {}
    lent: dict[NodeId, tuple[tuple[NodeId, str], ...]] = {}
    for owner, users in graph.ties().items():
        home = placement[owner]
        if home == pnode:
            away = tuple((user, placement[user]) for user in users if placement[user] != pnode)
            if away:
                lent[owner] = away
        else:
            for user in users:
                if placement[user] == pnode:
                    borrowed[user] = home
                    owner_of[user] = owner
    return Share(
        session=session, epoch=epoch, replica=replica, pnode=pnode, plan=plan, flow=flow, schedules=schedules,
        windows={s.index: window(s.level, plan.levels, microbatches) for s in plan.stages},
        microbatches=microbatches, steps=steps, start_step=start_step, checkpoint_every=checkpoint_every,
        members=members, loss_pnode=loss_pnode, loss_vnode=graph.loss or "", loss_stage=loss_stage,
        borrowed=borrowed, owner_of=owner_of, lent=lent,
        order={node.id: node.order for node in graph.nodes}, clip=clip,
    )  # fmt: skip


def microbatch_rows(batch: int, microbatches: int) -> list[int]:
    """Rows of each microbatch, as `torch.tensor_split` cuts them: the first ones take the remainder."""
    each, rest = divmod(batch, microbatches)
    return [each + (m < rest) for m in range(microbatches)]


def hop_problem(
    graph: Graph,
    channel: Channel,
    *,
    backward: bool,
    expected: int,
    rows: int,
    metas: Sequence[tuple[str, Sequence[int], str]],
    floats: frozenset[str],
) -> str:
    """What is wrong with the tensors of a hop, against what the graph says, or "".

    `expected`: number of tensors; `metas`: dtype, shape and codec of each; `floats`: dtypes that may stand in for a
    float value (bf16 runs send both).
    """
    spec = graph.costs[channel.port.node].outputs[channel.port.port]
    if len(metas) != expected:
        return f"expected {expected} tensors, got {len(metas)}"
    shape = [rows if extent == "batch" else int(extent) for extent in spec.shape]
    for dtype, got, codec in metas:
        if codec != channel.codec:
            return f"expected it {codec_text(channel.codec)}, got it {codec_text(codec)}"
        fits = dtype == spec.dtype or (spec.dtype in floats and dtype in floats)
        if not fits or list(got) != shape:
            return f"expected {TensorSpec(spec.dtype, tuple(shape))}, got {dtype}({', '.join(map(str, got))})"
        if dtype not in DTYPE_BYTES:
            return f"unknown dtype {dtype!r}"
    return "" if not backward or spec.dtype in floats or not metas else f"{spec.dtype} carries no gradient"
