"""`dcnr doctor`: is everything here that a run needs, and if not, how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption

if TYPE_CHECKING:
    from cli.diagnosis import Finding


def doctor(
    store: Annotated[str, typer.Option(metavar="URL", help="Check this store too; default: the cluster's.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for each answer.")] = 5.0,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Check Python, packages, disk, memory, clock, ports, store, orchestrator and PNodes."""
    from cli.context import home_folder
    from cli.diagnosis import examine
    from cli.running import run
    from cli.terminal import Terminal

    terminal = Terminal(output.form)
    findings: list[Finding] = run(examine(home_folder(home), orchestrator, store, terminal, timeout))
    if terminal.json:
        terminal.record([finding.record() for finding in findings])
    words = {"ok": "fine", "warn": "look", "bad": "BAD", "skip": "-"}
    rows = [(words[finding.state], finding.what, finding.text) for finding in findings]
    colours = {"ok": "green", "warn": "yellow", "bad": "bold red", "skip": "dim"}
    styles = {(index, 0): colours[finding.state] for index, finding in enumerate(findings)}
    terminal.table(("", "what", "found"), rows, styles=styles)
    for finding in findings:
        if finding.mend:
            terminal.line(f"{finding.what}: {finding.mend}", style="yellow")
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)
    if not any(finding.mend for finding in findings):
        terminal.next("dcnr demo", "dcnr up")
