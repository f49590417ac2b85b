"""The cuts of a session that this PNode holds in memory, so that a replay fetches only what was lost. Pure.

Kept are the last committed cut, the newest ones (two, or as many as `limit` says: a commit may lag behind), and every
cut that the store does not have yet. A state found here is worth as much as one from the store only if its digest,
taken when it was saved, is the one that the manifest names; a state that was never saved has none and is never found.

The memory belongs to the session on this PNode, not to one epoch of it: whatever becomes of the next deployment, the
one after it finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEWEST = 2
"""At least so many of the newest cuts are kept."""

State = Mapping[str, Any]
"""The tensors of one VNode by name; nobody changes them."""


@dataclass(slots=True)
class _Kept:
    state: State
    digest: str = ""


class CutMemory:
    """See the module. Steps are applied steps."""

    def __init__(self, limit: int = NEWEST) -> None:
        self.limit = max(NEWEST, limit)
        self._cuts: dict[int, dict[str, _Kept]] = {}
        self._unsaved: set[int] = set()
        self._committed = -1

    @property
    def steps(self) -> list[int]:
        """The cuts that are held, ascending."""
        return sorted(self._cuts)

    def clear(self) -> None:
        """Forget all."""
        self._cuts.clear()
        self._unsaved.clear()
        self._committed = -1

    # ------------------------------------------------------------------------------------ what happens to cuts

    def made(self, step: int, states: Mapping[str, State]) -> None:
        """A cut was made; it is kept at least until it's saved."""
        self._cuts[step] = {vnode: _Kept(state) for vnode, state in states.items()}
        self._unsaved.add(step)
        self._prune()

    def part_saved(self, step: int, vnode: str, digest: str) -> None:
        """The store has the state of one VNode, under this digest."""
        kept = self._cuts.get(step, {}).get(vnode)
        if kept is not None:
            kept.digest = digest

    def saved(self, step: int) -> None:
        """The store has all of a cut, or nobody tries any longer to put it there."""
        self._unsaved.discard(step)
        self._prune()

    def committed(self, step: int) -> None:
        """That cut is durable; older ones are of no use any more."""
        self._committed = max(self._committed, step)
        self._prune()

    # ------------------------------------------------------------------------------------ going back to one

    def find(self, step: int, vnode: str, digest: str) -> State | None:
        """The state of a VNode after `step`, if it is the one that was saved under this digest."""
        kept = self._cuts.get(step, {}).get(vnode)
        return kept.state if kept is not None and kept.digest == digest and digest else None

    def add(self, step: int, vnode: str, state: State, digest: str) -> None:
        """Keep a state that was fetched: another try at the same step finds it here."""
        self._cuts.setdefault(step, {})[vnode] = _Kept(state, digest)

    def restart(self, step: int, vnodes: set[str]) -> None:
        """A deployment goes on from the committed cut after `step` with these VNodes: the rest is of no use."""
        cut = self._cuts.get(step, {})
        self.clear()
        self._committed = step
        here = {vnode: kept for vnode, kept in cut.items() if vnode in vnodes}
        if here:
            self._cuts[step] = here

    def _prune(self) -> None:
        newest = set(self.steps[-self.limit :])
        for step in self.steps:
            if step < self._committed or not (step in newest or step in self._unsaved or step == self._committed):
                del self._cuts[step]
                self._unsaved.discard(step)
