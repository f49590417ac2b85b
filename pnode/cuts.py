"""Saving cuts in the background: parts to the store, then one message to the orchestrator.

The last two cuts also stay in memory until a newer one is committed, so that a later replay needs the store only for
what was lost. Training never waits here; the core stops it when two cuts are still on their way.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec

from pnode.hub import Hub
from pnode.share import Share
from storage.checkpoints import save_part
from storage.store import StoreError, StoreUnavailableError
from wire.errors import DCNRError
from wire.messages import Deployment, Part, PartsSaved

KEPT = 2
PARALLEL = 4
PATIENCE_S = 0.5
MAX_PATIENCE_S = 10.0


class CutSaver:
    """The cuts of one session on this PNode."""

    def __init__(self, hub: Hub, deployment: Deployment, share: Share) -> None:
        self._hub = hub
        self._deployment = deployment
        self._share = share
        self._known: frozenset[str] = frozenset()
        self._saved: dict[int, frozenset[str]] = {}
        self._gate = asyncio.Semaphore(PARALLEL)
        self.kept: dict[int, Any] = {}

    def close(self) -> None:
        """Forget all cuts."""
        self.kept.clear()
        self._saved.clear()

    def committed(self, applied: int) -> None:
        """The cut after `applied` steps is durable."""
        self._known = self._saved.get(applied, frozenset())
        for older in [step for step in self.kept if step < applied]:
            del self.kept[older]
        for older in [step for step in self._saved if step <= applied]:
            del self._saved[older]

    async def save(self, applied: int, cut: Any) -> str:
        """Store all parts and tell the orchestrator. Returns "" or why it could not be done."""
        self.kept[applied] = cut
        for older in sorted(self.kept)[:-KEPT]:
            del self.kept[older]
        try:
            parts = await asyncio.gather(*(self._part(vnode, state) for vnode, state in cut.states.items()))
        except DCNRError as error:
            return str(error)
        self._saved[applied] = frozenset(part.digest for part in parts)
        message = PartsSaved(
            self._share.session, self._share.epoch, self._share.replica, applied, self._share.pnode,
            self._hub.environment,
        )  # fmt: skip
        try:
            self._hub.bus.send(self._hub.orchestrator, message, [msgspec.msgpack.encode(list(parts))])
        except DCNRError as error:
            self._hub.log.warning("untold", session=self._share.session, message="PartsSaved", error=str(error))
        return ""

    async def _part(self, vnode: str, state: Any) -> Part:
        deadline = self._hub.clock() + self._hub.bounds.store_s
        patience = PATIENCE_S
        while True:
            try:
                async with self._gate:
                    return await save_part(
                        self._store(), self._deployment.store_prefix, vnode, state, known=self._known
                    )
            except StoreUnavailableError as error:
                if self._hub.clock() + patience > deadline:
                    raise
                self._hub.log.warning("store away", session=self._share.session, vnode=vnode, error=str(error))
                await asyncio.sleep(patience)
                patience = min(2 * patience, MAX_PATIENCE_S)

    def _store(self) -> Any:
        if self._hub.store is None:
            raise StoreError("this PNode has no store yet", hint="is it registered? (dcnr ps)")
        return self._hub.store

    async def write_trace(self, applied: int, trace: dict[str, bytes], gate: threading.Semaphore | None) -> None:
        """Write what was traced of one step below `trace/`."""
        try:
            for vnode, data in trace.items():
                key = f"{self._deployment.store_prefix}trace/{applied}/{vnode.lower()}.safetensors"
                await self._store().put(key, data)
        except DCNRError as error:
            self._hub.log.error("trace", session=self._share.session, step=applied, error=str(error))
        finally:
            if gate is not None:
                gate.release()
