"""`dcnr verify`: the same numbers on many processes as in one, or a failure that says where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import NetworkArgument, Output, OutputOption, SetsOption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cli.cluster import Cluster
    from cli.preparing import Prepared
    from cli.terminal import Terminal
    from cli.verifying import Reference, Verdict
    from wire.messages import CodedEdges


def verify(
    network: NetworkArgument,
    pnodes: Annotated[int, typer.Option("--pnodes", "-n", min=1, max=64, help="How many PNode processes.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to compare.")] = 50,
    placements: Annotated[
        str, typer.Option(metavar="KIND", help="planner, or random:K for K random placements; both: planner,random:K.")
    ] = "planner",
    microbatches: Annotated[
        str, typer.Option(metavar="M,M…", help="Splits of the batch to check; default: the network file's.")
    ] = "",
    against: Annotated[
        int,
        typer.Option(
            "--against-microbatches",
            min=0,
            metavar="M",
            help="Compare with a one-process run of this split: the first step has to agree within 1e-6 relative.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random placements.")] = 0,
    sets: SetsOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder (logs).")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Train on real PNode processes over TCP and in this one process, and compare each step bit for bit.

    Prints the largest difference in loss, gradients and weights; anything but exactly 0 fails with exit code 1. With
    codecs, this process rounds on the edges that the PNodes code; it does not compare with a run without codecs.
    """
    import shutil
    import tempfile
    from pathlib import Path

    from cli.running import undisturbed
    from cli.terminal import Terminal

    terminal = Terminal(output.form)
    kinds, splits = _kinds(placements), _splits(microbatches)
    folder = Path(tempfile.mkdtemp(prefix="dcnr-verify-"))
    try:
        verdicts = _verify(folder, network, pnodes, steps, kinds, splits, against, seed, sets or [], terminal)
    finally:
        if keep:
            terminal.line(f"kept {folder}")
        else:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)
    _report(terminal, network, verdicts, against)


def _kinds(text: str) -> list[str]:
    import re

    from wire.errors import UsageError

    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    for kind in kinds:
        if not re.fullmatch(r"planner|random:[1-9][0-9]{0,3}", kind):
            raise UsageError(f"{kind!r} is no kind of placement", hint="planner or random:20")
    return kinds or ["planner"]


def _splits(text: str) -> list[int]:
    from wire.errors import UsageError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{text!r} is no list of microbatch counts", hint="--microbatches 1,2,4")
    return [int(part) for part in parts]


def _verify(
    folder: Path,
    network: str,
    pnodes: int,
    steps: int,
    kinds: list[str],
    splits: list[int],
    against: int,
    seed: int,
    sets: list[str],
    terminal: Terminal,
) -> list[Verdict]:
    from cli.bars import counting
    from cli.cluster import start, stop, threads_per_pnode
    from cli.preparing import Overrides, prepare
    from cli.running import run
    from cli.starting import data_cache
    from cli.verifying import run_reference
    from networks.codecs import asks_for_codec

    threads = threads_per_pnode(pnodes)
    runs: list[tuple[Prepared, Reference | Callable[[Sequence[CodedEdges]], Reference]]] = []
    for split in splits or [0]:
        chosen = [*sets, f"train.steps={steps}", "train.checkpoint.every=0"]
        chosen += [f"train.microbatches={split}"] if split else []
        prepared = prepare(network, Overrides.of(chosen), terminal, cache=data_cache())
        other = prepared
        if against:
            other = prepare(
                network, Overrides.of([*chosen, f"train.microbatches={against}"]), terminal, cache=data_cache()
            )
        if asks_for_codec(prepared.network.graph, prepared.network.recipe.codec):
            runs.append((prepared, _rounding(other, folder, steps, threads)))
            continue
        with counting(terminal, f"one process, {other.network.recipe.microbatches} microbatches", steps) as moved:
            reference = run_reference(
                other, folder / f"reference-{len(runs)}", steps=steps, threads=threads, moved=moved
            )
        runs.append((prepared, reference))
    with terminal.waiting(f"starting {pnodes} PNode processes"):
        cluster = start(folder / "cluster", pnodes=pnodes, threads=threads)
    try:
        return run(_compare(cluster, runs, kinds, pnodes, steps, seed, not against, terminal), grace_s=None)
    finally:
        stop(cluster)


