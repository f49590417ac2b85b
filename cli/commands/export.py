"""`dcnr export`: a trained network as a folder that anything can read."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption, SessionArgument, TimeoutOption


def export(
    session: SessionArgument,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="Where to; default: ./SESSION.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.text,
) -> None:
    """Write a session's network, weights (safetensors) and tokenizer to a folder."""
    from cli.client import Client, absolute
    from cli.exporting import Exported, check_target, export_session
    from cli.running import run
    from cli.terminal import Terminal
    from cli.units import count, size

    terminal = Terminal(output.form)

    async def go() -> Exported:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            info = await client.session(session)
            folder = absolute(to or info.session)
            check_target(folder, force=force)
            with terminal.waiting(f"reading step {info.committed} of {info.session} from the store"):
                return await export_session((await client.cluster()).store, info, folder)

    done = run(go())
    if terminal.json:
        terminal.record(done.record())
        return
    terminal.line(
        f"wrote {done.folder}: step {done.step}, {count(done.parameters)} parameters, {size(done.size_bytes)}"
    )
    terminal.next(f"cat {done.folder}/README.md")
