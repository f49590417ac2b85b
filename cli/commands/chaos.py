"""`dcnr chaos`: train on a cluster of its own, hurt it all the while, and show that nothing was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Output, OutputOption, SetsOption

if TYPE_CHECKING:
    from cli.chaos.trial import Trial
    from cli.preparing import Prepared
    from cli.terminal import Terminal


def chaos(
    network: Annotated[
        str, typer.Argument(metavar="[NETWORK]", help="A shipped network's name, or a file.")
    ] = "gpt-char",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long to hurt it.")] = 3.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is done when; 0: drawn, and shown.")] = 0,
    pnodes: Annotated[int, typer.Option("--pnodes", "-n", min=2, max=16, help="How many PNode processes.")] = 4,
    faults: Annotated[
        str,
        typer.Option(
            metavar="KIND,KIND=ODDS…",
            help="kill, pause, double, orchestrator, usurp, cli, drop, delay, throttle, cut, oneway, flip; or all.",
        ),
    ] = "",
    gap: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Mean time between two faults.")] = 3.0,
    lease: Annotated[
        float, typer.Option(min=0.5, max=60, metavar="SECONDS", help="A PNode is lost after so long without a sign.")
    ] = 2.0,
    store: Annotated[
        str, typer.Option(metavar="URL", help="Where checkpoints go; default: a folder that is deleted at the end.")
    ] = "",
    sets: SetsOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder (logs).")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Train on a private cluster, kill, pause and cut its processes, and compare the end with an undisturbed run.

    Starts its own processes in a temporary home and ends all of them. Exit code 0: final hash and all losses are equal.
    The comparison is one process that makes the same steps afterwards, so all of it takes longer than --minutes.
    """
    import random
    import shlex
    import shutil
    import tempfile
    from pathlib import Path

    from cli.chaos.engine import Rules
    from cli.chaos.faults import EVERYWHERE, odds_of
    from cli.chaos.fleet import Shape
    from cli.chaos.trial import Trial
    from cli.cluster import threads_per_pnode
    from cli.terminal import Terminal

    terminal = Terminal(output.form)
    odds = odds_of(faults, EVERYWHERE)
    seed = seed or random.SystemRandom().randrange(1, 10**6)
    folder = Path(tempfile.mkdtemp(prefix="dcnr-chaos-"))
    try:
        prepared = _prepared(network, sets or [], terminal)
        shape = Shape(folder, pnodes, lease, store, threads_per_pnode(pnodes), seed)
        rules = Rules(seconds=60 * minutes, stuck_s=max(120.0, 20 * lease), pause_at_end=True)
        again = f"dcnr chaos {network} --minutes {minutes:g} --seed {seed} --pnodes {pnodes} --lease {lease:g}"
        again += f" --gap {gap:g}" + (f" --faults {faults}" if faults else "")
        again += "".join(f" --set {shlex.quote(text)}" for text in sets or [])
        terminal.line(f"seed {seed} (again: {again})", style="bold")
        if terminal.json:
            terminal.record({"event": "begin", "seed": seed, "again": again}, indent=False)
        good = _undergo(Trial(shape, seed, odds, rules, gap, members=max(1, pnodes - 1)), prepared, terminal)
    finally:
        if keep:
            terminal.line(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not good:
        raise typer.Exit(1)


def _prepared(network: str, sets: list[str], terminal: Terminal) -> Prepared:
    """The network with a run that is long enough and saves often, unless told otherwise."""
    from cli.preparing import Overrides, prepare
    from cli.starting import data_cache, describe

    usual = {"train.steps": "1000000", "train.checkpoint.every": "10"}
    given = {text.partition("=")[0].strip() for text in sets}
    chosen = [*sets, *(f"{key}={value}" for key, value in usual.items() if key not in given)]
    prepared = prepare(network, Overrides.of(chosen), terminal, cache=data_cache())
    describe(prepared, terminal)
    return prepared


def _undergo(trial: Trial, prepared: Prepared, terminal: Terminal) -> bool:
    """Hurt it, compare, report; whether all is as it must be."""
    from dataclasses import replace

    from cli.bars import counting
    from cli.chaos.display import Display, report
    from cli.chaos.reference import undisturbed
    from cli.chaos.trial import undergo
    from cli.running import run

    display = Display(terminal, trial.rules.seconds)
    with display.moving():
        told = replace(trial, told=display.told())
        survived = run(undergo(told, prepared, terminal, said=display.said), grace_s=None)
    outcome = survived.outcome
    terminal.line(f"all processes have ended; the run is saved at step {outcome.step}", style="dim")
    problems, steps = list(outcome.breaches), outcome.step
    if steps:
        with counting(terminal, f"the same {steps} steps in one process, undisturbed", steps) as moved:
            found = undisturbed(prepared, steps, threads=trial.shape.threads, moved=moved)
        problems = survived.sight.compare(found.losses, found.hashes[steps], steps)
        problems += [text for text in outcome.breaches if text not in problems]
    report(terminal, outcome, problems, steps)
    return bool(steps) and not problems
