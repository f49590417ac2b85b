"""From a `Deployment` to a session that can start: fetch, build, load.

Files are fetched by digest and verified; states that this PNode still has in memory are not fetched at all. VNodes are
built and loaded in the compute thread. What a message or a file claims is checked here, before anything runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from networks.codecs import CodedGroup, groups_problem
from networks.graph import NodeId
from networks.network import Network
from pnode.compute_thread import ComputeThread
from pnode.data import open_source
from pnode.fetch import Fetch
from pnode.hub import Hub
from pnode.liveness import find_live
from pnode.memory import CutMemory
from pnode.session import Session
from pnode.share import Share, make_share
from pnode.work import Work, build_work
from storage.store import StoreUnavailableError
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.messages import Deployment
from wire.refusals import CANNOT_PREPARE, STORE_AWAY, UNHEALTHY

if TYPE_CHECKING:
    from torch import Tensor

    from pnode.data import BatchSource

BUILD_S = 600.0
MOVING_S = 0.5


async def deploy(
    hub: Hub, deployment: Deployment, fetch: Fetch, memory: CutMemory, *, epoch: int, replica: int,
    compute: ComputeThread, device: torch.device,
) -> Session:  # fmt: skip
    """Build this PNode's share. Raises `DCNRError` that says what is missing or wrong.

    `memory`: the cuts that are kept of this session; from now on those of the new deployment, if it succeeds.
    """
    data = await fetch.blob(deployment.network_digest, hub.bounds.network_bytes)
    network = _with_run(await asyncio.to_thread(Network.from_bytes, data), deployment)
    share = _share(network, deployment, hub.name, epoch, replica)
    source = await _source(hub, fetch, network, deployment, share)
    states = await _checkpoint(fetch, network, deployment, share, memory)

    def build() -> Work:
        work = build_work(network, share, seed=deployment.seed, device=device, source=source, trace=deployment.trace)
        work.load(states)
        return work

    lane = f"{deployment.session}@{epoch}/build"
    work = await _moving(fetch, in_compute(compute, lane, build, hub.bounds.compute_s))
    memory.restart(deployment.start_step, set(states))
    session = Session(hub, deployment, share, network, work, compute, memory)
    session.moved = fetch.moved
    return session


async def _moving(fetch: Fetch, building: Coroutine[Any, Any, Work]) -> Work:
    """While VNodes are built no byte comes, yet it moves: the compute thread's own limit bounds it."""
    task = asyncio.ensure_future(building)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=MOVING_S)
            fetch.moved += 1
    finally:
        task.cancel()
    return task.result()


