"""What `infer`, `generate` and `eval` do once they know what is wanted: deploy if need be, ask, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cli.bars import counting
from cli.client import Client, store_of
from cli.evaluation import Rows, Score, right_answers, score
from cli.generation import generate
from cli.inference import Answer, Router, deployed
from cli.inputs import fit, read_arrays
from cli.sampling import Sampling
from cli.terminal import Terminal
from wire.errors import DCNRError, UsageError
from wire.messages import DeploymentInfo

if TYPE_CHECKING:
    from networks.load import Network
    from pnode.data import Tokenizer

LOSS, LOGITS = "loss", "logits"


@dataclass(frozen=True, slots=True)
class Model:
    """A deployed network as a client sees it."""

    deployment: DeploymentInfo
    network: Network
    tokenizer: Tokenizer | None

    @property
    def loss_output(self) -> str | None:
        """The output that is the loss node's."""
        graph = self.network.graph
        return next((name for name, port in graph.outputs.items() if port.node == graph.loss), None)

    def wanted(self, names: Sequence[str]) -> list[str]:
        """The outputs asked for, or all but the loss. Raises `UsageError`."""
        known = list(self.network.graph.outputs)
        for name in names:
            if name not in known:
                raise UsageError(f"{self.network.id} has no output {name!r}", hint=f"it has {', '.join(known)}")
        return list(names) or [name for name in known if name != self.loss_output]

    def free_inputs(self) -> list[str]:
        """Inputs that something other than the loss reads: what has to be given to get the other outputs."""
        graph = self.network.graph
        readers = graph.out_edges()
        return [
            name
            for name in graph.inputs
            if any(
                edge.dst.node != graph.loss for port, edges in readers.items() if port.node == name for edge in edges
            )
        ]

    def text_input(self) -> tuple[str, int]:
        """The input that takes tokens, and its length. Raises `UsageError` if the network reads no text."""
        for name in self.free_inputs():
            spec = self.network.graph.inputs[name]
            if spec.dtype == "int64" and len(spec.shape) == 2 and isinstance(spec.shape[1], int):
                return name, spec.shape[1]
        raise UsageError(f"{self.network.id} does not read text", hint="give it numbers: --input x.npy")

    def needs_tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises `UsageError` if it has none."""
        if self.tokenizer is None:
            raise UsageError(f"{self.network.id} has no tokenizer", hint="give it numbers: --input x.npy")
        return self.tokenizer


async def fetch(deployment: DeploymentInfo) -> Model:
    """Network and tokenizer of a deployment, from the cluster's store."""
    from networks.load import Network
    from pnode.data import Tokenizer
    from storage.blobs import Blobs

    async with store_of(deployment.store) as store:
        blobs = Blobs(store)
        network = Network.from_bytes(await blobs.get(deployment.network_digest))
        tokenizer = None
        if deployment.tokenizer_digest:
            tokenizer = Tokenizer.from_bytes(await blobs.get(deployment.tokenizer_digest))
    return Model(deployment, network, tokenizer)


async def infer_once(
    name: str,
    files: Sequence[str],
    text: str | None,
    want: Sequence[str],
    terminal: Terminal,
    orchestrator: str | None,
    home: str | None,
    timeout_s: float,
) -> dict[str, Answer]:
    """One forward pass of what a person gave."""
    async with Client.to(orchestrator, home, terminal, timeout_s=timeout_s) as client:
        router = Router(client)
        model = await fetch(await deployed(client, name))
        inputs = model_inputs(model, files, text)
        with terminal.waiting(f"waiting for {model.deployment.session}"):
            async with router.open(model.deployment) as route:
                return await route.call(inputs, model.wanted(want), timeout_s=timeout_s)


def model_inputs(model: Model, files: Sequence[str], text: str | None) -> dict[str, NDArray[Any]]:
    """Inputs by name from files and text. Raises `UsageError`, `BadFileError`."""
    specs = model.network.graph.inputs
    if text is not None:
        target, context = model.text_input()
        ids = model.needs_tokenizer().encode(text)[-context:]
        if not ids:
            raise UsageError("the text is empty")
        return {target: np.asarray([ids], dtype=np.int64)}
    given = read_arrays(files, [*model.free_inputs(), *(name for name in specs if name not in model.free_inputs())])
    return {key: fit(array, specs[key].dtype, specs[key].shape, key) for key, array in given.items()}


@dataclass(frozen=True, slots=True)
class Generated:
    """A generated text and how long it took."""

    session: str
    prompt: str
    text: str
    ids: list[int]
    step: int
    first_s: float
    per_token_s: float

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


