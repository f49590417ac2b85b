"""What `infer`, `generate` and `eval` do once they know what is wanted: deploy if need be, ask, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cli.bars import counting
from cli.card import LOGITS, LOSS, TARGETS, Card
from cli.client import Client, store_of
from cli.evaluation import Rows, Score, right_answers, score
from cli.generation import generate
from cli.inference import Answer, Router, deployed
from cli.inputs import fit, read_arrays
from cli.lasting import LastingRoute
from cli.notices import Notice
from cli.sampling import Sampling
from cli.terminal import Terminal
from wire.errors import DCNRError, UsageError
from wire.messages import DeploymentInfo

if TYPE_CHECKING:
    from pnode.data import BatchSource, Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """A deployed network as a client sees it."""

    deployment: DeploymentInfo
    card: Card
    tokenizer: Tokenizer | None

    def needs_tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises `UsageError` if it has none."""
        if self.tokenizer is None:
            raise UsageError(f"{self.card.name} has no tokenizer", hint="give it numbers: --input x.npy")
        return self.tokenizer


async def fetch(deployment: DeploymentInfo) -> Model:
    """What network and tokenizer a deployment has, from the cluster's store."""
    from storage.blobs import Blobs

    async with store_of(deployment.store) as store:
        blobs = Blobs(store)
        card = Card.of(await blobs.get(deployment.network_digest))
        tokenizer = None
        if deployment.tokenizer_digest:
            from pnode.data.tokenizers import tokenizer_from_bytes

            tokenizer = tokenizer_from_bytes(await blobs.get(deployment.tokenizer_digest))
    return Model(deployment, card, tokenizer)


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
        async with LastingRoute(router, model.deployment, model.card.readers, Notice(terminal)) as route:
            return await route.call(inputs, model.card.wanted(list(want)), timeout_s=timeout_s)


def model_inputs(model: Model, files: Sequence[str], text: str | None) -> dict[str, NDArray[Any]]:
    """Inputs by name from files and text. Raises `UsageError`, `BadFileError`."""
    card = model.card
    if text is not None:
        target, context = card.text_input()
        ids = model.needs_tokenizer().encode(text)[-context:]
        if not ids:
            raise UsageError("the text is empty")
        return {target: np.asarray([ids], dtype=np.int64)}
    given = read_arrays(files, [*card.needed, *(name for name in card.inputs if name not in card.needed)])
    return {key: fit(array, *card.inputs[key], key) for key, array in given.items()}


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
    moves: int = 0
    """How many times it went on elsewhere, after a loss."""

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
    from pnode.data.tokenizers import StreamDecoder

    router = Router(client)
    model = await fetch(await deployed(client, name))
    target, context = model.card.text_input()
    tokenizer = model.needs_tokenizer()
    start = list(tokenizer.encode(prompt)) or list(tokenizer.encode("\n")) or [0]
    wanted = LOGITS if LOGITS in model.card.outputs else model.card.wanted([])[0]
    step = 0

    shown = _Shown(terminal, prompt.lstrip("\n"))
    notice = Notice(terminal, before=shown.interrupt, after=shown.go_on)
    async with LastingRoute(router, model.deployment, model.card.readers, notice) as route:

        async def logits(tokens_1T: NDArray[np.int64], position: int, keep: bool) -> NDArray[Any]:
            nonlocal step
            found = await route.call({target: tokens_1T}, [wanted], position=position, cache=keep, timeout_s=timeout_s)
            step = found[wanted].step
            return found[wanted].value

        ids: list[int] = []
        seconds: list[float] = []
        decoder = StreamDecoder(tokenizer)
        async for token in generate(
            logits, start, context=context, max_tokens=max_tokens, sampling=sampling, seed=seed, cache=cache
        ):
            ids.append(token.id)
            seconds.append(token.seconds)
            shown.add(decoder.feed([token.id]))
        shown.add(decoder.finish())
        moves = route.moves
    later = seconds[1:] or seconds
    return Generated(
        model.deployment.session, prompt, shown.text, ids, step, seconds[0], sum(later) / len(later), moves
    )


class _Shown:
    """A text that a person sees as it comes. `interrupt`: something else is about to be shown; `go_on`: it was."""

    def __init__(self, terminal: Terminal, prompt: str) -> None:
        self._terminal, self._prompt = terminal, prompt
        self._pieces: list[str] = []
        if not terminal.json:
            terminal.raw(prompt)

    @property
    def text(self) -> str:
        """Without the prompt."""
        return "".join(self._pieces)

    def add(self, fresh: str) -> None:
        """The next piece."""
        self._pieces.append(fresh)
        if fresh and not self._terminal.json:
            self._terminal.raw(fresh)

    def interrupt(self) -> None:
        """End the line, where a person reads both."""
        if self._terminal.live:
            self._terminal.raw("\n")

    def go_on(self) -> None:
        """Show the line that was interrupted once more."""
        if self._terminal.live:
            self._terminal.raw((self._prompt + self.text).rpartition("\n")[2])


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
    async with Client.to(orchestrator, home, terminal, timeout_s=timeout_s) as client:
        return await evaluate_with(client, name, split, limit, terminal, timeout_s)


async def evaluate_with(
    client: Client, name: str, split: str, limit: int, terminal: Terminal, timeout_s: float
) -> Score:
    """The same through an open client."""
    router = Router(client)
    model = await fetch(await deployed(client, name))
    session = model.deployment.session
    if LOSS not in model.card.outputs:
        raise UsageError(f"{model.card.name} gives no loss to evaluate", hint="name it under 'outputs' in its file")
    if not model.deployment.data_digest:
        raise DCNRError(f"{session} has no data to evaluate on")
    source = await open_data(model.deployment)
    samples = source.size(split)
    samples = min(samples, limit) if limit else samples
    outputs = [LOSS, LOGITS] if model.card.classifies else [LOSS]

    async with LastingRoute(router, model.deployment, model.card.readers, Notice(terminal)) as route:

        async def ask(start: int, count: int) -> Rows:
            found = await route.call({}, outputs, split=split, start=start, count=count, timeout_s=timeout_s)
            loss = found[LOSS]
            right = None
            if model.card.classifies:
                rows = source.rows(split, start, count)
                right = right_answers(found[LOGITS].value, np.asarray(rows[TARGETS]))
            return Rows(float(loss.value), loss.count, right, loss.step)

        rows_each = max(1, min(256, model.card.batch * 4))
        with counting(terminal, f"evaluating {session} on {split}", samples) as moved:
            return await score(
                ask, session, split, samples, rows_each=rows_each, text=model.tokenizer is not None, moved=moved
            )


async def open_data(deployment: DeploymentInfo) -> BatchSource:
    """The session's data on this machine: from the cache where they were packed, else fetched once."""
    from cli.starting import data_cache
    from networks.load import Network
    from pnode.data import open_source
    from storage.blobs import Blobs

    path = data_cache() / f"{deployment.data_digest}.data"
    async with store_of(deployment.store) as store:
        blobs = Blobs(store)
        await blobs.fetch_to_file(deployment.data_digest, path)
        network = Network.from_bytes(await blobs.get(deployment.network_digest))
    inputs = network.graph.inputs
    return open_source(path, network.recipe, None, network.recipe.seed, inputs=inputs, digest=deployment.data_digest)