async def in_compute(compute: ComputeThread, name: str, work: Callable[[], Any], limit_s: float = BUILD_S) -> Any:
    """Let the compute thread do `work` and wait for it. Raises what it raises, or UnreachableError after `limit_s`."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def then(value: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                if not isinstance(error, Exception):  # it would end the event loop as well
                    error = RemoteError(f"the compute thread of {compute.name} is dead: {name} ended it: {error!r}")
                future.set_exception(error)
            else:
                future.set_result(value)

    compute.submit(name, name, work, then)
    try:
        async with asyncio.timeout(limit_s):
            return await future
    except TimeoutError:
        doing = compute.status().doing or name
        raise UnreachableError(
            f"the compute thread of {compute.name} did not get to '{name}' in {limit_s:g} s: it does '{doing}'",
            hint="restart this PNode, or raise dcnr-pnode's --compute-limit",
        ) from None
    finally:
        compute.drop(name)


def _with_run(network: Network, deployment: Deployment) -> Network:
    """The network with the run's own length and seed: the learning rate's schedule ends where the run does."""
    recipe = network.recipe.model_copy(update={"steps": deployment.steps, "seed": deployment.seed})
    return replace(network, recipe=recipe)


def _share(network: Network, deployment: Deployment, pnode: str, epoch: int, replica: int) -> Share:
    graph, recipe = network.graph, network.recipe
    placement = {NodeId(node): where for node, where in deployment.placement.items()}
    missing = [node.id for node in graph.nodes if node.id not in placement]
    strangers = [where for where in placement.values() if where not in deployment.peers]
    if missing or strangers:
        raise RemoteError(f"the placement lacks {missing[:3]} and names unknown PNodes {strangers[:3]}")
    groups = [CodedGroup(coded.codec, tuple(coded.edges)) for coded in deployment.codecs]
    if problem := groups_problem(graph, groups):
        raise RemoteError(problem, hint="do all PNodes run the same version?")
    live = find_live(graph)
    return make_share(
        graph, placement, pnode, live=live.live, trainable=live.trainable, session=deployment.session, epoch=epoch,
        replica=replica, microbatches=recipe.microbatches, steps=deployment.steps, start_step=deployment.start_step,
        checkpoint_every=deployment.checkpoint_every, clip=recipe.optimizer.clip,
        groups=groups,
    )  # fmt: skip


async def _source(hub: Hub, fetch: Fetch, network: Network, deployment: Deployment, share: Share) -> BatchSource | None:
    """The data, if a VNode here reads an input or the loss is here."""
    graph = network.graph
    reads = any(edge.src.node in graph.inputs and edge.dst.node in set(share.nodes) for edge in graph.edges)
    if not deployment.data_digest or not (reads or share.pnode == share.loss_pnode):
        return None
    path = hub.home / "blobs" / deployment.data_digest
    await fetch.blob_file(deployment.data_digest, path)
    return await asyncio.to_thread(
        open_source, path, network.recipe, None, deployment.seed, inputs=graph.inputs, digest=deployment.data_digest
    )


async def _checkpoint(
    fetch: Fetch, network: Network, deployment: Deployment, share: Share, memory: CutMemory
) -> Mapping[str, Mapping[str, Tensor]]:
    """The states of the VNodes here and of the owners of borrowed parameters; {} to start from the seed."""
    if not deployment.manifest_digest:
        if deployment.start_step:
            raise RemoteError(f"no checkpoint is named, but the run starts at step {deployment.start_step}")
        return {}
    prefix = deployment.store_prefix
    manifest = await fetch.manifest(prefix, deployment.manifest_key, deployment.manifest_digest)
    if manifest.step != deployment.start_step or manifest.network_digest != deployment.network_digest:
        raise RemoteError(
            f"the checkpoint {deployment.manifest_key} is of step {manifest.step} of network "
            f"{manifest.network_digest[:12]}, expected step {deployment.start_step} of {deployment.network_digest[:12]}"
        )
    wanted = {str(node) for node in share.nodes} | {str(owner) for owner in share.owner_of.values()}
    parts = [part for part in manifest.parts if part.vnode in wanted]
    stored = {part.vnode for part in parts}
    lacking = [node for node in wanted - stored if network.graph.costs[NodeId(node)].parameters]
    lacking = [node for node in lacking if network.graph.node(node).tie is None]
    if lacking:
        raise RemoteError(f"the checkpoint {deployment.manifest_key} holds no state of {sorted(lacking)}")
    async with asyncio.TaskGroup() as group:
        found = {part.vnode: group.create_task(fetch.state(prefix, manifest.step, part, memory)) for part in parts}
    return {vnode: task.result() for vnode, task in found.items()}


def explain(error: BaseException) -> tuple[str, str, str]:
    """Code, text and hint of a refusal to prepare.

    Codes: see wire.refusals.
    """
    if isinstance(error, StoreUnavailableError):
        return STORE_AWAY, error.message, error.hint
    if isinstance(error, UnreachableError):
        return UNHEALTHY, error.message, error.hint
    if isinstance(error, DCNRError):
        return CANNOT_PREPARE, error.message, error.hint
    return CANNOT_PREPARE, f"{type(error).__name__}: {error}", ""
