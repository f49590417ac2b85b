"""Saving cuts in the background: parts to the store, then one message to the orchestrator.

Training never waits here; the core stops it when too many cuts are on their way. Cuts are saved one after another,
oldest first. A store that is away, full or read-only is tried again for `Bounds.away_s`, and `trouble` says so. What
was saved and not called committed is remembered, for an orchestrator that comes later has to be told of it again.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import msgspec

from pnode.events import Cause
from pnode.hub import Hub
from pnode.memory import CutMemory
from pnode.share import Share
from storage.checkpoints import save_part
from storage.store import Store, StoreError
from wire.errors import DCNRError
from wire.messages import Deployment, Part, PartsSaved

PARALLEL = 4
PATIENCE_S, MAX_PATIENCE_S = 0.5, 10.0


class CutSaver:
    """The cuts of one epoch of a session on this PNode."""

    def __init__(self, hub: Hub, deployment: Deployment, share: Share, memory: CutMemory) -> None:
        self._hub = hub
        self._deployment = deployment
        self._share = share
        self._memory = memory
        self._known: frozenset[str] = frozenset()
        self._saved: dict[int, list[Part]] = {}
        self._turn = asyncio.Lock()
        self._gate = asyncio.Semaphore(PARALLEL)
        self.last_try = False
        """The session has ended: what the store does not take now is given up."""
        self._refused: dict[str, tuple[float, str]] = {}  # VNode -> since when its part can't be stored, and why

    def committed(self, applied: int) -> None:
        """The cut after `applied` steps is durable."""
        if applied in self._saved:
            self._known = frozenset(part.digest for part in self._saved[applied])
        for older in [step for step in self._saved if step <= applied]:
            del self._saved[older]
        self._memory.committed(applied)

    async def save(self, applied: int, cut: Any) -> tuple[str, Cause]:
        """Store all parts and tell the orchestrator. Gives "" or why it can't be done, and the cause of that."""
        self._memory.made(applied, cut.states)
        states = dict(cut.states)
        del cut
        deadline = self._hub.clock() + self._hub.bounds.away_s
        async with self._turn:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._part(applied, *each, deadline)) for each in states.items()]
            except ExceptionGroup as errors:
                return self._explain(applied, errors.exceptions[0])
            finally:
                self._memory.saved(applied)
        self._saved[applied] = [task.result() for task in tasks]
        self._tell(applied)
        return "", Cause.STORE

    def _explain(self, applied: int, error: Exception) -> tuple[str, Cause]:
        if isinstance(error, StoreError | OSError):
            return str(error), Cause.STORE
        if not isinstance(error, DCNRError):
            self._hub.log.error("cut", session=self._share.session, step=applied, error=repr(error))
        return str(error) or repr(error), Cause.DEFECT

    def announce(self) -> None:
        """Tell the orchestrator of everything that is saved and not committed."""
        for applied in sorted(self._saved):
            self._tell(applied)

    def _tell(self, applied: int) -> None:
        message = PartsSaved(
            self._share.session, self._share.epoch, self._share.replica, applied, self._share.pnode,
            self._hub.environment,
        )  # fmt: skip
        try:
            self._hub.bus.send(self._hub.orchestrator, message, [msgspec.msgpack.encode(self._saved[applied])])
        except DCNRError as error:
            self._hub.log.warning("untold", session=self._share.session, message="PartsSaved", error=str(error))

    async def _part(self, applied: int, vnode: str, state: Any, deadline: float) -> Part:
        """Put one VNode's state into the store, however often that has to be tried."""
        try:
            part = await self._persist(vnode, state, deadline)
        finally:
            self._refused.pop(vnode, None)
        self._memory.part_saved(applied, vnode, part.digest)
        return part

    async def _persist(self, vnode: str, state: Any, deadline: float) -> Part:
        patience = PATIENCE_S
        while True:
            try:
                async with self._gate:
                    return await save_part(self.store, self._deployment.store_prefix, vnode, state, known=self._known)
            except (StoreError, OSError) as error:
                if self.last_try or self._hub.clock() + patience > deadline:
                    raise
                text = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
                if not self._refused:
                    self._hub.log.warning("store away", session=self._share.session, vnode=vnode, error=text)
                since, _ = self._refused.get(vnode, (self._hub.clock(), ""))
                self._refused[vnode] = since, text
            await asyncio.sleep(patience * random.uniform(0.5, 1.0))
            patience = min(2 * patience, MAX_PATIENCE_S)

    @property
    def trouble(self) -> tuple[str, float]:
        """What the store said to the part that it has refused for longest, and since when; "" while it takes all."""
        since, text = min(self._refused.values(), default=(0.0, ""))
        return text, since

    @property
    def store(self) -> Store:
        """The store. Raises StoreError if this PNode has none."""
        if self._hub.store is None:
            raise StoreError("this PNode has no store yet", hint="is it registered? (dcnr ps)")
        return self._hub.store

    async def write_trace(self, applied: int, trace: dict[str, bytes], gate: threading.Semaphore | None) -> None:
        """Write what was traced of one step below `trace/`."""
        try:
            for vnode, data in trace.items():
                key = f"{self._deployment.store_prefix}trace/{applied}/{vnode.lower()}.safetensors"
                await self.store.put(key, data)
        except DCNRError as error:
            self._hub.log.error("trace", session=self._share.session, step=applied, error=str(error))
        finally:
            if gate is not None:
                gate.release()
