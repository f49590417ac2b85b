"""`dcnr status`: the cluster, its PNodes and what runs on them, who is not well, and who waits for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption, TimeoutOption

if TYPE_CHECKING:
    from cli.terminal import Terminal
    from wire.messages import ClusterInfo, PNodeInfo, SessionInfo

AT_REST = frozenset({"created", "paused", "stopped", "finished", "failed"})


def status(
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 15.0,
    output: OutputOption = Output.text,
) -> None:
    """Show the cluster: orchestrator, PNodes, what each computes, and who waits for whom."""
    from cli.client import Client
    from cli.running import run
    from cli.terminal import Terminal

    terminal = Terminal(output.form)

    async def show() -> tuple[ClusterInfo, list[PNodeInfo], list[SessionInfo]]:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            return await client.cluster(), await client.pnodes(), await client.sessions()

    info, pnodes, sessions = run(show())
    if terminal.json:
        terminal.record({"cluster": info, "pnodes": pnodes, "sessions": sessions})
        return
    _show_status(terminal, info, pnodes, sessions)


def _show_status(terminal: Terminal, info: ClusterInfo, pnodes: list[PNodeInfo], sessions: list[SessionInfo]) -> None:
    import time

    from cli.units import duration
    from cli.waits import readable

    terminal.line(
        f"cluster {info.cluster}  term {info.term}  up {duration(max(0.0, time.time() - info.started))}  "
        f"pid {info.pid}  store {info.store}"
    )
    for sentence in info.damaged:
        terminal.line(f"damaged: {sentence}", style="yellow")
    show_pnodes(terminal, pnodes)
    if not pnodes:
        terminal.next("dcnr pnode --orchestrator ADDRESS --name p1")
    for node in pnodes:
        if concern := unwell(node):
            terminal.line(concern, style="yellow")
    live = [session for session in sessions if session.deployed or session.state not in AT_REST]
    if live:
        terminal.line()
        show_live(terminal, live)
    for session in sessions:
        if session.state == "recovering":
            for sentence in recovery(session):
                terminal.line(f"{session.session} {sentence}", style="yellow")
        for sentence in readable(session.waiting):
            waits = ": " if " waits for " in sentence else " waits for "
            terminal.line(f"{session.session}{waits}{sentence}", style="yellow")
    idle = [node.pnode for node in pnodes if node.state == "alive" and not node.health and not node.vnodes]
    running = [session.session for session in sessions if session.state == "running"]
    if idle and running:
        terminal.line(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no VNodes", style="dim")
        terminal.next(*(f"dcnr rebalance {name}" for name in running[:3]))


def unwell(node: PNodeInfo) -> str:
    """What is wrong with a PNode, as a sentence; "" if nothing is."""
    if node.state in ("alive", "suspect") and node.health:
        return f"{node.pnode} is unhealthy: {node.health}; it gets no VNodes until it is started anew"
    if node.state == "suspect":
        return f"{node.pnode} is suspected: no sign of life for {node.seen_s:.0f} s"
    return ""


def recovery(session: SessionInfo) -> list[str]:
    """What a recovering session goes through, as sentences."""
    why = f": {session.error}" if session.error else ""
    again = ""
    if session.step > session.committed:
        again = f"; steps {session.committed + 1} to {session.step} will be made again"
    return [f"recovers{why}", f"goes on from step {session.committed}{again}"]


def show_live(terminal: Terminal, sessions: list[SessionInfo]) -> None:
    """The table of the sessions that are deployed or under way."""
    from cli.commands.sessions import STATE_STYLES

    coded = any(info.codecs for info in sessions)
    rows = [
        (
            info.session, info.state, info.epoch, f"{info.step}/{info.steps}", info.committed or "-",
            info.recoveries or "-", ",".join(info.pnodes) or "-", *((info.codecs or "-",) if coded else ()),
        )
        for info in sessions
    ]  # fmt: skip
    styles = {(index, 1): STATE_STYLES.get(info.state, "") for index, info in enumerate(sessions)}
    columns = (
        "session",
        "state",
        "epoch>",
        "step>",
        "saved>",
        "recoveries>",
        "pnodes",
        *(("codecs",) if coded else ()),
    )
    terminal.table(columns, rows, styles=styles, spare=("epoch", "saved", "pnodes"))


def show_pnodes(terminal: Terminal, pnodes: list[PNodeInfo]) -> None:
    """The table of the PNodes."""
    from cli.units import ago, compact, size

    states = ["unhealthy" if node.health and node.state == "alive" else node.state for node in pnodes]
    rows = [
        (
            node.pnode, state, node.compute if node.state == "alive" else "-",
            node.vnodes, ",".join(node.sessions) or "-", node.profile.device,
            node.profile.threads, f"{compact(node.profile.flops, gap=True)}FLOP/s", size(node.rss_bytes),
            f"{node.loop_lag_s * 1000:.1f} ms", ago(node.seen_s), node.profile.host,
        )
        for node, state in zip(pnodes, states, strict=True)
    ]  # fmt: skip
    colours = {"alive": "green", "lost": "red", "unhealthy": "bold red"}
    styles = {(index, 1): colours.get(state, "yellow") for index, state in enumerate(states)}
    columns = ("pnode", "state", "compute", "vnodes>", "sessions", "device", "threads>", "speed>", "memory>", "lag>")
    spare = ("host", "lag", "device", "threads", "memory", "speed", "seen", "sessions")
    terminal.table((*columns, "seen>", "host"), rows, empty="no PNodes", styles=styles, spare=spare)
