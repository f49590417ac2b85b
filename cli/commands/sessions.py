"""`dcnr ps`, `pause`, `resume`, `stop`, `logs`: sessions and their life cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import (
    HomeOption,
    OrchestratorOption,
    Output,
    OutputOption,
    SessionArgument,
    TimeoutOption,
)

if TYPE_CHECKING:
    from cli.client import Client
    from cli.terminal import Terminal
    from wire.messages import PNodeInfo, SessionEvent, SessionInfo

STATE_STYLES = {
    "running": "green",
    "recovering": "bold yellow",
    "finished": "cyan",
    "failed": "bold red",
    "paused": "yellow",
    "stopped": "dim",
}


def ps(
    network: Annotated[str, typer.Argument(metavar="NETWORK", help="Only this network's.")] = "",
    active: Annotated[bool, typer.Option("--active", help="Only those that run or pause.")] = False,
    pnodes: Annotated[bool, typer.Option("--pnodes", help="List the PNodes instead.")] = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 15.0,
    output: OutputOption = Output.text,
) -> None:
    """List the sessions: state, step, loss, speed, what is saved."""
    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal

    terminal = Terminal(output.form)

    async def ask() -> tuple[list[SessionInfo], list[PNodeInfo]]:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            return ([], await client.pnodes()) if pnodes else (await client.sessions(network), [])

    sessions, nodes = run(ask())
    if pnodes:
        from cli.commands.status import show_pnodes

        if terminal.json:
            terminal.record(nodes)
        show_pnodes(terminal, nodes)
        return
    found = [info for info in sessions if not active or info.state not in ("finished", "failed", "stopped")]
    if terminal.json:
        terminal.record(found)
        return
    show_sessions(terminal, found)
    if not found:
        terminal.next("dcnr train mlp-digits")


def show_sessions(terminal: Terminal, sessions: list[SessionInfo]) -> None:
    """The table of `ps`."""
    import time

    from cli.units import ago, compact, duration, loss

    rows = [
        (
            info.session, info.state, f"{info.step}/{info.steps}", loss(info.loss) if info.step else "-",
            compact(info.tokens_s) if info.state == "running" else "-",
            duration(info.eta_s) if info.state == "running" else "-",
            info.committed or "-", ",".join(info.pnodes) or "-", ago(max(0.0, time.time() - info.created)),
            info.error or "; ".join(info.waiting) or info.bit_exact or _recovered(info) or info.codecs,
        )
        for info in sessions
    ]  # fmt: skip
    styles = {(index, 1): STATE_STYLES.get(info.state, "") for index, info in enumerate(sessions)}
    columns = ("session", "state", "step>", "loss>", "tokens/s>", "eta>", "saved>", "pnodes", "created", "note")
    spare = ("created", "eta", "tokens/s", "pnodes", "saved")
    terminal.table(columns, rows, empty="no sessions", styles=styles, spare=spare)


def _recovered(info: SessionInfo) -> str:
    return f"recovered {info.recoveries} times" if info.recoveries > 1 else "recovered once" if info.recoveries else ""


def pause(
    session: SessionArgument,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """Hold a run after the step it is in, and save it there."""
    info = _act(session, "pause", orchestrator, home, timeout, output, until_state=("paused", "finished"))
    _say(info, output, f"{info.session} is {info.state} at step {info.step}", f"dcnr resume {info.session}")


def resume(
    session: SessionArgument,
    until: Annotated[int, typer.Option(min=0, metavar="STEP", help="Hold after this step; 0: run to the end.")] = 0,
    pnodes: Annotated[int, typer.Option(min=0, help="Place it anew on this many PNodes; 0: the planner decides.")] = 0,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Don't watch it.")] = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """Go on with a paused, stopped or failed run, from its last checkpoint, and watch it."""
    from cli.client import Client
    from cli.commands.train import watch_to_the_end
    from cli.following import newest_event
    from cli.running import run
    from cli.terminal import Terminal

    terminal = Terminal(output.form)

    async def go() -> SessionInfo:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            found = await client.session(session)
            last = await newest_event(client, found.session)
            info = await client.act(found.session, "resume", until=until, pnodes=pnodes, timeout_s=timeout)
            if detach:
                return info
            return await watch_to_the_end(client, info, terminal, after=last)

    info = run(go())
    if detach:
        _say(info, output, f"{info.session} goes on from step {info.step}", f"dcnr attach {info.session}")


def stop(
    session: SessionArgument,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """End a run for now and free its PNodes; what is saved stays."""
    info = _act(session, "stop", orchestrator, home, timeout, output, until_state=("stopped", "finished", "failed"))
    _say(
        info,
        output,
        f"{info.session} is {info.state}; step {info.committed} is saved",
        f"dcnr resume {info.session}",
        f"dcnr rm {info.session}",
    )


async def settle(
    client: Client, info: SessionInfo, states: tuple[str, ...], terminal: Terminal, timeout_s: float
) -> SessionInfo:
    """Wait until the session is in one of these states. Raises `UnreachableError` naming who is awaited."""
    import asyncio

    from cli.following import newest_event
    from wire.errors import UnreachableError

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    with terminal.waiting(f"waiting for {info.session}: {info.state}"):
        while info.state not in states and info.state != "failed":
            left = deadline - loop.time()
            if left <= 0:
                whom = "; ".join(info.waiting) or "its PNodes"
                raise UnreachableError(
                    f"{info.session} is still {info.state} after {timeout_s:.0f} s, waiting for {whom}",
                    hint="dcnr status",
                )
            last = await newest_event(client, info.session)
            info = (await client.watch(info.session, last, min(0.5, left))).session
    return info


def _act(
    session: str,
    action: str,
    orchestrator: str | None,
    home: str | None,
    timeout: float,
    output: Output,
    *,
    until_state: tuple[str, ...],
) -> SessionInfo:
    from cli.client import Client
    from cli.following import failure
    from cli.running import run
    from cli.terminal import Terminal

    terminal = Terminal(output.form)

    async def go() -> SessionInfo:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            found = await client.session(session)
            info = await client.act(found.session, action, timeout_s=timeout)
            return await settle(client, info, until_state, terminal, timeout)

    info = run(go())
    if info.state not in until_state and (problem := failure(info)) is not None:
        raise problem
    return info


def _say(info: SessionInfo, output: Output, text: str, *following: str) -> None:
    from cli.terminal import Terminal

    terminal = Terminal(output.form)
    if terminal.json:
        terminal.record(info)
        return
    terminal.line(text)
    if info.state == "finished":
        terminal.next(f"dcnr eval {info.network}", f"dcnr export {info.session}")
    else:
        terminal.next(*following)


def logs(
    session: SessionArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as new events come.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Show each step too.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Only the last ones; 0: all.")] = 0,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 15.0,
    output: OutputOption = Output.text,
) -> None:
    """Show a session's events: states, checkpoints, warnings, errors."""
    import time

    from cli.client import Client
    from cli.eventstream import EventStream
    from cli.running import run
    from cli.runstate import GIVE_UP_S
    from cli.terminal import Terminal
    from wire.errors import UnreachableError

    terminal = Terminal(output.form)

    async def go() -> None:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            info = await client.session(session)
            stream = EventStream(client, info.session)
            info, events = await stream.past()
            for event in [event for event in events if steps or event.kind != "progress"][-lines:]:
                _log_line(terminal, event)
            heard = time.monotonic()
            while follow:
                try:
                    info, events = await stream.next(5.0)
                except UnreachableError:
                    away = time.monotonic() - heard
                    if away > GIVE_UP_S:
                        raise
                    terminal.warn(f"the orchestrator at {client.address} has been away for {away:.0f} s")
                    continue
                heard = time.monotonic()
                for event in events:
                    if steps or event.kind != "progress":
                        _log_line(terminal, event)
                if info.state in ("finished", "failed", "stopped") and not events:
                    return

    run(go())


def _log_line(terminal: Terminal, event: SessionEvent) -> None:
    import time

    from cli.units import loss

    if terminal.json:
        terminal.record(event, indent=False)
        return
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    style = {"error": "red", "warning": "yellow", "state": "bold"}.get(event.kind)
    if event.kind == "progress":
        for report in event.steps:
            terminal.line(f"{clock}  step {report.step}  loss {loss(report.loss)}  norm {report.gradient_norm:.3g}")
        return
    first, *rest = event.text.splitlines() or [""]
    terminal.line(f"{clock}  {event.kind:<9}  {first}", style=style)
    for line in rest:
        terminal.line(f"{'':<21}{line}", style="dim")
