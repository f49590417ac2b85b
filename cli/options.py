"""The options that several commands share, each declared once so that all of them spell and explain it alike."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cli.terminal import Format


class Output(StrEnum):
    """How results are written."""

    text = "text"
    json = "json"

    @property
    def form(self) -> Format:
        """The terminal's name for it."""
        return "json" if self is Output.json else "text"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Text for people or JSON for programs.")]
OrchestratorOption = Annotated[
    str | None,
    typer.Option(
        "--orchestrator",
        envvar="DCNR_ORCHESTRATOR",
        metavar="ADDRESS",
        help="The orchestrator to talk to (tcp://host:port); default: the current context, else the local cluster.",
    ),
]
HomeOption = Annotated[
    str | None,
    typer.Option("--home", envvar="DCNR_HOME", metavar="FOLDER", help="Where DCNR keeps its files (~/.dcnr)."),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="How long to wait for each answer.")
]
SetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one value of the network file (train.batch=8); repeatable."
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
NetworkArgument = Annotated[str, typer.Argument(metavar="NETWORK", help="A shipped network's name, or a file.")]
SessionArgument = Annotated[
    str, typer.Argument(metavar="SESSION", help="A session's id, or a network's (then its newest session).")
]
