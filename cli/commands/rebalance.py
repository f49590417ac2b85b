"""`dcnr rebalance`: what a session would gain on the PNodes of now, and the move there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption, SessionArgument, YesOption

if TYPE_CHECKING:
    from cli.client import Client
    from cli.eventstream import EventStream
    from cli.terminal import Terminal
    from wire.messages import RebalanceInfo, SessionInfo

ON_THE_WAY = frozenset({"starting", "recovering", "pausing", "stopping"})


def rebalance(
    session: SessionArgument,
    yes: YesOption = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="How long the move may take.")
    ] = 300.0,
    output: OutputOption = Output.text,
) -> None:
    """Compare a session's placement with the best one on the PNodes of now; ask, and move it there.

    The run holds after a step, saves it, and goes on from it elsewhere: no step is lost or made twice. With -o json, or
    when nobody is there to ask, nothing is moved without --yes.
    """
    from cli.asking import agreed, anybody
    from cli.running import run
    from cli.terminal import Terminal, jsonable

    terminal = Terminal(output.form)
    info = run(_look(session, orchestrator, home, terminal))
    if not terminal.json:
        show(terminal, info)
    wanted = bool(info.moved) and (
        yes or (not terminal.json and anybody() and agreed(terminal, f"Move {info.session} there?"))
    )
    if not wanted:
        if terminal.json:
            terminal.record(info)
        elif info.moved:
            terminal.line("nothing was moved")
            terminal.next(f"dcnr rebalance {info.session} --yes")
        return
    done, after = run(_move(info.session, orchestrator, home, timeout, terminal))
    if terminal.json:
        terminal.record({**jsonable(done), "after": after})
        return
    placed = f"epoch {after.epoch} on {', '.join(after.pnodes)}"
    terminal.line(f"{after.session} is {after.state}: {placed}, from step {after.step}", style="green")
    terminal.next(f"dcnr attach {after.session}", f"dcnr inspect {after.session}")


def show(terminal: Terminal, info: RebalanceInfo) -> None:
    """Both placements, the gain, and what would move."""
    from cli.drawing import show_plan
    from cli.units import plural, size

    show_plan(terminal, f"{info.session} now", info.present)
    if not info.moved:
        terminal.line("that is the best placement on the PNodes of now: nothing would move", style="green")
        return
    show_plan(terminal, f"{info.session} at best", info.best)
    by_way: dict[tuple[str, str], list[str]] = {}
    for vnode, target in info.moved.items():
        by_way.setdefault((info.present.placement.get(vnode, "?"), target), []).append(vnode)
    rows = [(source, target, len(vnodes), " ".join(vnodes)) for (source, target), vnodes in sorted(by_way.items())]
    terminal.table(("from", "to", "vnodes>", "which"), rows)
    terminal.line(
        f"predicted: {info.gain:.2f} times as fast; {plural(len(info.moved), 'VNode')} would move, "
        f"{size(info.moved_bytes)} would be fetched",
        style="bold",
    )


async def _look(session: str, orchestrator: str | None, home: str | None, terminal: Terminal) -> RebalanceInfo:
    from cli.client import Client

    async with Client.to(orchestrator, home, terminal, timeout_s=60.0) as client:
        found = await client.session(session)
        return await client.rebalance(found.session)


async def _move(
    session: str, orchestrator: str | None, home: str | None, timeout_s: float, terminal: Terminal
) -> tuple[RebalanceInfo, SessionInfo]:
    from cli.client import Client
    from cli.eventstream import EventStream

    async with Client.to(orchestrator, home, terminal, timeout_s=60.0) as client:
        stream = EventStream(client, session)
        before, _ = await stream.past()
        done = await client.rebalance(session, apply=True)
        if not done.applied:
            return done, before
        return done, await arrived(client, stream, before, timeout_s)


async def arrived(client: Client, stream: EventStream, before: SessionInfo, timeout_s: float) -> SessionInfo:
    """Show what happens until the session stands in a later epoch than `before`.

    Raises: the run's failure; `UnreachableError` naming who is awaited at the deadline.
    """
    import asyncio

    from cli.following import failure
    from cli.progress import note_lines
    from wire.errors import UnreachableError

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    info = before
    while info.epoch <= before.epoch or info.state in ON_THE_WAY or not info.deployed:
        left = deadline - loop.time()
        if left <= 0:
            whom = "; ".join(info.waiting) or "its PNodes"
            raise UnreachableError(
                f"{info.session} is {info.state} and has not moved after {timeout_s:.0f} s, waiting for {whom}",
                hint="dcnr status",
            )
        with client.terminal.waiting("; ".join(info.waiting) or f"{info.session} is {info.state}"):
            info, events = await stream.next(min(1.0, left))
        for event in events:
            if event.kind not in ("progress", "committed"):
                for line in note_lines(event.kind, event.text):
                    client.terminal.line(f"{info.session}  {line}", style="dim")
        if (problem := failure(info)) is not None:
            raise problem
    return info
