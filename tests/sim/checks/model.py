"""What is so at one moment of a history: what is stored, who lives, who has which term, epoch and incarnation.

It takes in events and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.sim.checks.formats import (
    BadObjectError,
    Head,
    Key,
    Manifest,
    Record,
    key_of,
    read_head,
    read_incarnations,
    read_manifest,
    read_record,
    read_term,
)
from tests.sim.history import Computed, Delivered, Process, Wrote

Who = tuple[str, int]
"""Id and boot."""

ENDS = ("kill", "stop", "exit")


@dataclass(frozen=True, slots=True)
class Thing:
    """A write as it is understood. `problem`: why its bytes are not what the key says."""

    key: Key
    head: Head | None = None
    manifest: Manifest | None = None
    record: Record | None = None
    term: tuple[str, int] | None = None
    granted: dict[str, int] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in the store, and the write that made it."""

    sha256: str
    size: int
    by: Wrote


@dataclass(slots=True)
class Epoch:
    """An epoch of a session, as first recorded."""

    number: int
    record: Record
    by: Wrote

    @property
    def members(self) -> set[str]:
        """PNodes that hold a VNode."""
        return set(self.record.placement.values())


@dataclass(slots=True)
class Life:
    """A process. `ended`: the event that ended it; `frozen`: whether it stands still now."""

    began: Process
    ended: Process | None = None
    frozen: bool = False
    thawed_s: float = 0.0


@dataclass(slots=True)
class Model:
    """See the module."""

    store: dict[str, Stored] = field(default_factory=dict)
    things: dict[str, Thing] = field(default_factory=dict)  # of control objects and manifests that are stored
    heads: dict[str, str] = field(default_factory=dict)  # session -> key of its head
    lives: dict[Who, Life] = field(default_factory=dict)
    terms: dict[Who, int] = field(default_factory=dict)  # who took over under which term
    term_owner: dict[int, Who] = field(default_factory=dict)
    term: int = 0
    raised_s: dict[int, float] = field(default_factory=dict)
    epochs: dict[tuple[str, int], Epoch] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)  # epoch, by session
    known_term: dict[Who, int] = field(default_factory=dict)  # highest term that a process has heard
    told_incarnations: dict[Who, set[int]] = field(default_factory=dict)
    applied: dict[tuple[str, int, str], int] = field(default_factory=dict)  # session, epoch, PNode -> last step
    acted: bool = False
    """Whether a client ever asked for a start, resume, pause or stop of a session."""

    # ------------------------------------------------------------ questions

    def head(self, session: str) -> tuple[str, Head] | None:
        """Key and content of a session's head."""
        key = self.heads.get(session, "")
        thing = self.things.get(key)
        return (key, thing.head) if thing is not None and thing.head is not None else None

    def record(self, session: str) -> Record | None:
        """A session's record as it is stored."""
        thing = self.things.get(f"registry/sessions/{session}.json")
        return thing.record if thing is not None else None

    def granted(self) -> dict[str, int]:
        """The incarnations that are stored as granted."""
        thing = self.things.get("registry/incarnations.json")
        return thing.granted or {} if thing is not None else {}

    def line(self, head: Head) -> Iterator[tuple[str, Manifest]]:
        """Key and manifest of a head and its ancestors, newest first, as far as they are stored."""
        key, seen = head.manifest_key, set[str]()
        while key and key not in seen:
            seen.add(key)
            thing = self.things.get(key)
            if thing is None or thing.manifest is None:
                return
            yield key, thing.manifest
            key = thing.manifest.parent

    def kept(self, session: str) -> dict[str, tuple[int, str, int]]:
        """Keys that have to stay: key -> step of the newest checkpoint that names it, digest and size (0: any)."""
        found = self.head(session)
        record = self.record(session)
        if found is None:
            return {}
        head_key, head = found
        prefix = head_key.removesuffix("head.json")
        keys: dict[str, tuple[int, str, int]] = {head_key: (head.step, "", 0)}
        for place, (key, manifest) in enumerate(self.line(head)):
            if place >= (record.keep if record is not None else 1):
                break
            keys.setdefault(key, (manifest.step, key_of(key).digest, 0))
            for digest, size in manifest.parts.values():
                keys.setdefault(f"{prefix}parts/{digest}.safetensors", (manifest.step, digest, size))
        return keys

    def alive(self, who: Who) -> bool:
        """Whether the process has begun and not ended."""
        life = self.lives.get(who)
        return life is not None and life.ended is None

    # ------------------------------------------------------------ events

    def process(self, event: Process) -> None:
        """A process began or ended."""
        who = (event.id, event.boot)
        if event.what == "start":
            self.lives[who] = Life(event)
        elif (life := self.lives.get(who)) is not None:
            if event.what in ENDS and life.ended is None:
                life.ended = event
            elif event.what in ("freeze", "thaw"):
                life.frozen = event.what == "freeze"
                life.thawed_s = event.t

    def wrote(self, event: Wrote, thing: Thing) -> None:
        """A write becomes visible."""
        if event.how == "delete":
            self.store.pop(event.key, None)
            self.things.pop(event.key, None)
            return
        self.store[event.key] = Stored(event.sha256, event.size, event)
        if thing.key.kind not in ("part", "other"):
            self.things[event.key] = thing
        if thing.key.kind == "head":
            self.heads[thing.key.session] = event.key
        if thing.term is not None and not thing.problem:
            _, number = thing.term
            self.terms[event.by, event.boot] = number
            self.term_owner.setdefault(number, (event.by, event.boot))
            self.raised_s.setdefault(number, event.t)
            self.term = max(self.term, number)
        if (record := thing.record) is not None:
            self.epochs.setdefault((record.session, record.epoch), Epoch(record.epoch, record, event))
            self.newest[record.session] = max(self.newest.get(record.session, 0), record.epoch)

    def delivered(self, event: Delivered) -> None:
        """A message was handed over."""
        who = (event.dst, event.dst_boot)
        term = event.fields.get("term")
        if isinstance(term, int) and event.kind in ("Registered", "Prepare", "StartRun", "HoldRun", "Release"):
            self.known_term[who] = max(self.known_term.get(who, 0), term)
        if event.kind == "Registered" and isinstance(event.fields.get("incarnation"), int):
            self.told_incarnations.setdefault(who, set()).add(int(str(event.fields["incarnation"])))
        if event.kind in ("ActOnSession", "Rebalance"):
            self.acted = True

    def computed(self, event: Computed) -> None:
        """An update was applied."""
        place = (event.session, event.epoch, event.pnode)
        self.applied[place] = max(self.applied.get(place, 0), event.step)


def understood(event: Wrote) -> Thing:
    """What a write puts there."""
    key = key_of(event.key)
    if event.how == "delete" or key.kind in ("part", "other", "epochs"):
        return Thing(key)
    try:
        match key.kind:
            case "head":
                return Thing(key, head=read_head(event.data))
            case "manifest":
                return Thing(key, manifest=read_manifest(event.data))
            case "record":
                return Thing(key, record=read_record(event.data))
            case "term":
                return Thing(key, term=read_term(event.data))
            case _:
                return Thing(key, granted=read_incarnations(event.data))
    except BadObjectError as error:
        return Thing(key, problem=str(error))
