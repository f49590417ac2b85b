"""`dcnr train` and `attach`: start a run and watch it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import (
    HomeOption,
    NetworkArgument,
    OrchestratorOption,
    Output,
    OutputOption,
    SessionArgument,
    SetsOption,
    TimeoutOption,
)

if TYPE_CHECKING:
    from cli.client import Client
    from cli.terminal import Terminal
    from wire.messages import SessionInfo


def train(
    network: NetworkArgument,
    local: Annotated[bool, typer.Option("--local", help="In this one process, without a cluster.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it and don't watch it.")] = False,
    steps: Annotated[int, typer.Option(min=0, help="Length of the whole run; 0: as the network file says.")] = 0,
    until: Annotated[int, typer.Option(min=0, metavar="STEP", help="Hold after this step; 0: at the end.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and dropout.")] = None,
    pnodes: Annotated[int, typer.Option("--pnodes", "-n", min=0, help="Use this many; 0: the planner decides.")] = 0,
    data: Annotated[
        str, typer.Option(metavar="TEXT", help="Train on this text, folder, .jsonl or .bin instead of the file's.")
    ] = "",
    sets: SetsOption = None,
    name: Annotated[str, typer.Option(help="The session's id; default: the network's with a number.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace another network of the same id.")] = False,
    every: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Least time between plain lines.")] = 5.0,
    threads: Annotated[int, typer.Option(min=0, help="With --local: threads to compute with; 0: all cores.")] = 0,
    save: Annotated[str, typer.Option(metavar="FOLDER", help="With --local: export the result here.")] = "",
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """Train a network on the cluster, or with --local in this process; shows progress until it ends.

    Ctrl-C only detaches: the run goes on. `dcnr attach` shows it again.
    """
    from cli.preparing import Overrides
    from cli.running import run
    from cli.terminal import Terminal
    from wire.errors import UsageError

    terminal = Terminal(output.form)
    overrides = Overrides.of(sets, steps=steps, seed=seed, data=data)
    if local:
        if detach or pnodes or name:
            raise UsageError("--local runs in this process: --detach, --pnodes and --name don't go with it")
        from cli.local import train_local

        train_local(network, overrides, until=until, threads=threads, every_s=every, save=save, terminal=terminal)
        return
    if save or threads:
        raise UsageError("--save and --threads go with --local", hint="dcnr export saves a session's network")
    from cli.client import Client
    from cli.starting import Wish, start_session

    client = Client.to(orchestrator, home, terminal, timeout_s=timeout)
    wish = Wish(network, overrides, until=until, pnodes=pnodes, name=name, replace=replace)
    info = start_session(client, wish, terminal)
    if detach:
        if terminal.json:
            terminal.record(info)
        terminal.line(f"{info.session} is {info.state} on {', '.join(info.pnodes) or 'the cluster'}")
        terminal.next(f"dcnr attach {info.session}", "dcnr ps")
        return
    run(_attach(client, info, terminal, every))


def attach(
    session: SessionArgument,
    every: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Least time between plain lines.")] = 5.0,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 15.0,
    output: OutputOption = Output.text,
) -> None:
    """Watch a session until it ends; Ctrl-C detaches."""
    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal

    terminal = Terminal(output.form)

    async def go() -> SessionInfo:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            info = await client.session(session)
            return await watch_to_the_end(client, info, terminal, replay=False, every_s=every)

    run(go())


async def _attach(client: Client, info: SessionInfo, terminal: Terminal, every_s: float) -> SessionInfo:
    async with client:
        return await watch_to_the_end(client, info, terminal, every_s=every_s)


async def watch_to_the_end(
    client: Client,
    info: SessionInfo,
    terminal: Terminal,
    *,
    after: int = 0,
    replay: bool = True,
    every_s: float = 5.0,
) -> SessionInfo:
    """Follow a session and say what comes next; raises the run's failure."""
    import asyncio

    from cli.following import failure, follow
    from cli.progress import view

    try:
        followed = await follow(client, info, view(terminal, every_s=every_s), after=after, replay=replay)
    except asyncio.CancelledError:
        terminal.line(f"detached; {info.session} goes on")
        terminal.next(f"dcnr attach {info.session}", f"dcnr pause {info.session}")
        raise
    ended = followed.session
    if (problem := failure(ended)) is not None:
        raise problem
    say_next(terminal, ended)
    return ended


def say_next(terminal: Terminal, info: SessionInfo) -> None:
    """Hints for a session that has come to rest."""
    if info.bit_exact:
        terminal.line(info.bit_exact, style="yellow")
    if info.state == "finished":
        use = f"dcnr generate {info.network}" if info.tokenizer_digest else f"dcnr infer {info.network} -i FILE"
        terminal.next(use, f"dcnr eval {info.network}", f"dcnr export {info.session}")
    elif info.state in ("paused", "stopped", "created"):
        terminal.next(f"dcnr resume {info.session}")
