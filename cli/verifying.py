"""Is a distributed run the one-process run? Real PNode processes over TCP on one side, `pnode.reference` on the other.

The reference runs in this process, with as many threads as each PNode, and leaves the tensors of each step in a
temporary folder. Then the same network runs, traced, on a private cluster, once for each placement; each step is
compared as soon as the store has it, and deleted there. With codecs each placement has a reference of its own, which
rounds on the edges that it codes. Nothing is left when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.client import Client, store_of
from cli.comparing import KINDS, Comparison, Traced
from cli.following import failure
from cli.preparing import Prepared
from cli.starting import Wish, create, put_inputs, put_network
from cli.terminal import Terminal
from wire.errors import DCNRError, UnreachableError
from wire.ids import new_request_id
from wire.messages import AskDeployment, CodedEdges, DeploymentInfo, InspectSession, SessionInfo, VNodeReport

if TYPE_CHECKING:
    from storage.store import Store

STEP_TIMEOUT_S = 120.0
"""How long no step may be reported, or a reported step's trace be missing, before the check gives up."""

_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One placement against the reference."""

    microbatches: int
    placement: str
    machines: int
    stages: int
    bytes_crossed: int
    comparison: Comparison
    first: Comparison
    wanted_exact: bool
    coded: Mapping[str, int] = field(default_factory=dict)
    """Edges that were coded, by codec."""

    @property
    def good(self) -> bool:
        """The promise holds: exactly 0, or with another split 1e-6 relative for a step from the same state."""
        return self.comparison.exact if self.wanted_exact else self.first.relative <= RELATIVE

    def record(self) -> dict[str, Any]:
        """For JSON."""
        gaps = self.comparison.gaps
        return {
            "microbatches": self.microbatches,
            "placement": self.placement,
            "pnodes": self.machines,
            "stages": self.stages,
            "bytes_crossed": self.bytes_crossed,
            "coded_edges": dict(self.coded),
            "steps": self.comparison.steps,
            "tensors": self.comparison.tensors,
            "good": self.good,
            **{f"{kind}_difference": gaps[kind].absolute for kind in KINDS},
            **{f"{kind}_where": gaps[kind].where for kind in KINDS},
            "first_step_relative": self.first.relative,
        }


RELATIVE = 1e-6


@dataclass(slots=True)
class Reference:
    """What the one-process run left: losses in memory, tensors by step in a folder."""

    folder: Path
    losses: list[float] = field(default_factory=list)

    def tensors(self, step: int) -> Traced:
        """Gradients and weights after a step (1 is the first)."""
        from storage.tensors import decode_tensors

        path = self.folder / f"{step}.safetensors"
        flat = decode_tensors(path.read_bytes(), key=str(path))
        found: dict[str, dict[str, Any]] = {}
        for name, tensor in flat.items():
            vnode, _, key = name.partition(_SEPARATOR)
            found.setdefault(vnode, {})[key] = tensor
        return found


def run_reference(
    prepared: Prepared,
    folder: Path,
    *,
    steps: int,
    threads: int,
    moved: Callable[[int], None],
    codecs: Sequence[CodedEdges] = (),
) -> Reference:
    """The one-process run, traced, with these edges rounded as if they were coded. Blocks."""
    from cli.local import batches
    from networks.codecs import CodedGroup
    from pnode.reference import Step, train
    from pnode.vnodes import VNodes
    from storage.tensors import encode_tensors

    folder.mkdir(parents=True)
    found = Reference(folder)

    def on_step(done: Step) -> None:
        found.losses.append(done.loss)
        moved(done.step)

    def trace(step: int, vnodes: VNodes) -> None:
        flat: dict[str, Any] = {}
        for node in vnodes.modules:
            tensors = {key: value for key, value in vnodes.state(node).items() if key.startswith(("param.", "buffer."))}
            tensors |= {f"grad.{name}": value for name, value in vnodes.gradients(node).items()}
            flat |= {f"{node}{_SEPARATOR}{key}": value for key, value in tensors.items()}
        (folder / f"{step}.safetensors").write_bytes(encode_tensors(flat))

    groups = [CodedGroup(coded.codec, tuple(coded.edges)) for coded in codecs]
    train(
        prepared.network, batches(prepared), steps=steps, threads=threads, on_step=on_step, trace=trace, groups=groups
    )
    return found


def placements(prepared: Prepared, kind: str, pnodes: int, seed: int = 0) -> list[tuple[str, dict[str, str]]]:
    """Named placements: "planner" is one empty placement, "random:20" twenty that use every PNode."""
    if kind == "planner":
        return [("planner", {})]
    number = int(kind.partition(":")[2])
    nodes = [str(node.id) for node in prepared.network.graph.nodes]
    machines = [f"p{index + 1}" for index in range(min(pnodes, len(nodes)))]
    found = []
    for index in range(number):
        draw = random.Random(f"{seed}/{prepared.network.id}/{index}")
        chosen = machines + [draw.choice(machines) for _ in range(len(nodes) - len(machines))]
        draw.shuffle(chosen)
        found.append((f"random {index + 1}", dict(zip(nodes, chosen, strict=True))))
    return found


async def check(
    client: Client,
    store_url: str,
    prepared: Prepared,
    reference: Reference | Callable[[Sequence[CodedEdges]], Reference],
    name: str,
    placement: Mapping[str, str],
    *,
    pnodes: int,
    steps: int,
    exact: bool,
    terminal: Terminal,
    moved: Callable[[int], None],
) -> Verdict:
    """Run one placement, compare every step, remove the session again.

    `reference`: the one-process run, or what makes it once the edges that the session codes are known.

    Raises: `DCNRError` when the run fails, or no hop crossed a process although several PNodes compute.
    """
    wish = Wish(prepared.network.id, until=steps, pnodes=pnodes, placement=dict(placement), trace=True)
    info = await create(client, wish, prepared, terminal)
    codecs: list[CodedEdges] = []
    if not isinstance(reference, Reference):
        codecs = await codecs_of(client, info)
        reference = await asyncio.to_thread(reference, codecs)
    whole, first = Comparison(), Comparison()
    async with store_of(store_url) as store:
        async for step, loss in losses(client, info):
            traced = await read_trace(store, info, step, reference.tensors(step))
            for comparison in (whole, first) if step == 1 else (whole,):
                comparison.loss(step, loss, reference.losses[step - 1])
                comparison.tensors_of(step, traced, reference.tensors(step))
            moved(step)
            if step >= steps:
                break
    await rest(client, info)
    reports = await client.ask(InspectSession(str(new_request_id()), info.session), list[VNodeReport])
    crossed = sum(report.bytes_out for report in reports)
    machines = len({report.pnode for report in reports})
    stages = len({report.stage for report in reports})
    await client.act(info.session, "remove")
    if pnodes > 1 and machines > 1 and not crossed:
        raise DCNRError(f"{name}: no hop crossed a process, so nothing was checked")
    return Verdict(
        prepared.network.recipe.microbatches, name, machines, stages, crossed, whole, first, exact,
        {coded.codec: sum(len(one.edges) for one in codecs if one.codec == coded.codec) for coded in codecs},
    )  # fmt: skip


async def codecs_of(client: Client, info: SessionInfo) -> list[CodedEdges]:
    """The edges that a session codes, once it is placed. Raises `DCNRError` when it fails, or is not placed in time."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    after = 0
    while not info.deployed:
        watched = await client.watch(info.session, after, 1.0)
        info = watched.session
        after = watched.events[-1].seq if watched.events else after
        problem = failure(info)
        if problem is not None:
            raise problem
        if time.monotonic() > deadline:
            raise UnreachableError(f"{info.session} has not been placed for {STEP_TIMEOUT_S:.0f} s")
    found = await client.ask(AskDeployment(str(new_request_id()), info.session), DeploymentInfo)
    return found.codecs


