"""`dcnr plan` and `inspect`: where a network would run, and how it is where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import (
    HomeOption,
    NetworkArgument,
    OrchestratorOption,
    Output,
    OutputOption,
    SessionArgument,
    SetsOption,
    TimeoutOption,
)

if TYPE_CHECKING:
    from networks.load import Network
    from wire.messages import DeploymentInfo, PlanInfo, SessionInfo, VNodeReport


def plan(
    network: NetworkArgument,
    pnodes: Annotated[int, typer.Option("--pnodes", "-n", min=0, help="Use this many; 0: as many as are best.")] = 0,
    sets: SetsOption = None,
    vocab: Annotated[int, typer.Option(min=0, help="Size of the vocabulary; 0: from the data.")] = 0,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """Show where each VNode would run, the predicted step time, and why. Nothing is deployed."""
    from cli.client import Client
    from cli.commands.net import loaded
    from cli.drawing import show_plan
    from cli.running import run
    from cli.terminal import Terminal
    from wire.ids import new_request_id
    from wire.messages import NetworkInfo, PlanInfo, PlanNetwork, PutNetwork

    terminal = Terminal(output.form)
    client = Client.to(orchestrator, home, terminal, timeout_s=timeout)
    found = loaded(network, sets or [], vocab, terminal)

    async def ask() -> PlanInfo:
        async with client:
            known = {info.network: info.digest for info in await client.networks()}
            if known.get(found.id) != found.digest:
                put = PutNetwork(new_request_id(), found.id, found.id not in known)
                await client.ask(put, NetworkInfo, [found.to_bytes()])
            return await client.ask(PlanNetwork(new_request_id(), found.id, pnodes), PlanInfo)

    result = run(ask())
    if terminal.json:
        terminal.record(result)
        return
    show_plan(terminal, found.id, result)
    terminal.next(f"dcnr train {network}" + (f" --pnodes {pnodes}" if pnodes else ""))


def inspect(
    session: SessionArgument,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.text,
) -> None:
    """Show a session: graph, placement, and each VNode's shapes, step, norms, times and bytes."""
    from cli.client import Client, store_of
    from cli.commands.sessions import show_sessions
    from cli.drawing import show_reports
    from cli.running import run
    from cli.terminal import Terminal, jsonable
    from wire.ids import new_request_id
    from wire.messages import InspectSession, VNodeReport

    terminal = Terminal(output.form)

    async def ask() -> tuple[SessionInfo, DeploymentInfo | None, list[VNodeReport], Network | None]:
        async with Client.to(orchestrator, home, terminal, timeout_s=timeout) as client:
            info = await client.session(session)
            if not info.deployed:
                return info, None, [], None
            deployment = await client.deployment(info.session)
            message = InspectSession(new_request_id(), info.session)
            reports = await client.ask(message, list[VNodeReport])
            from networks.load import Network
            from storage.blobs import Blobs

            async with store_of(deployment.store) as store:
                network = Network.from_bytes(await Blobs(store).get(deployment.network_digest))
            return info, deployment, reports, network

    info, deployment, reports, network = run(ask())
    shapes: dict[str, str] = {}
    edges: list[str] = []
    if network is not None:
        costs = network.graph.costs
        shapes = {str(node): ", ".join(map(str, cost.outputs.values())) for node, cost in costs.items()}
        edges = [str(edge) for edge in network.graph.edges]
    if terminal.json:
        vnodes = [{**jsonable(report), "gives": shapes.get(report.vnode, "")} for report in reports]
        placement = deployment.placement if deployment else {}
        terminal.record({"session": info, "placement": placement, "edges": edges, "vnodes": vnodes})
        return
    show_sessions(terminal, [info])
    if deployment is None:
        terminal.line(f"{info.session} is not deployed: its VNodes are in the store only (step {info.committed})")
        terminal.next(f"dcnr resume {info.session}", f"dcnr net show {info.network}")
        return
    by_pnode: dict[str, int] = {}
    for pnode in deployment.placement.values():
        by_pnode[pnode] = by_pnode.get(pnode, 0) + 1
    placed = ", ".join(f"{pnode} {number}" for pnode, number in by_pnode.items())
    terminal.line(f"epoch {deployment.epoch}  placement: {placed}  digest {deployment.network_digest[:12]}")
    show_reports(terminal, reports, shapes)
