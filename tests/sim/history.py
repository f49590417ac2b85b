"""What happened in a simulated run, as plain records: written by the world, judged by a checker that knows only them.

Times are virtual seconds. A process is named by its id and its boot, the number it drew at its start. Steps are applied
steps: 1 is the first. Nothing here is imported from the product, and nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Process:
    """A process began, or came to an end: `what` is start, kill, stop, freeze, thaw, exit (with `detail`)."""

    t: float
    id: str
    boot: int
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """The world did something to the system: its kind, where, and for how long (0: for good, or in no time)."""

    t: float
    kind: str
    where: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Wrote:
    """A write reached the store and is visible from now on. `how`: put, if_absent, if_match, delete.

    `data` is kept for small control objects (records, heads, manifests); of all others only the SHA-256.
    """

    t: float
    by: str
    boot: int
    how: str
    key: str
    sha256: str
    size: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message was handed to a process's handler. `fields`: of the message, by name, tensors and bodies left out."""

    t: float
    src: str
    src_boot: int
    dst: str
    dst_boot: int
    kind: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Computed:
    """A compute thread applied one update. `weights`: VNode -> digest of its parameters after it, as bytes they are.

    `samples`: digest of the sample ids of the step, "" where the loss isn't here.
    """

    t: float
    pnode: str
    boot: int
    session: str
    epoch: int
    step: int
    weights: Mapping[str, str]
    samples: str = ""
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """The client heard from the orchestrator: `what` is created, state, committed, refused, unreachable."""

    t: float
    session: str
    what: str
    state: str = ""
    step: int = 0
    text: str = ""


Event = Process | Fault | Wrote | Delivered | Computed | Told


@dataclass(frozen=True, slots=True)
class Truth:
    """The undisturbed run, computed apart from the system: weights, losses and samples after each step from 1 on.

    `hash` of a checkpoint after a step, by step, where it is known.
    """

    steps: int
    weights: Mapping[int, Mapping[str, str]]
    samples: Mapping[int, str]
    losses: Mapping[int, float]
    hashes: Mapping[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """One run. `store`: key -> (sha256, size) of what is stored at the end; `objects`: the bytes of control objects.

    `ended`: the world's own account: "finished", or what was still awaited when it gave up. `healed_s`: when the last
    fault was over; `end_s`: when the run ended.
    """

    seed: int
    truth: Truth
    session: str = ""
    steps: int = 0
    events: list[Event] = field(default_factory=list)
    store: dict[str, tuple[str, int]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    ended: str = ""
    healed_s: float = 0.0
    end_s: float = 0.0
    waiting: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Exceptions that no process of the system foresaw (task failures, defects in its logs)."""
    visited: set[str] = field(default_factory=set)
    """States and transitions that were seen, such as "session running>recovering"."""
