"""Tables of what a network is and where it runs: for `net show`, `net types`, `plan` and `inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli import units
from cli.terminal import Terminal

if TYPE_CHECKING:
    from networks.graph import Graph
    from networks.load import Network
    from networks.types import NodeType
    from wire.messages import PlanInfo, VNodeReport


def graph_record(network: Network) -> dict[str, Any]:
    """A network's graph with its costs, for JSON."""
    graph = network.graph
    return {
        "network": graph.name,
        "digest": network.digest,
        "file": graph.file,
        "vars": dict(network.vars),
        "inputs": {name: str(spec) for name, spec in graph.inputs.items()},
        "outputs": {name: str(port) for name, port in graph.outputs.items()},
        "parameters": network.parameters,
        "forward_flops": sum(cost.forward_flops for cost in graph.costs.values()),
        "nodes": [
            {
                "id": node.id,
                "type": node.type,
                "tie": node.tie,
                "outputs": {port: str(spec) for port, spec in graph.costs[node.id].outputs.items()},
                "parameters": graph.costs[node.id].parameter_count,
                "forward_flops": graph.costs[node.id].forward_flops,
                "backward_flops": graph.costs[node.id].backward_flops,
            }
            for node in graph.nodes
        ],
        "edges": [
            {"from": str(edge.src), "to": str(edge.dst), "size_bytes": edge_bytes(graph, edge.index)}
            for edge in graph.edges
        ],
        "recipe": network.recipe.model_dump(mode="json") if network.recipe is not None else None,
    }


def edge_bytes(graph: Graph, index: int) -> int:
    """Bytes of one sample's value on an edge."""
    edge = graph.edges[index]
    if edge.src.node in graph.inputs:
        return graph.inputs[edge.src.node].size_bytes(1)
    return graph.costs[edge.src.node].outputs[edge.src.port].size_bytes(1)


def show_graph(terminal: Terminal, network: Network) -> None:
    """Inputs, nodes with shapes and costs, outputs, totals."""
    graph = network.graph
    terminal.line(f"{graph.name}  {graph.file}", style="bold")
    for name, spec in graph.inputs.items():
        terminal.line(f"  input   {name}: {spec}")
    for name, port in graph.outputs.items():
        terminal.line(f"  output  {name}: {port}")
    into = graph.in_edges()
    rows = []
    for node in graph.nodes:
        cost = graph.costs[node.id]
        shapes = ", ".join(str(spec) for spec in cost.outputs.values())
        sources = ", ".join(str(edge.src) for edge in into[node.id])
        size = sum(spec.size_bytes(1) for spec in cost.outputs.values())
        rows.append(
            (
                node.id, node.type + (f" = {node.tie}" if node.tie else ""), sources, shapes,
                units.count(cost.parameter_count) if cost.parameter_count else "",
                units.compact(cost.forward_flops), units.size(size),
            )
        )  # fmt: skip
    columns = ("node", "type", "from", "gives", "parameters>", "FLOPs>", "out>")
    terminal.table(columns, rows, spare=("from", "FLOPs", "out"))
    parameters = network.parameters
    forward = sum(cost.forward_flops for cost in graph.costs.values())
    terminal.line(
        f"{units.plural(len(graph.nodes), 'node')}, {units.plural(len(graph.edges), 'edge')}, "
        f"{units.count(parameters)} parameters, {units.compact(forward, gap=True)}FLOPs forward for each sample"
    )


def types_record(types: Mapping[str, NodeType]) -> list[dict[str, Any]]:
    """The node types with the JSON Schema of their parameters."""
    return [
        {"type": name, "about": kind.doc, "parameters": kind.params.model_json_schema().get("properties", {})}
        for name, kind in sorted(types.items())
    ]


def show_types(terminal: Terminal, types: Mapping[str, NodeType], *, detailed: bool) -> None:
    """One line for each type, or with `detailed` its parameters."""
    if not detailed:
        rows = []
        for name, kind in sorted(types.items()):
            fields = kind.params.model_fields
            needed = " ".join(field for field, info in fields.items() if info.is_required())
            optional = " ".join(f"[{field}]" for field, info in fields.items() if not info.is_required())
            rows.append((name, f"{needed} {optional}".strip(), kind.doc))
        terminal.table(("type", "parameters", "about"), rows)
        terminal.next("dcnr net types attention")
        return
    for name, kind in types.items():
        terminal.line(f"{name}: {kind.doc}", style="bold")
        parameters: list[tuple[str, ...]] = []
        for field, info in kind.params.model_fields.items():
            default = "needed" if info.is_required() else repr(info.get_default(call_default_factory=True))
            annotation = str(getattr(info.annotation, "__name__", info.annotation)).replace("typing.", "")
            parameters.append((info.alias or field, annotation, default, info.description or ""))
        terminal.table(("parameter", "type", "default", "about"), parameters, empty="it has no parameters")


def show_plan(terminal: Terminal, network: str, plan: PlanInfo) -> None:
    """A placement, machine by machine, with the time and bytes it predicts and why."""
    by_pnode: dict[str, list[str]] = {}
    for vnode, pnode in plan.placement.items():
        by_pnode.setdefault(pnode, []).append(vnode)
    terminal.line(
        f"{network}: {units.duration(plan.step_s)} for each step on {units.plural(len(by_pnode), 'PNode')}",
        style="bold",
    )
    rows = [
        (
            pnode, len(vnodes), units.duration(plan.compute_s.get(pnode, 0.0)),
            units.size(plan.memory_bytes.get(pnode, 0)), runs(vnodes),
        )
        for pnode, vnodes in by_pnode.items()
    ]  # fmt: skip
    terminal.table(("pnode", "vnodes>", "compute>", "memory>", "which"), rows)
    for way, size in plan.wire_bytes.items():
        terminal.line(f"  {way}: {units.size(size)} each step")
    for reason in plan.reasons:
        terminal.line(f"  because {reason}", style="dim")


def runs(vnodes: Sequence[str], limit: int = 6) -> str:
    """A few names out of many."""
    if len(vnodes) <= limit:
        return " ".join(vnodes)
    return " ".join([*vnodes[: limit - 2], "…", vnodes[-1]])


def show_reports(terminal: Terminal, reports: Sequence[VNodeReport], outputs: Mapping[str, str]) -> None:
    """The VNodes of a deployed session as they are now. `outputs`: VNode -> shape of what it gives."""
    rows = [
        (
            report.vnode, report.type, report.pnode, report.stage, outputs.get(report.vnode, ""),
            " ".join(f"{name}({','.join(map(str, shape))})" for name, shape in report.parameters.items()),
            units.count(report.parameter_count) if report.parameter_count else "", report.step,
            f"{report.weight_norm:.4g}" if report.parameter_count else "",
            f"{report.gradient_norm:.3g}" if report.parameter_count else "",
            units.duration(report.forward_s), units.duration(report.backward_s), units.size(report.bytes_out),
        )
        for report in reports
    ]  # fmt: skip
    columns = ("vnode", "type", "pnode", "stage>", "gives", "parameters", "count>", "step>", "|w|>", "|g|>")
    spare = ("parameters", "count", "step", "|w|", "stage", "type", "gives", "sent")
    terminal.table((*columns, "forward>", "backward>", "sent>"), rows, empty="it is not deployed", spare=spare)
