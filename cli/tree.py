"""The tree of sub-commands of `dcnr`, built without importing anything heavy.

Each command lives in `cli.commands`; its module imports typer and the shared options only, and whatever else it needs
inside the function that runs. So `dcnr --help` stays far below a third of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from cli import running
from cli.commands import (
    chaos,
    cluster,
    context,
    demo,
    doctor,
    export,
    infer,
    inspect,
    net,
    node,
    rebalance,
    sessions,
    status,
    store,
    train,
    verify,
)
from cli.help import Command, Group

RUN, NETWORKS, USE, CLUSTER, CARE = "Train", "Networks", "Use", "Cluster", "Care"


class Root(Group):
    """The root command: the one place where an exception becomes one or two lines and an exit code."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the options before the sub-command."""
        with _explained():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the sub-command."""
        with _explained():
            result = super().invoke(ctx)
            running.flush()
            return result


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BaseException as problem:
        code = running.report(problem)
        if code is None:
            raise
        raise typer.Exit(code) from None


app = typer.Typer(
    name="dcnr",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one neural network on several ordinary machines.",
    epilog="New here? `dcnr demo` trains a small GPT across three processes on this machine and samples from it.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dcnr {version('dcnr')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train one neural network on several ordinary machines."""


for panel, commands in {
    RUN: (train.train, train.attach, sessions.ps, sessions.pause, sessions.resume, sessions.stop, sessions.logs),
    NETWORKS: (inspect.plan, inspect.inspect, rebalance.rebalance, verify.verify, chaos.chaos),
    USE: (infer.infer, infer.generate, infer.evaluate, export.export),
    CLUSTER: (
        demo.demo,
        cluster.up,
        cluster.down,
        status.status,
        cluster.orchestrator,
        cluster.pnode,
        cluster.storage,
        node.keys,
    ),
    CARE: (store.rm, store.gc, doctor.doctor),
}.items():
    for command in commands:
        name = "eval" if command is infer.evaluate else command.__name__
        app.command(name, cls=Command, rich_help_panel=panel)(command)
app.add_typer(net.app, name="net", rich_help_panel=NETWORKS)
app.add_typer(node.app, name="node", rich_help_panel=CLUSTER)
app.add_typer(context.app, name="context", rich_help_panel=CLUSTER)
