"""Networks as the orchestrator uses them: read from blobs by digest, checked, and kept while they are used.

Reading a network needs the node types and so torch. It is imported by the first network of a new cluster, in a thread;
but much of that time the interpreter's lock is held, and no thread helps against that. So where there are networks it
is imported before anybody can reach this process (`load_reader`), and no heartbeat waits for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from networks.limits import NETWORK_BYTES
from orchestrator.work import Work, work_of
from storage.blobs import Blobs
from storage.store import Store, digest_of

if TYPE_CHECKING:
    from networks.graph import Graph
    from networks.recipe import Recipe

KEPT = 32


@dataclass(frozen=True, slots=True)
class Listed:
    """A checked network."""

    id: str
    digest: str
    graph_digest: str
    graph: Graph
    recipe: Recipe
    work: Work

    @property
    def stateful(self) -> list[str]:
        """VNodes that have parameters or buffers of their own: each has a part in a checkpoint."""
        return [node.id for node in self.graph.nodes if has_state(self.graph, node.id)]

    @property
    def parameters(self) -> int:
        """Scalars in all parameters, tied ones once."""
        return sum(cost.parameter_count for cost in self.graph.costs.values())

    @property
    def vnodes(self) -> list[tuple[str, str, int]]:
        """(VNode, type, parameters) in topological order."""
        return [(node.id, node.type, self.graph.costs[node.id].parameter_count) for node in self.graph.nodes]


def has_state(graph: Graph, node_id: str) -> bool:
    """Whether that VNode owns parameters or buffers."""
    from networks.graph import NodeId

    cost = graph.costs[NodeId(node_id)]
    return bool(cost.parameters or cost.buffers)


class Catalog:
    """The networks of one store."""

    def __init__(self, store: Store) -> None:
        self._blobs = Blobs(store)
        self._kept: OrderedDict[str, Listed] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, digest: str) -> Listed:
        """The network of that digest. Raises `StoreError`, `BadNetworkError`."""
        async with self._lock:
            found = self._kept.get(digest)
            if found is None:
                found = await self._read(await self._blobs.get(digest, max_bytes=NETWORK_BYTES))
            self._kept.move_to_end(digest)
            return found

    async def put(self, data: bytes) -> Listed:
        """Check a network's bytes and store them. Raises `BadNetworkError`, `StoreError`."""
        async with self._lock:
            found = await self._read(data)
            await self._blobs.put(data)
            return found

    async def has_blob(self, digest: str) -> bool:
        """Whether a blob is in the store."""
        return await self._blobs.has(digest)

    async def _read(self, data: bytes) -> Listed:
        found = await asyncio.to_thread(_read, data)
        self._kept[found.digest] = found
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found


def load_reader() -> None:
    """Import what reading a network needs; that takes seconds."""
    import networks.network  # noqa: F401


def _read(data: bytes) -> Listed:
    from networks.network import Network

    network = Network.from_bytes(data)
    recipe = network.recipe
    optimizer = recipe.optimizer
    slots = 2 if optimizer.type == "adamw" else int(optimizer.momentum > 0)
    work = work_of(
        network.graph,
        batch=recipe.batch,
        microbatches=recipe.microbatches,
        optimizer_slots=slots,
        codec=recipe.codec,
    )
    return Listed(network.id, network.digest, _graph_digest(data), network.graph, recipe, work)


def _graph_digest(data: bytes) -> str:
    """Digest of a network's canonical bytes without its recipe, pins and codecs."""
    whole = json.loads(data)
    meant = {key: value for key, value in whole.items() if key not in ("train", "place", "codecs")}
    return digest_of(json.dumps(meant, sort_keys=True, separators=(",", ":")).encode())
