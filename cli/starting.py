"""Starting a session: data and network to the store and the orchestrator, then the session itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cli.client import Client, store_of
from cli.context import home_folder
from cli.preparing import Overrides, Prepared, prepare
from cli.running import run
from cli.terminal import Terminal
from cli.units import count, plural, size
from wire import messages
from wire.errors import DCNRError
from wire.ids import new_request_id

if TYPE_CHECKING:
    from pathlib import Path

CREATE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A session as a person asks for it. `until` 0: to the end; `pnodes` 0: the planner decides."""

    network: str
    overrides: Overrides = field(default_factory=Overrides)
    until: int = 0
    pnodes: int = 0
    name: str = ""
    replace: bool = False
    placement: dict[str, str] = field(default_factory=dict)
    trace: bool = False
    tag: str = ""


def start_session(client: Client, wish: Wish, terminal: Terminal) -> messages.SessionInfo:
    """Pack, upload, register and start. Each phase says what it does.

    Raises `DCNRError`.
    """
    cluster = run(_cluster(client))
    prepared = prepare(wish.network, wish.overrides, terminal, cache=data_cache())
    describe(prepared, terminal)
    return run(_start(client, cluster.store, wish, prepared, terminal))


def data_cache() -> Path:
    """Where packed data are kept between runs on this machine."""
    return home_folder() / "data"


def describe(prepared: Prepared, terminal: Terminal) -> None:
    """What will be trained on what, in three lines or less."""
    recipe, graph = prepared.network.recipe, prepared.network.graph
    parameters = prepared.network.parameters
    for heading, part in zip(("data", ""), prepared.packed.info.split("; ", 1), strict=False):
        terminal.line(f"{heading:<8} {part}")
    terminal.line(
        f"network  {prepared.network.id}: {plural(len(graph.nodes), 'VNode')}, {count(parameters)} parameters; "
        f"{plural(recipe.steps, 'step')} of {plural(recipe.batch, 'sample')} in "
        f"{plural(recipe.microbatches, 'microbatch')}, seed {recipe.seed}"
    )


async def _cluster(client: Client) -> messages.ClusterInfo:
    async with client:
        info = await client.cluster()
        if not any(node.state == "alive" for node in await client.pnodes()):
            raise DCNRError(
                "the cluster has no PNode", hint=f"dcnr pnode --orchestrator {client.address} --name p1 starts one"
            )
        return info


async def _start(
    client: Client, store_url: str, wish: Wish, prepared: Prepared, terminal: Terminal
) -> messages.SessionInfo:
    async with client:
        await put_inputs(store_url, prepared, terminal)
        await put_network(client, prepared, replace=wish.replace)
        return await create(client, wish, prepared, terminal)


async def put_inputs(store_url: str, prepared: Prepared, terminal: Terminal) -> None:
    """Data and tokenizer into the cluster's store, unless they are there."""
    from storage.blobs import Blobs

    packed = prepared.packed
    async with store_of(store_url) as store:
        blobs = Blobs(store)
        if not await blobs.has(packed.digest):
            with terminal.waiting(f"uploading {size(packed.size_bytes)} of data to {store_url}"):
                await blobs.put_file(packed.path)
        if packed.tokenizer_bytes is not None:
            await blobs.put(packed.tokenizer_bytes)


async def put_network(client: Client, prepared: Prepared, *, replace: bool = False) -> messages.NetworkInfo:
    """Register the network under its id."""
    message = messages.PutNetwork(new_request_id(), prepared.network.id, replace)
    return await client.ask(message, messages.NetworkInfo, [prepared.network.to_bytes()])


async def create(client: Client, wish: Wish, prepared: Prepared, terminal: Terminal) -> messages.SessionInfo:
    """Create and start the session."""
    recipe, packed = prepared.network.recipe, prepared.packed
    message = messages.CreateSession(
        new_request_id(),
        prepared.network.id,
        packed.digest,
        packed.tokenizer_digest,
        packed.info,
        recipe.steps,
        recipe.seed,
        until=wish.until,
        pnodes=wish.pnodes,
        placement=wish.placement,
        checkpoint_every=recipe.checkpoint.every,
        keep=recipe.checkpoint.keep,
        trace=wish.trace,
        name=wish.name,
        tag=wish.tag,
    )
    with terminal.waiting("placing the VNodes and loading them"):
        return await client.ask(message, messages.SessionInfo, timeout_s=CREATE_TIMEOUT_S, quiet=True)
