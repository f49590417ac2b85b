"""`dcnr node`: who is let into a cluster with keys; and `dcnr keys`."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.help import Command, Group
from cli.options import HomeOption, OrchestratorOption, Output, OutputOption

app = typer.Typer(cls=Group, no_args_is_help=True, help="Say who is let into a cluster that has keys.")


@app.command("ls", cls=Command)
def ls(orchestrator: OrchestratorOption = None, home: HomeOption = None, output: OutputOption = Output.text) -> None:
    """List who is admitted, and open invitations."""
    from datetime import UTC, datetime

    import msgspec

    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal
    from wire.messages import MemberInfo

    terminal = Terminal(output.form)

    async def ask() -> list[MemberInfo]:
        async with Client.to(orchestrator, home, terminal) as client:
            return await client.members()

    members = run(ask())
    if terminal.json:
        terminal.record([msgspec.to_builtins(member) for member in members])
        return

    def until(member: MemberInfo) -> str:
        return datetime.fromtimestamp(member.until, UTC).strftime("%Y-%m-%d %H:%M UTC") if member.until else ""

    def role(member: MemberInfo) -> str:
        if member.role != "join":
            return member.role
        return f"invitation for a {member.grants}, {'any number' if member.uses < 0 else member.uses} left"

    rows = [(member.id, role(member), member.fingerprint, until(member)) for member in members]
    terminal.table(("id", "role", "fingerprint", "until"), rows)


@app.command("invite", cls=Command)
def invite(
    client: Annotated[bool, typer.Option("--client", help="For a command line, not for a PNode.")] = False,
    uses: Annotated[int, typer.Option(min=1, metavar="N", help="How often it may be used.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, metavar="HOURS", help="How long it is good for.")] = 24.0,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Make a token and print the command that uses it. Whoever has the token gets in."""
    import msgspec

    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal
    from wire.messages import InviteInfo

    terminal = Terminal(output.form)

    async def ask() -> InviteInfo:
        async with Client.to(orchestrator, home, terminal) as here:
            return await here.invite("client" if client else "pnode", uses, hours * 3600)

    made = run(ask())
    if terminal.json:
        terminal.record(msgspec.to_builtins(made))
        return
    command = f"dcnr context join NAME {made.token}" if client else f"dcnr pnode --join {made.token}"
    terminal.raw(f"{command}\n")  # in one line, however narrow the terminal


@app.command("revoke", cls=Command)
def revoke(
    member: Annotated[str, typer.Argument(metavar="ID", help="An id or a fingerprint of dcnr node ls.")],
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Let somebody in no longer, from the next message on."""
    import msgspec

    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal
    from wire.messages import MemberInfo

    terminal = Terminal(output.form)

    async def ask() -> MemberInfo:
        async with Client.to(orchestrator, home, terminal) as client:
            return await client.revoke(member)

    gone = run(ask())
    if terminal.json:
        terminal.record(msgspec.to_builtins(gone))
    terminal.line(f"revoked {gone.id} ({gone.role}, {gone.fingerprint})")


def keys(home: HomeOption = None, output: OutputOption = Output.text) -> None:
    """Show the fingerprints of this home folder's keys; makes them if there are none."""
    from cli.context import home_folder
    from cli.terminal import Terminal
    from wire.keys import fingerprint, load_or_make

    terminal, folder = Terminal(output.form), home_folder(home)
    found = [
        (what, fingerprint(load_or_make(place).public), str(place))
        for what, place in (("orchestrator", folder), ("client", folder / "client"))
    ]
    if terminal.json:
        terminal.record([{"of": what, "fingerprint": mark, "home": place} for what, mark, place in found])
        return
    terminal.table(("of", "fingerprint", "in"), found)
