"""`dcnr train --local`: the same graph as one stage in this process, without a cluster, a link or a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.client import absolute
from cli.cluster import available_cores
from cli.preparing import Overrides, Prepared, prepare
from cli.progress import view
from cli.runstate import RunState
from cli.starting import data_cache, describe
from cli.terminal import Terminal
from wire.errors import DCNRError
from wire.messages import StepReport

if TYPE_CHECKING:
    from torch import Tensor

    from pnode.data import BatchSource
    from pnode.reference import Reference, Step


def train_local(
    source: str,
    overrides: Overrides,
    *,
    until: int,
    threads: int,
    every_s: float,
    save: str,
    terminal: Terminal,
) -> None:
    """Train to the end (or `until`) and show it; with `save`, export the result.

    Raises: `BadFileError`; `DCNRError` when a value stops being finite.
    """
    from pnode.waiting import sleep_while_waiting

    sleep_while_waiting()
    from cli.exporting import check_target
    from pnode.reference import train

    if save:
        check_target(absolute(save), force=False)
    prepared = prepare(source, overrides, terminal, cache=data_cache())
    describe(prepared, terminal)
    recipe = prepared.network.recipe
    steps = min(until or recipe.steps, recipe.steps)
    state = RunState(
        prepared.network.id, steps, state="running", unit="tokens" if prepared.packed.tokenizer_bytes else "samples"
    )
    shown = view(terminal, every_s=every_s)

    def on_step(done: Step) -> None:
        report = report_of(done)
        state.take([report])
        shown.steps(state, [report])

    shown.begin(state)
    verdict = "interrupted"
    try:
        trained = train(
            prepared.network, batches(prepared), steps=steps, threads=threads or available_cores(), on_step=on_step
        )
        verdict = "finished" if steps == recipe.steps else "stopped"
    except DCNRError:
        verdict = "failed"
        raise
    finally:
        shown.end(state, verdict)
    if save:
        _save(prepared, trained, steps, save, terminal)
    elif steps:
        terminal.next(f"dcnr train {source}", f"dcnr train {source} --local --save FOLDER")


def report_of(done: Step) -> StepReport:
    """A step of the reference as a report of a session's."""
    return StepReport(
        done.step, done.loss, done.count, done.gradient_norm, done.lr, done.seconds, done.samples, ids_digest=""
    )


def batches(prepared: Prepared) -> BatchSource:
    """The batches of a prepared network, in this process."""
    from pnode.data import open_source

    network, packed = prepared.network, prepared.packed
    return open_source(
        packed.path, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs, digest=packed.digest
    )


def _save(prepared: Prepared, trained: Reference, steps: int, save: str, terminal: Terminal) -> None:
    from cli.exporting import weights_of, write_folder

    weights: dict[str, Tensor] = {}
    for vnode, tensors in trained.state().items():
        weights |= weights_of(vnode, tensors)
    about = {"session": "", "step": str(steps), "data": prepared.packed.info}
    done = write_folder(absolute(save), prepared.network, weights, prepared.packed.tokenizer_bytes, about)
    terminal.line(f"wrote {done.folder}")
