"""Forward requests through two PNode processes: the same outputs as one process, with and without a cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import torch

from networks.network import Network
from pnode.data import open_source
from pnode.reference import Reference
from pnode.tensors import Received, pack, unpack
from tests.integration.pnode.conductor import Conductor
from tests.integration.pnode.test_training import GPT, SMALL, prepare_network, spread
from wire.ids import new_request_id
from wire.messages import InferEnd, InferFailed, InferInput, InferOutput, Message, PeerRef
from wire.zmq_bus import ZmqBus

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


class Client:
    """Asks all PNodes of a session, and collects what comes back."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self.bus = ZmqBus("client", bind=None)
        self.answers: asyncio.Queue[tuple[Message, torch.Tensor | None]] = asyncio.Queue()

    async def start(self) -> None:
        self.bus.on_message(self._arrived)
        self.bus.on_loss(lambda peer, reason: None)
        await self.bus.start()

    def _arrived(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        tensor = None
        if isinstance(message, InferOutput):
            (tensor,) = unpack(Received(message.tensors, frames))
        self.answers.put_nowait((message, tensor))

    async def ask(
        self, session: str, outputs: list[str], *, request_id: str = "", sequence: int = 0, position: int = 0,
        cache: bool = False, split: str = "", start: int = 0, count: int = 0, **inputs: torch.Tensor,
    ) -> dict[str, tuple[Message, torch.Tensor | None]]:  # fmt: skip
        packed = pack(inputs.values())
        message = InferInput(
            request_id or str(new_request_id()), session, sequence, self.bus.me, outputs, list(inputs),
            list(packed.metas), split, start, count, position, cache,
        )  # fmt: skip
        for peer in self.conductor.deployments[session].peers.values():
            self.bus.send(peer, message, packed.frames)
        found: dict[str, tuple[Message, torch.Tensor | None]] = {}
        async with asyncio.timeout(30):
            while found.keys() != set(outputs):
                answer, tensor = await self.answers.get()
                if isinstance(answer, InferFailed):
                    return {"failed": (answer, None)}
                assert isinstance(answer, InferOutput)
                found[answer.output] = (answer, tensor)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Client, Network, bytes]]:
    """A trained session `gpt-1` on two PNodes, and `busy-1` that trains meanwhile."""
    folder = tmp_path_factory.mktemp("cluster")
    conductor = Conductor(folder)
    await conductor.start()
    for name in ("p1", "p2"):
        await conductor.spawn(name)
    await conductor.until(lambda: conductor.peers.keys() == {"p1", "p2"})
    network, data = prepare_network("gpt-char", [*SMALL, *GPT, "train.steps=2"], folder)
    _, digest = await conductor.put(network, data)
    await conductor.deploy("gpt-1", network, digest, spread(network, 2))
    await conductor.run("gpt-1", 2)
    await conductor.until(lambda: conductor.all_held("gpt-1", 2))
    busy, data = prepare_network("gpt-char", [*SMALL, *GPT, "train.steps=100000"], folder)
    await conductor.put(busy, data)
    await conductor.deploy("busy-1", busy, digest, spread(busy, 2))
    await conductor.run("busy-1", 100_000)
    client = Client(conductor)
    await client.start()
    yield client, network, data
    await client.bus.close()
    await conductor.close()


@pytest.fixture(scope="module")
def trained(cluster: tuple[Client, Network, bytes]) -> Reference:
    """The same two steps in one process."""
    _, network, data = cluster
    source = open_source(data, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs)
    reference = Reference(network, source)
    for step in range(2):
        reference.step(step)
    return reference


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 60, (1, count), generator=torch.Generator().manual_seed(count))


async def test_logits_equal_those_of_one_process(cluster: tuple[Client, Network, bytes], trained: Reference) -> None:
    client, _, _ = cluster
    for length in (16, 5, 1):
        prompt = tokens(length)
        (message, ours) = (await client.ask("gpt-1", ["logits"], tokens=prompt))["logits"]
        theirs, _ = trained.infer({"tokens": prompt}, {"logits"})
        assert ours is not None
        assert torch.equal(ours, theirs["logits"])
        assert isinstance(message, InferOutput)
        assert message.step == 2


async def test_a_cache_gives_the_same_as_the_whole_prefix(
    cluster: tuple[Client, Network, bytes], trained: Reference
) -> None:
    client, _, _ = cluster
    prompt = tokens(10)
    request = str(new_request_id())
    whole, _ = trained.infer({"tokens": prompt}, {"logits"})
    for sequence, (start, end) in enumerate([(0, 6), (6, 7), (7, 10)]):
        found = await client.ask(
            "gpt-1", ["logits"], request_id=request, sequence=sequence, position=start, cache=True,
            tokens=prompt[:, start:end].contiguous(),
        )  # fmt: skip
        ours = found["logits"][1]
        assert ours is not None
        largest = whole["logits"].abs().max()
        assert (ours - whole["logits"][:, start:end]).abs().max() <= 1e-5 * largest
    for peer in client.conductor.deployments["gpt-1"].peers.values():
        client.bus.send(peer, InferEnd(request, "gpt-1"))
    lost = await client.ask(
        "gpt-1", ["logits"], request_id=request, sequence=9, position=10, cache=True, tokens=tokens(1)
    )
    failed = lost["failed"][0]
    assert isinstance(failed, InferFailed)
    assert failed.code == "cache-miss"
    assert "whole prefix" in failed.hint


async def test_rows_of_the_sessions_own_data(cluster: tuple[Client, Network, bytes], trained: Reference) -> None:
    client, network, data = cluster
    source = open_source(data, network.recipe, None, network.recipe.seed, inputs=network.graph.inputs)
    found = await client.ask("gpt-1", ["loss", "logits"], split="val", start=3, count=4)
    theirs, count = trained.infer(source.rows("val", 3, 4), {"loss", "logits"})
    message, ours = found["loss"]
    assert isinstance(message, InferOutput)
    assert message.count == count
    assert ours is not None
    assert torch.equal(ours, theirs["loss"])


async def test_bad_requests_are_answered_with_the_cause(cluster: tuple[Client, Network, bytes]) -> None:
    client, _, _ = cluster
    cases = [
        (client.ask("gpt-1", ["logit"], tokens=tokens(3)), "bad-request", "it has logits, loss"),
        (client.ask("gpt-1", ["logits"], token=tokens(3)), "bad-request", "no input 'token'"),
        (client.ask("gpt-1", ["logits"], tokens=tokens(3).float()), "bad-request", "got float32(1, 3)"),
        (client.ask("gpt-1", ["logits"], tokens=tokens(17)), "bad-request", "got int64(1, 17)"),
        (client.ask("gpt-1", ["logits"], tokens=torch.full((1, 3), 10**6)), "compute", ""),
    ]
    for asking, code, text in cases:
        failed = (await asking)["failed"][0]
        assert isinstance(failed, InferFailed)
        assert failed.code == code
        assert text in failed.text
        while not client.answers.empty():
            client.answers.get_nowait()
        await asyncio.sleep(0.2)
        while not client.answers.empty():
            client.answers.get_nowait()


async def test_an_unknown_session_is_said_to_be_unknown(cluster: tuple[Client, Network, bytes]) -> None:
    client, _, _ = cluster
    client.conductor.deployments["nobody-1"] = client.conductor.deployments["gpt-1"]
    failed = (await client.ask("nobody-1", ["logits"], tokens=tokens(3)))["failed"][0]
    assert isinstance(failed, InferFailed)
    assert failed.code == "unknown-session"
    assert "dcnr ps" in failed.hint
    assert not client.conductor.failed
