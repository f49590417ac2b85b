"""A few shipped cores joined by a pool of messages that arrive in any order; no clock, no socket, no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from networks.graph import Edge, Graph, Node, NodeCost, NodeId, PortRef, TensorSpec
from pnode.core import Core, State
from pnode.events import (
    Command,
    Compute,
    CutCommitted,
    Done,
    Event,
    Fail,
    HopArrived,
    Job,
    JobDone,
    JobKind,
    Refuse,
    ReportArrived,
    SaveCut,
    Saved,
    SendHop,
    SendReport,
    SendTieGradient,
    SendTieVersion,
    SendVerdict,
    Started,
    TellApplied,
    TellHeld,
    TellProgress,
    TieGradientArrived,
    TieVersionArrived,
    VerdictArrived,
)
from pnode.share import Share, make_share

FLOAT = TensorSpec("float32", ("batch", 4))


@dataclass(frozen=True)
class NoParams:
    frozen: bool = False


def graph_of(
    edges: list[tuple[str, str]],
    *,
    loss: str,
    trainable: set[str],
    ties: Mapping[str, str] | None = None,
    order: list[str] | None = None,
) -> Graph:
    """A graph from (source, reader) pairs over node names in topological order of their names' first use."""
    names = order or list(dict.fromkeys(name for edge in edges for name in edge))
    ties = ties or {}
    nodes = tuple(
        Node(NodeId(name), "thing", NoParams(), index, NodeId(ties[name]) if name in ties else None)  # type: ignore[arg-type]
        for index, name in enumerate(names)
    )
    costs = {
        node.id: NodeCost({"y": FLOAT}, {"weight": FLOAT} if node.id in trainable else {}, {}, 1, 2) for node in nodes
    }
    found = tuple(
        Edge(index, PortRef(NodeId(src), "y"), PortRef(NodeId(dst), str(index)))
        for index, (src, dst) in enumerate(edges)
    )
    return Graph("random", "random.yaml", nodes, found, {}, {}, NodeId(loss), costs)


def liveness_of(graph: Graph) -> tuple[set[int], set[NodeId]]:
    """Live edges and learning nodes of such a graph, where every port lets gradients through."""
    into = graph.in_edges()
    learns = {node.id for node in graph.nodes if graph.costs[node.id].parameters or node.tie}
    carries = set()
    for node in graph.nodes:
        if node.id in learns or any(edge.src.node in carries for edge in into[node.id]):
            carries.add(node.id)
    reaches = {graph.loss}
    live = set()
    for node in reversed(graph.nodes):
        for edge in into[node.id] if node.id in reaches else []:
            reaches.add(edge.src.node)
            if edge.src.node in carries:
                live.add(edge.index)
    return live, {node for node in learns if node in reaches}


def shares_of(graph: Graph, placement: Mapping[str, str], **options: object) -> dict[str, Share]:
    defaults: dict[str, object] = {"session": "s-1", "epoch": 1, "microbatches": 3, "steps": 4}
    live, trainable = liveness_of(graph)
    where = {NodeId(node): pnode for node, pnode in placement.items()}
    return {
        pnode: make_share(graph, where, pnode, live=live, trainable=trainable, **{**defaults, **options})  # type: ignore[arg-type]
        for pnode in dict.fromkeys(placement.values())
    }


@dataclass
class Cluster:
    """Cores and everything on its way between them. `pick` decides what happens next."""

    shares: dict[str, Share]
    pick: random.Random
    cores: dict[str, Core] = field(default_factory=dict)
    wire: list[tuple[str, Event]] = field(default_factory=list)
    jobs: dict[str, list[Compute]] = field(default_factory=dict)
    ran: dict[str, list[Job]] = field(default_factory=dict)
    told: list[tuple[str, Command]] = field(default_factory=list)
    finite: bool = True
    clock: float = 0.0
    commits: bool = True  # what is saved is committed at once
    limits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pnode, share in self.shares.items():
            self.cores[pnode] = Core(share, **self.limits)
            self.jobs[pnode], self.ran[pnode] = [], []

    def post(self, pnode: str, event: Event) -> None:
        """Let a core take in an event and carry out what it asks for."""
        self.clock += 1.0
        for command in self.cores[pnode].handle(event, self.clock):
            self.do(pnode, command)

    def do(self, pnode: str, command: Command) -> None:
        match command:
            case Compute():
                self.jobs[pnode].append(command)
            case SendHop(to, step, m, channel, backward, request_id, count, payload):
                hop = HopArrived(pnode, step, m, channel, backward, request_id, count, payload)
                self.wire.append((to, hop))
            case SendTieGradient(to, step, user, payload):
                self.wire.append((to, TieGradientArrived(pnode, step, user, payload)))
            case SendTieVersion(to, step, owner, payload):
                self.wire.append((to, TieVersionArrived(pnode, step, owner, payload)))
            case SendReport(to, step, norms, finite, culprit):
                self.wire.append((to, ReportArrived(pnode, step, norms, finite, culprit)))
            case SendVerdict(to, decision):
                self.wire.extend((member, VerdictArrived(pnode, decision)) for member in to)
            case SaveCut(applied, _):
                self.wire.append((pnode, Saved(applied)))
                if self.commits:
                    self.wire.append((pnode, CutCommitted(applied)))
                self.told.append((pnode, command))
            case TellProgress() | TellHeld() | TellApplied() | Fail() | Refuse():
                self.told.append((pnode, command))

    def done(self, pnode: str, compute: Compute) -> Done:
        """What the job would give; every value is a text that says where it came from."""
        share, job = self.shares[pnode], compute.job
        if job.kind is JobKind.FORWARD:
            return Done(sends={c.index: f"a{c.index}" for c in share.plan.outs(job.stage) if not c.local}, count=2)
        if job.kind is JobKind.BACKWARD:
            return Done(sends={c.index: f"g{c.index}" for c in share.plan.ins(job.stage) if not c.local}, count=2)
        if job.kind is JobKind.TIES:
            return Done(shared={str(user): f"t{user}" for user in share.borrowed})
        if job.kind is JobKind.REPORT:
            return Done(norms=((0, 4.0),), finite=self.finite, culprit="" if self.finite else "bad", loss=3.0, count=6)
        if job.kind is JobKind.UPDATE:
            return Done(shared={str(owner): f"v{owner}" for owner in share.lent})
        return Done(cut=str(job)) if job.kind is JobKind.CUT else Done()

    def tick(self) -> bool:
        """One thing happens somewhere; False if nothing can."""
        busy = [pnode for pnode, queue in self.jobs.items() if queue]
        if not busy and not self.wire:
            return False
        if self.wire and (not busy or self.pick.random() < 0.5):
            to, event = self.wire.pop(self.pick.randrange(len(self.wire)))
            self.post(to, event)
            return True
        pnode = self.pick.choice(busy)
        compute = self.jobs[pnode].pop(0)
        self.ran[pnode].append(compute.job)
        self.post(pnode, JobDone(compute.job, self.done(pnode, compute)))
        return True

    def start(self, until: int) -> None:
        for pnode in self.cores:
            self.wire.append((pnode, Started(until)))

    def run(self, limit: int = 1_000_000) -> None:
        for _ in range(limit):
            if not self.tick():
                return
        raise AssertionError("still running")

    def of(self, kind: type) -> list[tuple[str, Command]]:
        return [(pnode, command) for pnode, command in self.told if isinstance(command, kind)]

    def stuck(self) -> str:
        return "\n".join(f"{p}: {core.state} {core.waiting()}" for p, core in self.cores.items())


__all__ = ["FLOAT", "Cluster", "State", "graph_of", "replace", "shares_of"]
