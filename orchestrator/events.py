"""What happens to a session (events), and what its core asks for (commands)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wire.messages import Message, StepReport

# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Acted:
    """A client asks: start | pause | resume | stop | deploy | undeploy | remove (`force`: even while it runs)."""

    action: str
    until: int = 0
    pnodes: int = 0
    placement: Mapping[str, str] = field(default_factory=dict)
    force: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the VNodes go, and the checkpoint that they start from. `step_s`: predicted; 0: unknown."""

    placement: Mapping[str, str]
    incarnations: Mapping[str, int]
    loss_pnode: str
    start_step: int
    reasons: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """There is no placement, or the checkpoint could not be read."""

    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The session's new epoch is durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """The new epoch could not be made durable."""

    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A `Send` was answered with Ok."""

    key: str


@dataclass(frozen=True, slots=True)
class Denied:
    """A `Send` was refused, or not answered in time."""

    key: str
    who: str
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """Steps were applied."""

    epoch: int
    steps: tuple[StepReport, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A PNode holds after `step`."""

    pnode: str
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class RunBroke:
    """A PNode can't go on."""

    pnode: str
    epoch: int
    vnode: str
    text: str
    hint: str


@dataclass(frozen=True, slots=True)
class PartsArrived:
    """The parts of all VNodes of the cut at `step` are in the store."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The cut at `step` is the head. `note`: "" or why a resumed run is not bit-exact."""

    epoch: int
    step: int
    hash: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The cut at `step` could not be made the head."""

    step: int
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class NotDeleted:
    """The session could not be removed, so it stays."""

    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class MemberLost:
    """An incarnation of a PNode is final."""

    pnode: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event = (
    Acted | Placed | NotPlaced | Recorded | NotRecorded | Answered | Denied | Reported | Held | RunBroke | PartsArrived
    | Committed | CommitFailed | NotDeleted | MemberLost | Ticked
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is awaited: from whom, what, since when, and until when at most."""

    who: str
    what: str
    since: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Place:
    """Find a placement and the checkpoint to start from; then `Placed` or `NotPlaced`."""

    pnodes: int
    placement: dict[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """Store the record. With `epoch`: then `Recorded` or `NotRecorded`."""

    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Ask a PNode, again under the same id until `limit_s` is over; then `Answered` or `Denied`. None: Prepare."""

    key: str
    pnode: str
    message: Message | None
    limit_s: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to PNodes. `sure`: ask each, under an id of its own, until it answers, though nobody waits."""

    pnodes: tuple[str, ...]
    message: Message
    sure: bool = False


@dataclass(frozen=True, slots=True)
class Log:
    """A line of the event log."""

    kind: str
    text: str
    step: int
    steps: tuple[StepReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the cut at `step` the head; then `Committed` or `CommitFailed`."""

    step: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete all that the session stored, and forget it."""


Command = Place | Record | Send | Tell | Log | Commit | Delete
