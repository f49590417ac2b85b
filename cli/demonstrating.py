"""The demo: a private cluster in its own home, a GPT trained across three processes, checked, sampled, and all ended.

The home keeps store and registry between runs, so an unfinished demo can be gone on with; processes never outlive it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import cluster as clusters
from cli import units
from cli.client import Client
from cli.cluster import Cluster
from cli.commands.sessions import settle
from cli.context import read_json, write_json
from cli.following import failure, follow, newest_event
from cli.local import batches
from cli.preparing import Overrides, Prepared, prepare
from cli.processes import birth_of
from cli.progress import view
from cli.sampling import Sampling
from cli.starting import Wish, create, data_cache, describe, put_inputs, put_network
from cli.terminal import Terminal
from cli.using import generate_with
from wire.errors import DCNRError
from wire.messages import SessionInfo

CHECKED_STEPS = 10
SAMPLE_TOKENS = 300
SAVE_TIMEOUT_S = 5.0
PROMPT = "def "


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo is asked to do."""

    home: Path
    network: str
    steps: int
    pnodes: int
    sets: tuple[str, ...] = ()
    resume: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """What the demo has shown."""

    session: str
    steps: int
    loss: float
    compared: int
    largest_difference: float
    sample: str

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"event": "demo", **{name: getattr(self, name) for name in self.__slots__}}


def claim(home: Path) -> None:
    """Take the demo's home for this process; end what a demo that was killed left behind.

    Raises `DCNRError` if another demo runs in it.
    """
    owner = read_json(home / "demo.json") or {}
    pid, birth = owner.get("pid"), owner.get("birth")
    if isinstance(pid, int) and pid != os.getpid() and birth and birth_of(pid) == birth:
        raise DCNRError(f"a demo already runs in {home} (pid {pid})", hint="--home another folder, or wait for it")
    end_processes(home)
    write_json(home / "demo.json", {"pid": os.getpid(), "birth": birth_of(os.getpid())})


def leave(home: Path) -> None:
    """End every process of the demo and give its home back."""
    end_processes(home)
    (home / "demo.json").unlink(missing_ok=True)


def end_processes(home: Path) -> None:
    """Whatever `cluster.json` names and still runs."""
    left = Cluster.read(home)
    if left is not None:
        clusters.stop(left)


def begin(plan: DemoPlan, terminal: Terminal) -> Cluster:
    """A fresh or continued home, and its cluster."""
    store = plan.home / "store"
    if plan.fresh and store.exists():
        clusters.forget(plan.home, keep_nothing_of(plan.home))
        terminal.line("starting anew: the store of the last demo is deleted")
    processes = units.plural(plan.pnodes, "PNode process")
    terminal.line(f"DCNR demo: {plan.network} across {processes} over TCP", style="bold")
    with terminal.waiting("starting an orchestrator and the PNodes"):
        return clusters.start(plan.home, pnodes=plan.pnodes)


def keep_nothing_of(home: Path) -> list[str]:
    """What a fresh start deletes in a demo's home: all but the claim itself and the packed data."""
    return [entry.name for entry in home.iterdir() if entry.name not in ("demo.json", "data")]


async def train_or_go_on(
    client: Client, cluster: Cluster, plan: DemoPlan, prepared: Prepared, terminal: Terminal
) -> tuple[SessionInfo, int]:
    """The demo's session, running: an unfinished one goes on, else a new one; and the last event before that."""
    network = prepared.network.id
    earlier = sorted(await client.sessions(network), key=lambda info: (info.created, info.session))
    last = earlier[-1] if earlier else None
    if last is not None and last.state not in ("finished",) and last.committed:
        terminal.line(
            f"found {last.session}, {last.state}, saved at step {last.committed} of {last.steps}: going on from there "
            f"(--fresh starts anew)"
        )
        seen = await newest_event(client, last.session)
        if last.state == "running":
            return last, seen
        return await client.act(last.session, "resume", timeout_s=120.0), seen
    if plan.resume:
        raise DCNRError(f"there is nothing to resume in {plan.home}", hint="dcnr demo starts a new one")
    if last is not None:
        how = "finished" if last.state == "finished" else f"{last.state} before anything was saved"
        terminal.line(f"found {last.session}, {how}: starting a new one")
    await put_inputs(cluster.store, prepared, terminal)
    await put_network(client, prepared, replace=True)
    return await create(client, Wish(network, pnodes=plan.pnodes, tag="demo"), prepared, terminal), 0


