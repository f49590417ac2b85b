"""Records that an orchestrator finds damaged when it takes over: what can be had is mended, the rest is named.

One flipped bit in a small object must not keep all networks and sessions from running. The index of this orchestrator
has a copy of each record that it wrote; a record is taken from there and stored anew. Without a copy the network or
session is left out until somebody restores its record, and nothing is collected that it may need.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from orchestrator.records import NETWORKS_PREFIX, SESSIONS_PREFIX, NetworkRecord, SessionRecord
from storage.checkpoints import read_head
from storage.keys import BadKeyError, session_prefix
from storage.store import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.registry import Registry
    from orchestrator.truth import Truth
    from storage.store import Store

R = TypeVar("R", NetworkRecord, SessionRecord)


class Damage:
    """What was found damaged. `told`: a sentence for each record, with what was done or is to be done."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.sessions: set[str] = set()
        self.networks: set[str] = set()
        """Those without a copy: they are left out."""

    @property
    def left_out(self) -> bool:
        """Something is missing of which nobody knows what it needs."""
        return bool(self.sessions or self.networks)

    async def mend(
        self, store: Store, truth: Truth, registry: Registry, networks: Iterable[NetworkRecord],
        sessions: Iterable[SessionRecord],
    ) -> tuple[list[NetworkRecord], list[SessionRecord]]:  # fmt: skip
        """The networks and sessions, with what could be taken from the index."""
        damaged = dict(truth.damaged)
        named = {record.network: record for record in registry.networks()}
        known = {record.session: record for record in registry.sessions()}
        mended_networks = self._found(damaged, NETWORKS_PREFIX, named, self.networks)
        mended_sessions = self._found(damaged, SESSIONS_PREFIX, known, self.sessions)
        for network in mended_networks:
            await truth.put_network(network)
        for session in mended_sessions:  # the copy may be older than the last orchestrator, its epochs must not be
            with contextlib.suppress(CorruptError, BadKeyError):
                head = await read_head(store, session_prefix(session.network, session.session))
                session.epoch = max(session.epoch, head.epoch if head is not None else 0)
        for key, text in damaged.items():
            self.told.append(f"{text}: begun anew ({key} is written by the orchestrator alone)")
        return [*networks, *mended_networks], [*sessions, *mended_sessions]

    def _found(self, damaged: dict[str, str], prefix: str, copies: Mapping[str, R], left_out: set[str]) -> list[R]:
        found: list[R] = []
        for key in [key for key in damaged if key.startswith(prefix)]:
            name, text = key.removeprefix(prefix).removesuffix(".json"), damaged.pop(key)
            if name in copies:
                found.append(copies[name])
                self.told.append(f"{text}: mended from this orchestrator's index")
            else:
                left_out.add(name)
                self.told.append(f"{text}: {name} is left out; {_NEXT[prefix]}")
        return found


_NEXT: dict[str, str] = {
    NETWORKS_PREFIX: "register it again, or restore the record from a copy of the store and restart the orchestrator",
    SESSIONS_PREFIX: "its checkpoints stay: restore the record from a copy of the store, or delete it to give the "
    "session up, and restart the orchestrator",
}
