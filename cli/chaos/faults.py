"""What is done to a cluster and when: a pure schedule.

The n-th fault is a function of the seed, n and the odds alone: no clock, no look at the cluster. So what a victim is
called is open until it happens: a fault carries numbers from 0 to 1 that choose among those that there are then.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from wire.errors import UsageError


class Kind(StrEnum):
    """What can be done."""

    KILL = "kill"  # kill -9 of a PNode, then a restart
    PAUSE = "pause"  # SIGSTOP, later SIGCONT
    DOUBLE = "double"  # a second PNode is killed while the loss of the first is being mended
    ORCHESTRATOR = "orchestrator"  # kill -9 of the orchestrator, then a restart, perhaps with an empty disk
    USURP = "usurp"  # the orchestrator is paused, another takes over its store, the first goes on
    CLI = "cli"  # kill -9 of a command that watches or asks
    DROP = "drop"  # connections between two processes are reset
    DELAY = "delay"
    THROTTLE = "throttle"
    CUT = "cut"  # nothing passes between two processes
    ONEWAY = "oneway"  # nothing passes in one direction
    FLIP = "flip"  # one bit changes on its way
    STORE = "store"  # the S3 server is killed and started again
    DISK = "disk"  # the store's disk is full


PROCESSES = (Kind.KILL, Kind.PAUSE, Kind.DOUBLE, Kind.ORCHESTRATOR, Kind.USURP, Kind.CLI)
LINES = (Kind.DROP, Kind.DELAY, Kind.THROTTLE, Kind.CUT, Kind.ONEWAY, Kind.FLIP)
EVERYWHERE = PROCESSES + LINES
"""What any local cluster can be put through; `STORE` and `DISK` need a server or a disk that may be hurt."""

ODDS: dict[Kind, float] = {Kind.KILL: 6, Kind.ORCHESTRATOR: 3, Kind.PAUSE: 3, Kind.DOUBLE: 2, Kind.CLI: 2}
"""How often each kind comes, unless told otherwise; 1 for the others."""

LONG_PAUSES = 1 / 3
"""The share of pauses that outlast the lease."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to do."""

    number: int
    kind: Kind
    wait_s: float
    """After the fault before it (and, with `settle`, after the run had made a new step)."""
    settle: bool
    pick: float
    """Chooses the victim."""
    other: float
    """Chooses the second victim, or the other end of a line."""
    seconds: float
    """How long it lasts: a pause, a cut, the absence until a restart."""
    roll: float
    """Any further choice that its kind leaves open."""

    def choose(self, among: list[str], number: float | None = None) -> str:
        """One of a list, by `pick` or by the number given."""
        return among[int((self.pick if number is None else number) * len(among)) % len(among)]


class Schedule:
    """The faults of one seed. `gap_s`: about how long the run is left alone between two faults.

    `order`: the kinds of the first faults, for a short run that is to see each of them.
    """

    def __init__(
        self, seed: int, odds: Mapping[Kind, float], *, lease_s: float, gap_s: float, order: Sequence[Kind] = ()
    ) -> None:
        self.seed = seed
        self.order = tuple(order)
        self.odds = {kind: float(odds[kind]) for kind in Kind if odds.get(kind, 0) > 0}
        if not self.odds:
            raise UsageError("no kind of fault was chosen")
        self.lease_s = lease_s
        self.gap_s = gap_s

    def fault(self, number: int) -> Fault:
        """The n-th fault, from 0."""
        draw = random.Random(f"{self.seed}/{number}")
        kind = draw.choices(list(self.odds), list(self.odds.values()))[0]
        kind = self.order[number] if number < len(self.order) else kind
        return Fault(
            number=number,
            kind=kind,
            wait_s=draw.expovariate(1 / self.gap_s) if self.gap_s else 0.0,
            settle=draw.random() < 0.75,
            pick=draw.random(),
            other=draw.random(),
            seconds=self._seconds(kind, draw),
            roll=draw.random(),
        )

    def _seconds(self, kind: Kind, draw: random.Random) -> float:
        lease = self.lease_s
        match kind:
            case Kind.PAUSE:
                long = draw.random() < LONG_PAUSES
                return draw.uniform(1.2, 2.5) * lease if long else draw.uniform(0.1, 0.8) * lease
            case Kind.CUT | Kind.ONEWAY:
                return draw.uniform(0.2, 2.0) * lease
            case Kind.USURP:
                return draw.uniform(0.5, 2.0) * lease
            case Kind.DELAY | Kind.THROTTLE:
                return draw.uniform(1.0, 3.0) * lease
            case Kind.CLI:
                return draw.uniform(0.1, 2.5)
            case Kind.STORE | Kind.DISK:
                return draw.uniform(1.0, 5.0)
            case _:
                return draw.choice((0.0, draw.uniform(0.0, 2.0) * lease))


def odds_of(text: str, possible: tuple[Kind, ...]) -> dict[Kind, float]:
    """`kill,pause,orchestrator=5` as odds; "" for all that is possible, each with its usual odds.

    Raises `UsageError`.
    """
    found: dict[Kind, float] = {}
    for part in [part.strip() for part in text.split(",") if part.strip()] or [str(kind) for kind in possible]:
        name, _, weight = part.partition("=")
        try:
            kind = Kind(name.strip())
            found[kind] = float(weight) if weight else ODDS.get(kind, 1.0)
        except ValueError:
            raise UsageError(f"{part!r} is no kind of fault", hint=", ".join(possible)) from None
        if kind not in possible:
            raise UsageError(f"{kind} can't be done to this cluster", hint=", ".join(possible))
        if not 0 < found[kind] < 1e6:
            raise UsageError(f"the weight of {kind} is {found[kind]:g}, but is a number above 0")
    return found
