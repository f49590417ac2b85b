"""From the parts that PNodes saved to a committed checkpoint. The collecting is pure; `Committer` does the rest.

A cut is complete when every PNode of the deployment has told its parts (which may be none), and they cover every VNode
that has state. Cuts are committed one after another, in ascending order; an older cut that is still incomplete when a
newer one is committed is dropped, for it can't be the head any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from orchestrator.records import SessionRecord
from storage.checkpoints import DataPosition, Head, Manifest, Resume, commit, read_head
from storage.keys import DIGEST, session_prefix
from storage.retention import prune
from storage.store import ConflictError, Store, StoreError, StoreUnavailableError
from wire.errors import RemoteError
from wire.messages import Part

MAX_OPEN_CUTS = 16
RETRY_S = 2.0
REPARENTED = 5


class BadPartsError(RemoteError):
    """A PNode told parts that can't be its own."""


@dataclass(slots=True)
class Cut:
    """The parts of one step as far as they are known."""

    step: int
    parts: dict[str, list[Part]] = field(default_factory=dict)
    environments: set[str] = field(default_factory=set)

    @property
    def digests(self) -> set[str]:
        """Digests of all parts so far."""
        return {part.digest for parts in self.parts.values() for part in parts}


class CutCollector:
    """The cuts of one deployment. `stateful`: the VNodes that have a part."""

    def __init__(self, epoch: int, placement: Mapping[str, str], stateful: Sequence[str]) -> None:
        self.epoch = epoch
        self._placement = dict(placement)
        self._pnodes = set(placement.values())
        self._order = {vnode: place for place, vnode in enumerate(placement)}
        self._stateful = set(stateful)
        self._open: dict[int, Cut] = {}

    def add(self, pnode: str, step: int, parts: Sequence[Part], environment: Sequence[str]) -> Cut | None:
        """A PNode's parts of a step; the whole cut if it's complete now. Raises `BadPartsError`."""
        if pnode not in self._pnodes:
            raise BadPartsError(f"{pnode} told parts of step {step}, but holds no VNode of this epoch")
        for part in parts:
            if self._placement.get(part.vnode) != pnode or not DIGEST.fullmatch(part.digest) or part.size_bytes < 0:
                raise BadPartsError(f"{pnode} told a part of {part.vnode[:80]!r} of step {step} that can't be its own")
        cut = self._open.setdefault(step, Cut(step))
        cut.parts[pnode] = list(parts)
        cut.environments.add("; ".join(environment))
        while len(self._open) > MAX_OPEN_CUTS:
            del self._open[min(self._open)]
        if set(cut.parts) != self._pnodes:
            return None
        missing = self._stateful - {part.vnode for parts_of in cut.parts.values() for part in parts_of}
        if missing:
            raise BadPartsError(f"step {step} lacks parts of {', '.join(sorted(missing)[:5])}")
        return cut

    def ordered(self, cut: Cut) -> list[Part]:
        """All parts of a cut in the network's order."""
        parts = [part for parts_of in cut.parts.values() for part in parts_of]
        return sorted(parts, key=lambda part: self._order[part.vnode])

    def done(self, step: int) -> None:
        """That cut is committed; it and older ones are forgotten."""
        for older in [other for other in self._open if other <= step]:
            del self._open[older]

    def awaited(self) -> dict[int, list[str]]:
        """By step, the PNodes whose parts are not here yet."""
        return {step: sorted(self._pnodes - set(cut.parts)) for step, cut in self._open.items()}

    def under_way(self) -> set[str]:
        """Digests that an open cut names."""
        return set().union(*(cut.digests for cut in self._open.values()))


def environment_note(before: Sequence[str], now: Sequence[str]) -> str:
    """ "" if results are bit for bit those of an undisturbed run, else why not: `not bit-exact: threads 1→2`."""
    if before and set(before) != set(now):
        old, new = _facts(before), _facts(now)
        changes = [
            f"{fact} {'|'.join(old.get(fact, ['?']))}→{'|'.join(new.get(fact, ['?']))}"
            for fact in dict.fromkeys([*old, *new])
            if old.get(fact) != new.get(fact)
        ]
        return f"not bit-exact: {', '.join(changes) or 'its PNodes differ otherwise than before'}"
    if len(set(now)) > 1:
        differ = [f"{fact} {'|'.join(values)}" for fact, values in _facts(now).items() if len(values) > 1]
        return f"not bit-exact: its PNodes differ: {', '.join(differ)}"
    return ""