def _rounding(
    prepared: Prepared, folder: Path, steps: int, threads: int
) -> Callable[[Sequence[CodedEdges]], Reference]:
    """What makes the reference of a session once it is known which edges it codes."""
    import tempfile
    from pathlib import Path

    from cli.verifying import run_reference

    def make(codecs: Sequence[CodedEdges]) -> Reference:
        here = Path(tempfile.mkdtemp(prefix="reference-", dir=folder))
        return run_reference(prepared, here, steps=steps, threads=threads, moved=lambda step: None, codecs=codecs)

    return make


async def _compare(
    cluster: Cluster,
    runs: list[tuple[Prepared, Reference | Callable[[Sequence[CodedEdges]], Reference]]],
    kinds: list[str],
    pnodes: int,
    steps: int,
    seed: int,
    exact: bool,
    terminal: Terminal,
) -> list[Verdict]:
    from cli.bars import counting
    from cli.client import Client
    from cli.commands.cluster import wait_until_joined
    from cli.verifying import check, placements, register

    found: list[Verdict] = []
    await wait_until_joined(cluster, terminal)
    async with Client(cluster.address, terminal, timeout_s=60.0) as client:
        for prepared, reference in runs:
            await register(client, cluster.store, prepared, terminal)
            todo = [entry for kind in kinds for entry in placements(prepared, kind, pnodes, seed)]
            for index, (name, placement) in enumerate(todo):
                split = prepared.network.recipe.microbatches
                text = f"{pnodes} PNodes, {split} microbatches, {name} ({index + 1} of {len(todo)})"
                with counting(terminal, text, steps) as moved:
                    verdict = await check(
                        client, cluster.store, prepared, reference, name, placement,
                        pnodes=pnodes, steps=steps, exact=exact, terminal=terminal, moved=moved,
                    )  # fmt: skip
                found.append(verdict)
                if not terminal.json:
                    _line(terminal, verdict)
    return found


def _line(terminal: Terminal, verdict: Verdict) -> None:
    from cli.comparing import KINDS
    from cli.units import plural, size

    gaps = verdict.comparison.gaps
    numbers = "  ".join(f"{kind} {gaps[kind].absolute:g}" for kind in KINDS)
    coded = "".join(f", {codec} on {plural(count, 'edge')}" for codec, count in verdict.coded.items())
    word = "equal" if verdict.good else "DIFFERENT"
    terminal.line(
        f"{word:<9}  {verdict.placement:<10} {plural(verdict.microbatches, 'microbatch')}, "
        f"{plural(verdict.machines, 'PNode')}, {plural(verdict.stages, 'stage')}, "
        f"{size(verdict.bytes_crossed)} crossed{coded}:  {numbers}",
        style="green" if verdict.good else "bold red",
    )


def _report(terminal: Terminal, network: str, verdicts: list[Verdict], against: int) -> None:
    from cli.comparing import KINDS
    from cli.verifying import RELATIVE, summary

    good, worst = summary(verdicts)
    steps = verdicts[0].comparison.steps if verdicts else 0
    if terminal.json:
        record = {"network": network, "steps": steps, "good": good, "runs": [verdict.record() for verdict in verdicts]}
        terminal.record({**record, **{f"{kind}_difference": worst[kind] for kind in KINDS}})
    numbers = ", ".join(f"{kind} {worst[kind]:g}" for kind in KINDS)
    terminal.line(f"{network}, {steps} steps, largest differences: {numbers}", style="bold")
    if against:
        relative = max((verdict.first.relative for verdict in verdicts), default=0.0)
        terminal.line(f"first step against {against} microbatches: {relative:.2e} relative (at most {RELATIVE:g})")
    if not good:
        for verdict in verdicts:
            for kind in KINDS:
                gap = verdict.comparison.gaps[kind]
                if not verdict.good and gap.absolute:
                    terminal.line(f"  {verdict.placement}: {kind} differs most at {gap.where}: {gap.absolute:g}")
        raise typer.Exit(1)
