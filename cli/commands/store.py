"""`dcnr rm` and `gc`: removing what is no longer wanted, after asking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption, TimeoutOption, YesOption

if TYPE_CHECKING:
    from wire.messages import GarbageInfo, NetworkInfo, SessionInfo


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Ids of sessions, or of networks.")],
    yes: YesOption = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """Delete sessions, or networks with all their sessions, and what they stored."""
    from cli.asking import confirm
    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal
    from wire.errors import DCNRError
    from wire.messages import RemoveNetwork

    terminal = Terminal(output.form)

    async def look() -> tuple[list[SessionInfo], list[NetworkInfo]]:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            return await client.sessions(), await client.networks()

    sessions, networks = run(look())
    by_id = {info.session: info for info in sessions}
    known = {info.network for info in networks}
    for name in names:
        if name not in by_id and name not in known:
            raise DCNRError(f"no session or network {name!r}", hint="dcnr ps; dcnr net ls --registered")
    touched = [info for info in sessions if info.session in names or info.network in names]
    live = [info for info in touched if info.deployed or info.state in ("running", "pausing", "starting")]
    what = ", ".join(names) + (
        f" with {', '.join(info.session for info in touched)}" if set(names) - set(by_id) else ""
    )
    if not yes:
        state = f"; {', '.join(f'{info.session} is {info.state}' for info in live)}" if live else ""
        confirm(terminal, f"Delete {what} and all that is stored of it{state}?")

    async def remove() -> None:
        from wire.ids import new_request_id

        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            for name in names:
                if name in by_id:
                    await client.act(name, "remove", timeout_s=timeout)
                else:
                    await client.ask(RemoveNetwork(str(new_request_id()), name, force=True), type(None))

    run(remove())
    if terminal.json:
        terminal.record({"removed": names})
    terminal.line(f"removed {what}")
    terminal.next("dcnr gc")


def gc(
    network: Annotated[str, typer.Argument(metavar="NETWORK", help="Only of this network.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: YesOption = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 120.0,
    output: OutputOption = Output.text,
) -> None:
    """Delete stored objects that no checkpoint needs."""
    from cli.asking import confirm
    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal
    from cli.units import plural, size
    from wire.messages import CollectGarbage, GarbageInfo

    terminal = Terminal(output.form)

    async def collect(dry: bool) -> GarbageInfo:
        from wire.ids import new_request_id

        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            return await client.ask(CollectGarbage(str(new_request_id()), network, dry), GarbageInfo)

    found = run(collect(True))
    if dry_run or not found.objects:
        if terminal.json:
            terminal.record(found)
            return
        terminal.line(f"{plural(found.objects, 'object')}, {size(found.size_bytes)}, not needed by any checkpoint")
        for key in found.keys[:20]:
            terminal.line(f"  {key}")
        if found.objects:
            terminal.next("dcnr gc")
        return
    if not yes:
        confirm(
            terminal, f"Delete {plural(found.objects, 'object')} ({size(found.size_bytes)}) that no checkpoint needs?"
        )
    done = run(collect(False))
    if terminal.json:
        terminal.record(done)
    terminal.line(f"deleted {plural(done.objects, 'object')}, {size(done.size_bytes)}")
