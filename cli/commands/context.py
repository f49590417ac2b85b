"""`dcnr context`: names for the orchestrators one works with."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.help import Command, Group
from cli.options import HomeOption, Output, OutputOption

app = typer.Typer(cls=Group, no_args_is_help=True, help="Name orchestrators and choose the one that commands talk to.")


@app.command("ls", cls=Command)
def ls(home: HomeOption = None, output: OutputOption = Output.text) -> None:
    """List the contexts; the current one has a star."""
    from cli.cluster import Cluster
    from cli.context import Contexts, home_folder
    from cli.terminal import Terminal

    terminal, folder = Terminal(output.form), home_folder(home)
    contexts = Contexts.read(folder)
    cluster = Cluster.read(folder)
    local = cluster.address if cluster is not None and cluster.orchestrator.alive() else ""
    entries = [("local", local, not contexts.current)]
    entries += [(name, address, name == contexts.current) for name, address in sorted(contexts.addresses.items())]
    if terminal.json:
        terminal.record([{"name": name, "address": address, "current": current} for name, address, current in entries])
        return
    rows = [("*" if current else "", name, address or "(not up)") for name, address, current in entries]
    terminal.table(("", "name", "address"), rows)


@app.command("use", cls=Command)
def use(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The context's name; 'local' is the cluster of the home folder.")
    ],
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="tcp://host:port, to add or change it.")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Talk to this orchestrator from now on."""
    from cli.context import Contexts, home_folder
    from cli.terminal import Terminal

    contexts = Contexts.read(home_folder(home)).use(name, address)
    contexts.save()
    terminal = Terminal()
    terminal.line(f"using {name}" + (f" ({contexts.addresses[name]})" if name in contexts.addresses else ""))
    terminal.next("dcnr status")


@app.command("join", cls=Command)
def join(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The context's name.")],
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="From dcnr node invite --client; -: read it from standard input.")
    ] = "-",
    home: HomeOption = None,
) -> None:
    """Be let in by an orchestrator with keys, and talk to it from now on."""
    import sys

    from cli.context import Contexts, home_folder
    from cli.running import run
    from cli.terminal import Terminal
    from wire.errors import UsageError
    from wire.joining import client_id
    from wire.joining import join as knock
    from wire.keys import load_or_make
    from wire.tokens import read_token

    folder = home_folder(home)
    read = read_token(sys.stdin.readline() if token == "-" else token)
    if read.role != "client":
        raise UsageError("this token is for a PNode", hint="dcnr pnode --join TOKEN; dcnr node invite --client")
    key = load_or_make(folder / "client").public
    _, known = run(knock(folder / "client", read, client_id(key)))
    Contexts.read(folder).use(name, known.addresses[0], known.key).save()
    terminal = Terminal()
    terminal.line(f"using {name} ({known.addresses[0]})")
    terminal.next("dcnr status")


@app.command("rm", cls=Command)
def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The context's name.")], home: HomeOption = None
) -> None:
    """Forget a context; the cluster itself is left alone."""
    from cli.context import Contexts, home_folder
    from cli.terminal import Terminal

    Contexts.read(home_folder(home)).without(name).save()
    Terminal().line(f"forgot {name}")
