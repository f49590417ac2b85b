"""`dcnr net`: the network files on this machine and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.help import Command, Group
from cli.options import (
    HomeOption,
    NetworkArgument,
    OrchestratorOption,
    Output,
    OutputOption,
    SetsOption,
    TimeoutOption,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Terminal
    from networks.load import Network

app = typer.Typer(cls=Group, no_args_is_help=True, help="Network files: list, create, check, show.")

VocabOption = Annotated[
    int, typer.Option("--vocab", min=0, help="Size of the vocabulary; 0: from the data, packed if need be.")
]


@app.command("ls", cls=Command)
def ls(
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    registered: Annotated[bool, typer.Option("--registered", help="Those in the cluster's registry.")] = False,
    timeout: TimeoutOption = 15.0,
    output: OutputOption = Output.text,
) -> None:
    """List the shipped networks, or with --registered those that the cluster knows."""
    from cli.terminal import Terminal

    terminal = Terminal(output.form)
    if registered:
        _registered(terminal, orchestrator, home, timeout)
        return
    from networks.load import shipped

    found = [{"network": path.stem, "about": about_of(path), "file": str(path)} for path in shipped()]
    if terminal.json:
        terminal.record(found)
        return
    terminal.table(("network", "about"), [(entry["network"], entry["about"]) for entry in found], empty="none")
    terminal.next("dcnr net show gpt-char", "dcnr net new my-net", "dcnr train mlp-digits")


def _registered(terminal: Terminal, orchestrator: str | None, home: str | None, timeout: float) -> None:
    from cli.client import Client
    from cli.running import run
    from cli.units import count
    from wire.messages import NetworkInfo

    async def ask() -> list[NetworkInfo]:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            return await client.networks()

    found = run(ask())
    if terminal.json:
        terminal.record(found)
        return
    rows = [
        (info.network, info.vnodes, count(info.parameters), ",".join(info.sessions), info.digest[:12]) for info in found
    ]
    terminal.table(("network", "vnodes>", "parameters>", "sessions", "digest"), rows, empty="no networks registered")


def about_of(path: Path) -> str:
    """The comment on a file's first line."""
    try:
        with path.open(encoding="utf-8") as lines:
            first = lines.readline(500)
    except (OSError, UnicodeDecodeError):
        return ""
    return first.lstrip("#").strip() if first.startswith("#") else ""


@app.command("new", cls=Command)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new network's id; written to NAME.yaml.")],
    source: Annotated[
        str, typer.Option("--from", metavar="NETWORK", help="The shipped network to start from.")
    ] = "mlp-digits",
    folder: Annotated[str, typer.Option("--in", metavar="FOLDER", help="Where to write it.")] = ".",
) -> None:
    """Write a new network file to start from."""
    import re

    from cli.client import absolute
    from cli.terminal import Terminal
    from networks.load import locate
    from wire.errors import UsageError

    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", name):
        raise UsageError(f"{name!r} can't be a network's id", hint="letters a-z, digits, - and _; at most 63")
    target = absolute(folder) / f"{name}.yaml"
    text = locate(source).read_text(encoding="utf-8")
    text = re.sub(r"^name:.*$", f"name: {name}", text, count=1, flags=re.MULTILINE)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{target} exists already", hint="choose another name, or delete it") from None
    terminal = Terminal()
    terminal.line(f"wrote {target}")
    terminal.next(f"dcnr net validate {target.name}", f"dcnr net show {target.name}", f"dcnr train {target.name}")


@app.command("validate", cls=Command)
def validate(
    files: Annotated[list[str], typer.Argument(metavar="NETWORK…", help="Names or files to check.")],
    sets: SetsOption = None,
    vocab: VocabOption = 0,
    output: OutputOption = Output.text,
) -> None:
    """Check network files: every error with its line, and a hint."""
    from cli.terminal import Terminal
    from cli.units import count, plural
    from wire.errors import BadFileError

    terminal = Terminal(output.form)
    results, bad = [], 0
    for source in files:
        try:
            network = loaded(source, sets or [], vocab, terminal)
        except BadFileError as problem:
            bad += 1
            results.append({"file": source, "ok": False, "error": str(problem)})
            terminal.error(problem.message, problem.hint)
            continue
        parameters = network.parameters
        results.append({"file": source, "ok": True, "nodes": len(network.graph.nodes), "parameters": parameters})
        terminal.line(
            f"{source}: fine, {plural(len(network.graph.nodes), 'node')}, {count(parameters)} parameters", style="green"
        )
    if terminal.json:
        terminal.record(results)
    if bad:
        raise typer.Exit(65)


@app.command("show", cls=Command)
def show(
    network: NetworkArgument,
    sets: SetsOption = None,
    vocab: VocabOption = 0,
    output: OutputOption = Output.text,
) -> None:
    """Show a network: nodes, shapes, parameters, FLOPs and bytes per edge."""
    from cli.drawing import graph_record, show_graph
    from cli.terminal import Terminal

    terminal = Terminal(output.form)
    found = loaded(network, sets or [], vocab, terminal)
    if terminal.json:
        terminal.record(graph_record(found))
        return
    show_graph(terminal, found)
    terminal.next(f"dcnr train {network}", f"dcnr plan {network}")


@app.command("types", cls=Command)
def types(
    name: Annotated[str, typer.Argument(metavar="TYPE", help="Only this one, with its parameters.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """List the node types and their parameters."""
    from difflib import get_close_matches

    from cli.drawing import show_types, types_record
    from cli.terminal import Terminal
    from networks.types import REGISTRY
    from wire.errors import UsageError

    terminal = Terminal(output.form)
    if name and name not in REGISTRY:
        close = get_close_matches(name, list(REGISTRY), n=1)
        raise UsageError(
            f"unknown node type {name!r}", hint=f"did you mean {close[0]!r}?" if close else "dcnr net types"
        )
    chosen = {name: REGISTRY[name]} if name else dict(REGISTRY)
    if terminal.json:
        terminal.record(types_record(chosen))
        return
    show_types(terminal, chosen, detailed=bool(name))


@app.command("schema", cls=Command)
def schema() -> None:
    """Write the file format as JSON Schema (draft-07), for editors."""
    from cli.terminal import Terminal
    from networks.schema import json_schema

    Terminal("json").record(json_schema())


def loaded(source: str, sets: list[str], vocab: int, terminal: Terminal) -> Network:
    """A network of a file; where it needs the vocabulary's size and none is given, from its packed data."""
    from cli.preparing import Overrides, prepare
    from cli.starting import data_cache
    from networks.load import load, read_recipe

    recipe = read_recipe(source, sets)
    needs = recipe.data is not None and recipe.data.text is not None
    if vocab or not needs:
        return load(source, sets=sets, vars={"vocab": vocab} if vocab else {})
    return prepare(source, Overrides.of(sets), terminal, cache=data_cache()).network