def _facts(environments: Sequence[str]) -> dict[str, list[str]]:
    """Of environments such as `torch 2.8; device cpu; threads 2`: by first word, all its values in order."""
    found: dict[str, set[str]] = {}
    for text in environments:
        for fact in text.split("; "):
            name, _, value = fact.partition(" ")
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items()}


def manifest_of(
    record: SessionRecord,
    parts: Sequence[Part],
    *,
    step: int,
    head: Head | None,
    term: int,
    batch: int,
    sampler: str,
    environment: Sequence[str],
    created_s: float,
) -> Manifest:
    """The manifest of a cut of a session."""
    return Manifest(
        session=record.session,
        network=record.network,
        network_digest=record.network_digest,
        step=step,
        parts=list(parts),
        data=DataPosition(record.data_digest, record.tokenizer_digest, sampler, record.seed, step, step * batch),
        counters={"step": step},
        seed=record.seed,
        epoch=record.epoch,
        term=term,
        parent=head.manifest_key if head is not None else "",
        environment=sorted(environment),
        created_s=created_s,
    )


class Committer:
    """Commits the cuts of one session, one after another; knows its head. All of it is called with `lock` held.

    The head never goes back: a cut that is not newer than the head is none to be committed, whoever moved the head.
    """

    def __init__(self, store: Store, network: str, session: str) -> None:
        self._store = store
        self.prefix = session_prefix(network, session)
        self.lock = asyncio.Lock()
        self.head: Head | None = None
        self.environment: list[str] = []
        self._reached = 0
        self._unsure: Manifest | None = None

    def go_on_from(self, resume: Resume) -> None:
        """The session goes on from that checkpoint, which is the head's, or an older one if the head's is damaged."""
        self.head = resume.head
        self._reached = resume.manifest.step if resume.manifest is not None else 0
        self.environment = list(resume.manifest.environment) if resume.manifest is not None else []

    async def commit(
        self,
        manifest: Manifest,
        *,
        wanted: Callable[[], bool],
        still_mine: Callable[[], Awaitable[None]],
        troubled: Callable[[str], None] = lambda text: None,
    ) -> Head:
        """Make it the head, unless the head is as new; the head. When this returns it may be told.

        A store that does not answer is tried again for as long as it is `wanted`; `troubled` is told of it. A head that
        was moved by another is a former orchestrator's last write if the term is still ours, and then our cut follows
        it. Raises `StoreError`, and what `still_mine` raises.
        """
        while True:
            try:
                return await self._commit(manifest, still_mine)
            except StoreUnavailableError as error:
                if not wanted():
                    raise
                troubled(error.message)
            await asyncio.sleep(RETRY_S)

    async def settle(self, still_mine: Callable[[], Awaitable[None]]) -> None:
        """Know what became of a commit that was given up without an answer: it's made now, or can't be any more.

        Otherwise it might move the head at any time, below a placement that starts from what the head was.
        """
        if self._unsure is None:
            return
        try:
            await self._commit(self._unsure, still_mine)
        except StoreUnavailableError:
            raise
        except StoreError:
            self._unsure = None

    async def _commit(self, manifest: Manifest, still_mine: Callable[[], Awaitable[None]]) -> Head:
        for _ in range(REPARENTED):
            if self.head is not None and manifest.step <= self._reached:
                break
            self._unsure = manifest
            parent = self.head.manifest_key if self.head is not None else ""
            try:
                self.head = await commit(self._store, self.prefix, replace(manifest, parent=parent), self.head)
            except ConflictError:
                head = await read_head(self._store, self.prefix)
                await still_mine()  # after the read: the head is then no later orchestrator's
                self.head = head
                self._reached = self.head.step if self.head is not None else 0
            else:
                self._reached, self.environment = manifest.step, list(manifest.environment)
        else:
            raise ConflictError(
                f"{self.prefix}: step {manifest.step} could not be committed: its head is moved all the time",
                key=self.prefix, hint="end the other orchestrators",
            )  # fmt: skip
        await still_mine()
        self._unsure = None
        assert self.head is not None
        return self.head

    async def prune(self, keep: int, under_way: set[str]) -> str:
        """Drop what is older than `keep` checkpoints; "" or why not: what is committed is, whatever comes of this."""
        try:
            await prune(self._store, self.prefix, keep, under_way=under_way)
        except StoreError as error:
            return f"older checkpoints could not be deleted: {error.message}"
        return ""