async def generate_text(
    name: str,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    terminal: Terminal,
    orchestrator: str | None,
    home: str | None,
    timeout_s: float,
    *,
    seed: int,
    cache: bool,
) -> Generated:
    """Generate and, for a person, print as it comes."""
    async with Client.to(orchestrator, home, terminal, timeout_s=timeout_s) as client:
        return await generate_with(
            client, name, prompt, max_tokens, sampling, terminal, timeout_s, seed=seed, cache=cache
        )


async def generate_with(
    client: Client,
    name: str,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    terminal: Terminal,
    timeout_s: float,
    *,
    seed: int = 0,
    cache: bool = True,
) -> Generated:
    """The same through an open client."""
    router = Router(client)
    model = await fetch(await deployed(client, name))
    target, context = model.text_input()
    tokenizer = model.needs_tokenizer()
    start = list(tokenizer.encode(prompt)) or list(tokenizer.encode("\n")) or [0]
    wanted = LOGITS if LOGITS in model.network.graph.outputs else model.wanted([])[0]
    step = 0

    async with router.open(model.deployment) as route:

        async def logits(tokens_1T: NDArray[np.int64], position: int, keep: bool) -> NDArray[Any]:
            nonlocal step
            found = await route.call({target: tokens_1T}, [wanted], position=position, cache=keep, timeout_s=timeout_s)
            step = found[wanted].step
            return found[wanted].value

        ids: list[int] = []
        seconds: list[float] = []
        shown = Stream(tokenizer)
        if not terminal.json:
            terminal.raw(prompt.lstrip("\n"))
        async for token in generate(
            logits, start, context=context, max_tokens=max_tokens, sampling=sampling, seed=seed, cache=cache
        ):
            ids.append(token.id)
            seconds.append(token.seconds)
            fresh = shown.add(token.id)
            if fresh and not terminal.json:
                terminal.raw(fresh)
        rest = shown.rest()
        if rest and not terminal.json:
            terminal.raw(rest)
    later = seconds[1:] or seconds
    return Generated(model.deployment.session, prompt, shown.text, ids, step, seconds[0], sum(later) / len(later))


class Stream:
    """Tokens to text as they come; a character that is made of several tokens waits until it is whole."""

    LOOKBACK = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self._pending.append(token)
        fresh = self._tokenizer.decode(self._pending)
        if fresh.endswith("\ufffd") and len(self._pending) < self.LOOKBACK:
            return ""
        return self._emit(fresh)

    def rest(self) -> str:
        """What is left at the end."""
        return self._emit(self._tokenizer.decode(self._pending)) if self._pending else ""

    def _emit(self, fresh: str) -> str:
        self._pending = []
        self.text += fresh
        return fresh


async def evaluate_split(
    name: str,
    split: str,
    limit: int,
    terminal: Terminal,
    orchestrator: str | None,
    home: str | None,
    timeout_s: float,
) -> Score:
    """Loss, and where it makes sense perplexity or accuracy, over a split."""
    from cli.starting import data_cache

    async with Client.to(orchestrator, home, terminal, timeout_s=timeout_s) as client:
        router = Router(client)
        model = await fetch(await deployed(client, name))
        loss_output = model.loss_output
        if loss_output is None:
            raise UsageError(
                f"{model.network.id} gives no loss to evaluate", hint="name it under 'outputs' in its file"
            )
        if not model.deployment.data_digest:
            raise DCNRError(f"{model.deployment.session} has no data to evaluate on")
        source = await open_data(model, data_cache())
        samples = source.size(split)
        samples = min(samples, limit) if limit else samples
        classes = LOGITS in model.network.graph.outputs and _classifies(model)
        outputs = [loss_output, LOGITS] if classes else [loss_output]

        async with router.open(model.deployment) as route:

            async def ask(start: int, count: int) -> Rows:
                found = await route.call({}, outputs, split=split, start=start, count=count, timeout_s=timeout_s)
                loss = found[loss_output]
                right = None
                if classes:
                    rows = await asyncio.to_thread(source.rows, split, start, count)
                    right = right_answers(found[LOGITS].value, np.asarray(rows["targets"]))
                return Rows(float(loss.value), loss.count, right, loss.step)

            rows_each = max(1, min(256, model.network.recipe.batch * 4))
            with counting(terminal, f"evaluating {model.deployment.session} on {split}", samples) as moved:
                return await score(
                    ask, model.deployment.session, split, samples,
                    rows_each=rows_each, text=model.tokenizer is not None, moved=moved,
                )  # fmt: skip


def _classifies(model: Model) -> bool:
    graph = model.network.graph
    port = graph.outputs[LOGITS]
    spec = graph.costs[port.node].outputs[port.port or "y"]
    targets = graph.inputs.get("targets")
    return len(spec.shape) == 2 and targets is not None and targets.dtype == "int64" and len(targets.shape) == 1
