"""`dcnr demo`: everything at once, on this machine, leaving nothing behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Output, OutputOption, SetsOption

if TYPE_CHECKING:
    from pathlib import Path

    from cli.cluster import Cluster
    from cli.demonstrating import DemoPlan, Shown
    from cli.preparing import Prepared
    from cli.terminal import Terminal


def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 600,
    pnodes: Annotated[int, typer.Option("--pnodes", "-n", min=1, max=16, help="How many PNode processes.")] = 3,
    network: Annotated[str, typer.Option(metavar="NETWORK", help="The network to train.")] = "gpt-char",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last demo, or fail.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the last demo stored and start anew.")] = False,
    sets: SetsOption = None,
    home: Annotated[
        str | None,
        typer.Option(
            "--home",
            metavar="FOLDER",
            help="The demo's files; default: $DCNR_HOME/demo, else ./.dcnr-demo.",
        ),
    ] = None,
    every: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Least time between plain lines.")] = 5.0,
    output: OutputOption = Output.text,
) -> None:
    """Train a small GPT across three processes here, check it against one process, and sample from it.

    A second run goes on with an unfinished one, and starts anew after a finished one.
    """
    from cli.demonstrating import DemoPlan, begin, claim, leave, prepared_for
    from cli.running import run
    from cli.terminal import Terminal
    from wire.errors import DCNRError, UsageError

    if resume and fresh:
        raise UsageError("--resume and --fresh exclude each other")
    terminal = Terminal(output.form)
    plan = DemoPlan(_home(home), network, steps, pnodes, tuple(sets or ()), resume, fresh)
    claim(plan.home)
    try:
        prepared = prepared_for(plan, terminal)
        cluster = begin(plan, terminal)
        shown = run(_show(cluster, plan, prepared, terminal, every), grace_s=None)
    except KeyboardInterrupt:
        with terminal.waiting("ending all processes"):
            leave(plan.home)
        terminal.line("all processes have ended; the next demo goes on from what is saved", style="dim")
        raise
    finally:
        leave(plan.home)
    if terminal.json:
        terminal.record(shown.record(), indent=False)
    terminal.line(f"all processes have ended; store and logs are in {plan.home}", style="dim")
    if shown.compared and shown.largest_difference:
        raise DCNRError("the run differs from one process", hint=f"dcnr verify {network} shows where")
    terminal.next(*_activation(), f"dcnr verify {network}", "dcnr up")


def _activation() -> tuple[str, ...]:
    """What makes `dcnr` a command of this shell, if it isn't one: `make demo` runs it from its own environment."""
    import shutil
    import sys
    from pathlib import Path

    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("dcnr") or not script.exists():
        return ()
    return (f"source {os.path.relpath(script)}",)


def _home(home: str | None) -> Path:
    from pathlib import Path

    if home:
        return Path(home).expanduser().absolute()
    base = os.environ.get("DCNR_HOME")
    return Path(base).expanduser().absolute() / "demo" if base else Path.cwd() / ".dcnr-demo"


async def _show(cluster: Cluster, plan: DemoPlan, prepared: Prepared, terminal: Terminal, every_s: float) -> Shown:
    from cli.client import Client
    from cli.commands.cluster import wait_until_joined
    from cli.demonstrating import show

    await wait_until_joined(cluster, terminal)
    async with Client(cluster.address, terminal, timeout_s=60.0) as client:
        return await show(client, cluster, plan, prepared, terminal, every_s)