async def losses(client: Client, info: SessionInfo) -> AsyncIterator[tuple[int, float]]:
    """Step and loss of each step of a run as they come. Raises `DCNRError` when it fails or stands still."""
    after, heard = 0, time.monotonic()
    while True:
        watched = await client.watch(info.session, after, 1.0)
        for event in watched.events:
            after = event.seq
            for report in event.steps:
                heard = time.monotonic()
                yield report.step, report.loss
        problem = failure(watched.session)
        if problem is not None:
            raise problem
        still = time.monotonic() - heard
        if still > STEP_TIMEOUT_S:
            whom = "; ".join(watched.session.waiting) or f"{info.session} ({watched.session.state})"
            raise UnreachableError(f"no step for {still:.0f} s, waiting for {whom}")


async def rest(client: Client, info: SessionInfo) -> None:
    """Wait until the run has ended: its last step is applied before its last checkpoint is stored.

    Raises: `DCNRError` when it fails, `UnreachableError` naming who is awaited when it takes too long.
    """
    deadline = time.monotonic() + STEP_TIMEOUT_S
    after = 0
    while True:
        watched = await client.watch(info.session, after, 1.0)
        after = watched.events[-1].seq if watched.events else after
        problem = failure(watched.session)
        if problem is not None:
            raise problem
        if watched.session.state in ("finished", "paused", "stopped"):
            return
        if time.monotonic() > deadline:
            whom = "; ".join(watched.session.waiting) or "its last checkpoint"
            raise UnreachableError(f"{info.session} has not ended for {STEP_TIMEOUT_S:.0f} s, waiting for {whom}")


async def read_trace(store: Store, info: SessionInfo, step: int, expected: Traced) -> Traced:
    """What the PNodes wrote about a step, once all of it is there; deleted from the store as it is read."""
    from storage.keys import session_prefix
    from storage.store import NotFoundError
    from storage.tensors import decode_tensors

    prefix = session_prefix(info.network, info.session)
    deadline = time.monotonic() + STEP_TIMEOUT_S
    found: dict[str, Mapping[str, Any]] = {}
    for vnode in expected:
        key = f"{prefix}trace/{step}/{vnode.lower()}.safetensors"
        while vnode not in found:
            try:
                found[vnode] = decode_tensors((await store.get(key)).data, key=key)
            except NotFoundError:
                if time.monotonic() > deadline:
                    raise UnreachableError(f"nobody wrote the trace of step {step} of {vnode} ({key})") from None
                await asyncio.sleep(0.01)
        await store.delete(key)
    return found


async def register(client: Client, store_url: str, prepared: Prepared, terminal: Terminal) -> None:
    """Data and network to the private cluster."""
    await put_inputs(store_url, prepared, terminal)
    await put_network(client, prepared, replace=True)


def summary(verdicts: Sequence[Verdict]) -> tuple[bool, dict[str, float]]:
    """All good, and the largest difference of each kind over all runs."""
    worst = {kind: max((verdict.comparison.gaps[kind].absolute for verdict in verdicts), default=0.0) for kind in KINDS}
    return bool(verdicts) and all(verdict.good for verdict in verdicts), worst
