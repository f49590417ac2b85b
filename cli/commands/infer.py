"""`dcnr infer`, `generate` and `eval`: using a network where it is deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import HomeOption, OrchestratorOption, Output, OutputOption, TimeoutOption

if TYPE_CHECKING:
    from cli.evaluation import Score
    from cli.inference import Answer

ModelArgument = Annotated[
    str, typer.Argument(metavar="NETWORK", help="A session's id, or a network's (then its newest session).")
]


def infer(
    network: ModelArgument,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="FILE", help=".npy, .npz or .json; NAME=FILE for one of several inputs."),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="Text, for a network with a tokenizer.")] = None,
    want: Annotated[
        list[str] | None,
        typer.Option("--want", metavar="OUTPUT", help="An output to ask for; default: all but the loss."),
    ] = None,
    save: Annotated[str, typer.Option(metavar="FILE", help="Write the outputs to .npy, .npz or .json.")] = "",
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.text,
) -> None:
    """Send one input through a network and show what comes out."""
    from cli.client import absolute
    from cli.inputs import preview
    from cli.inputs import save as save_outputs
    from cli.running import run
    from cli.terminal import Terminal
    from cli.using import infer_once
    from wire.errors import UsageError

    if not input and text is None:
        raise UsageError("nothing to infer from", hint="--input x.npy or --text 'some text'")
    terminal = Terminal(output.form)
    answers: dict[str, Answer] = run(
        infer_once(network, input or [], text, want or [], terminal, orchestrator, home, timeout)
    )
    values = {name: answer.value for name, answer in answers.items()}
    if save:
        save_outputs(absolute(save), values)
    if terminal.json:
        record = {name: {"shape": list(value.shape), "values": value.tolist()} for name, value in values.items()}
        terminal.record({"step": max(answer.step for answer in answers.values()), "outputs": record}, indent=False)
        return
    for name, answer in answers.items():
        terminal.line(f"{name}  {preview(answer.value)}")
        if name == "logits" and answer.value.ndim == 2:
            terminal.line(f"{name}  likeliest class: {', '.join(str(row.argmax()) for row in answer.value[:16])}")
    terminal.line(f"weights after step {max(answer.step for answer in answers.values())}", style="dim")
    if save:
        terminal.line(f"wrote {save}")


def generate(
    network: ModelArgument,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text to go on from.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The same, as an option.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, max=1_000_000, help="How many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Only among the likeliest that make up p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal texts.")] = 0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute the whole text anew for each token.")] = False,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.text,
) -> None:
    """Let a language model go on from a text, token by token."""
    from cli.running import run
    from cli.sampling import Sampling
    from cli.terminal import Terminal
    from cli.units import duration
    from cli.using import generate_text
    from wire.errors import UsageError

    if text is not None and prompt is not None:
        raise UsageError("the text is given twice", hint="TEXT or --prompt")
    start = text if text is not None else prompt if prompt is not None else "\n"
    terminal = Terminal(output.form)
    sampling = Sampling(temperature, top_k, top_p)
    sampling.check()
    result = run(
        generate_text(
            network, start, max_tokens, sampling, terminal, orchestrator, home, timeout, seed=seed, cache=not no_cache
        )
    )
    if terminal.json:
        terminal.record(result.record(), indent=False)
        return
    terminal.line()
    terminal.line(
        f"{len(result.ids)} tokens, {duration(result.per_token_s)} each (the first {duration(result.first_s)}), "
        f"KV cache {'off' if no_cache else 'on'}, weights after step {result.step}",
        style="dim",
    )


def evaluate(
    network: ModelArgument,
    split: Annotated[str, typer.Option(help="val or train.")] = "val",
    limit: Annotated[int, typer.Option(min=0, help="At most so many samples; 0: all.")] = 0,
    orchestrator: OrchestratorOption = None,
    home: HomeOption = None,
    timeout: TimeoutOption = 60.0,
    output: OutputOption = Output.text,
) -> None:
    """Measure loss (and perplexity or accuracy) over the whole validation split."""
    from cli.running import run
    from cli.terminal import Terminal
    from cli.units import count, duration
    from cli.using import evaluate_split
    from wire.errors import UsageError

    if split not in ("val", "train"):
        raise UsageError(f"there is no split {split!r}", hint="val or train")
    terminal = Terminal(output.form)
    score: Score = run(evaluate_split(network, split, limit, terminal, orchestrator, home, timeout))
    if terminal.json:
        terminal.record(score.record(), indent=False)
        return
    terminal.line(
        f"{score.session}  {split} loss {score.loss:.4f}"
        + (f"  accuracy {100 * score.accuracy:.2f} %" if score.accuracy is not None else "")
        + (f"  perplexity {score.perplexity:.2f}" if score.perplexity is not None else ""),
        style="bold",
    )
    terminal.line(
        f"{count(score.samples)} samples, {count(score.targets)} targets in {duration(score.seconds)}, "
        f"weights after step {score.step}",
        style="dim",
    )