async def show(
    client: Client, cluster: Cluster, plan: DemoPlan, prepared: Prepared, terminal: Terminal, every_s: float
) -> Shown:
    """Train, compare with one process, sample. Raises the run's failure."""
    session, seen = await train_or_go_on(client, cluster, plan, prepared, terminal)
    terminal.line("Ctrl-C ends everything; dcnr demo then goes on from the last checkpoint", style="dim")
    try:
        followed = await follow(client, session, view(terminal, every_s=every_s), after=seen)
    except asyncio.CancelledError:
        await save_now(client, session, terminal)
        raise
    ended = followed.session
    problem = failure(ended)
    if problem is not None:
        raise problem
    compared, gap = await compare(client, ended, prepared, cluster, terminal)
    if not terminal.json:
        terminal.line("a sample:", style="bold")
    made = await generate_with(
        client, ended.session, PROMPT, SAMPLE_TOKENS, Sampling(0.8, 40, 1.0), terminal, 60.0, seed=1
    )
    terminal.line()
    terminal.line(f"({units.duration(made.per_token_s)} for each token, through {plan.pnodes} processes)", style="dim")
    return Shown(ended.session, ended.step, ended.loss, compared, gap, made.prompt + made.text)


async def save_now(client: Client, session: SessionInfo, terminal: Terminal) -> None:
    """Hold and save the run, so that the next demo can go on; at most SAVE_TIMEOUT_S, and only if all goes well."""
    try:
        info = await client.act(session.session, "pause", timeout_s=SAVE_TIMEOUT_S)
        info = await settle(client, info, ("paused", "finished"), terminal, SAVE_TIMEOUT_S)
    except DCNRError as problem:
        terminal.warn(f"not saved: {problem.message}")
        return
    terminal.line(f"saved at step {info.committed}")


async def compare(
    client: Client, session: SessionInfo, prepared: Prepared, cluster: Cluster, terminal: Terminal
) -> tuple[int, float]:
    """The losses of the first steps against one process. Returns how many, and the largest difference."""
    from pnode.reference import train

    mine: dict[int, float] = {}
    after = 0
    while len(mine) < CHECKED_STEPS and (past := await client.watch(session.session, after, 0.0)).events:
        after = past.events[-1].seq
        mine |= {report.step: report.loss for event in past.events for report in event.steps}
    steps = min(CHECKED_STEPS, max(mine, default=0))
    if not all(step in mine for step in range(1, steps + 1)) or not steps:
        return 0, 0.0
    reference: list[float] = []
    with terminal.waiting(f"the first {steps} steps in one process, to compare"):
        await asyncio.to_thread(
            train,
            prepared.network,
            batches(prepared),
            steps=steps,
            threads=cluster.threads,
            on_step=lambda done: reference.append(done.loss),
        )
    gap = max(abs(loss - mine[step]) for step, loss in enumerate(reference, start=1))
    verdict = "the same bits" if gap == 0 else f"largest difference {gap:g}"
    terminal.line(
        f"the losses of the first {steps} steps in one process: {verdict}", style="green" if gap == 0 else "bold red"
    )
    return steps, gap


def prepared_for(plan: DemoPlan, terminal: Terminal) -> Prepared:
    """The demo's network and data, and two lines about them."""
    overrides = Overrides.of([*plan.sets, f"train.checkpoint.every={max(1, plan.steps // 4)}"], steps=plan.steps)
    prepared = prepare(plan.network, overrides, terminal, cache=data_cache())
    describe(prepared, terminal)
    return prepared
