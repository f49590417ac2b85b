"""The cuts that are made and not known to be durable, and whether the next one may be made. Pure.

A cut is being saved until the store has this PNode's parts of it, then it is saved, and it is forgotten when the
orchestrator says that it, or a newer one, is committed. Cuts that the store does not have yet hold memory, so there is
a second, smaller limit on those.
"""

from __future__ import annotations


class Uncommitted:
    """Steps are applied steps. `limit`: cuts of both kinds; `in_memory`: cuts being saved."""

    def __init__(self, limit: int, in_memory: int) -> None:
        self.limit = max(1, limit)
        self.in_memory = max(1, in_memory)
        self._saving: set[int] = set()
        self._saved: set[int] = set()
        self._committed = -1

    def __len__(self) -> int:
        return len(self._saving) + len(self._saved)

    @property
    def saved(self) -> list[int]:
        """Cuts that the store has, and that nobody called committed."""
        return sorted(self._saved)

    @property
    def saving(self) -> list[int]:
        """Cuts that the store does not have yet."""
        return sorted(self._saving)

    def room(self) -> bool:
        """Whether one more cut may be made."""
        return len(self) < self.limit and len(self._saving) < self.in_memory

    def awaited(self) -> str:
        """What has to happen before the next cut, as a sentence; "" if there is room."""
        if self.room():
            return ""
        oldest = min(self._saving | self._saved)
        if len(self._saving) >= self.in_memory or oldest in self._saving:
            return f"store: cut of step {min(self._saving)}"
        return f"orchestrator: commit of step {oldest}"

    def made(self, step: int) -> None:
        """A cut is being made."""
        self._saving.add(step)

    def stored(self, step: int) -> bool:
        """The store has it. False if it was not being saved."""
        if step not in self._saving:
            return False
        self._saving.discard(step)
        if step > self._committed:
            self._saved.add(step)
        return True

    def committed(self, step: int) -> None:
        """That cut is durable, so older ones are of no use any more."""
        self._committed = max(self._committed, step)
        self._saved = {later for later in self._saved if later > step}
