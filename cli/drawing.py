"""Tables of what a network is and where it runs: for `net show`, `net types`, `plan` and `inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli import units
from cli.terminal import Terminal

if TYPE_CHECKING:
    from networks.load import Network
    from networks.summary import NodeRow
    from networks.types import NodeType
    from wire.messages import PlanInfo, VNodeReport


def graph_record(network: Network) -> dict[str, Any]:
    """A network's graph with its costs, for JSON."""
    from networks.summary import summarize

    summary = summarize(network.graph)
    totals = summary.totals
    return {
        "network": summary.name,
        "digest": network.digest,
        "file": network.graph.file,
        "vars": dict(network.vars),
        "inputs": dict(summary.inputs),
        "outputs": dict(summary.outputs),
        "parameters": totals.parameters,
        "trainable": totals.trainable,
        "parameter_bytes": totals.parameter_bytes,
        "forward_flops": totals.forward_flops,
        "backward_flops": totals.backward_flops,
        "edge_bytes": totals.edge_bytes,
        "nodes": [
            {
                "id": row.id,
                "type": row.type,
                "tie": row.tie or None,
                "pnode": row.pnode or None,
                "frozen": row.frozen,
                "outputs": dict(row.outputs),
                "parameters": row.parameters,
                "buffers": row.buffers,
                "forward_flops": row.forward_flops,
                "backward_flops": row.backward_flops,
            }
            for row in summary.nodes
        ],
        "edges": [
            {
                "from": row.source_port,
                "to": row.target_port,
                "tensor": row.tensor,
                "size_bytes": row.size_bytes,
                **({"codec": row.codec} if row.codec else {}),
            }
            for row in summary.edges
        ],
        "recipe": network.recipe.model_dump(mode="json") if network.recipe is not None else None,
    }


def show_graph(terminal: Terminal, network: Network) -> None:
    """Inputs, nodes with shapes and costs, outputs, totals."""
    from networks.summary import summarize

    summary = summarize(network.graph)
    terminal.line(f"{summary.name}  {network.graph.file}", style="bold")
    for name, spec in summary.inputs:
        terminal.line(f"  input   {name}: {spec}")
    for name, port in summary.outputs:
        terminal.line(f"  output  {name}: {port}")
    rows = [
        (
            row.id, _kind(row), ", ".join(row.sources), ", ".join(shape for _, shape in row.outputs),
            units.count(row.parameters) if row.parameters else "", units.compact(row.forward_flops),
            units.size(row.output_bytes),
        )
        for row in summary.nodes
    ]  # fmt: skip
    columns = ("node", "type", "from", "gives", "parameters>", "FLOPs>", "out>")
    terminal.table(columns, rows, spare=("from", "FLOPs", "out"))
    totals = summary.totals
    parts = [
        units.plural(totals.nodes, "node"),
        units.plural(totals.edges, "edge"),
        f"{units.count(totals.parameters)} parameters ({units.size(totals.parameter_bytes)})",
        f"{units.compact(totals.forward_flops, gap=True)}FLOPs forward and "
        f"{units.compact(totals.backward_flops, gap=True)}FLOPs backward for each sample",
    ]
    if totals.trainable != totals.parameters:
        parts.insert(3, f"{units.count(totals.trainable)} of them trainable")
    terminal.line(", ".join(parts))


def _kind(row: NodeRow) -> str:
    """A node's type, with what is special about it: whose weight it shares, that it is frozen, where it has to be."""
    tie = f" = {row.tie}" if row.tie else ""
    return row.type + tie + (" frozen" if row.frozen else "") + (f" on {row.pnode}" if row.pnode else "")


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
