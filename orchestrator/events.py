"""What happens to a session (events), and what its core asks for (commands)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wire.messages import CodedEdges, Message, SessionBeat, StepReport

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
class Move:
    """A client asks to have a deployed session moved to that placement, at a cut of its own."""

    placement: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the VNodes go, and the checkpoint that they start from, with its hash. `step_s`: predicted; 0: unknown.

    `codecs`: the edges that are coded from now on.
    """

    placement: Mapping[str, str]
    incarnations: Mapping[str, int]
    loss_pnode: str
    start_step: int
    reasons: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    step_s: float = 0.0
    hash: str = ""
    codecs: tuple[CodedEdges, ...] = ()


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """There is no placement, or the checkpoint could not be read. `who` has to change for it to be otherwise.

    `final`: trying again gives the same.
    """

    text: str
    hint: str = ""
    who: str = "PNodes"
    final: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The session's new epoch is durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RunRecorded:
    """That the session is to run is durable."""


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """The new epoch, or that the session is to run, could not be made durable.

    `epoch`: the store has that one already, by a former orchestrator.
    """

    text: str
    hint: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """A `Send` was answered with Ok."""

    key: str


@dataclass(frozen=True, slots=True)
class Denied:
    """A `Send` was refused, with a `code`; or not answered in time, without one."""

    key: str
    who: str
    text: str
    hint: str = ""
    code: str = ""


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
    """A PNode can't go on. `cause`: as in `RunFailed`."""

    pnode: str
    epoch: int
    vnode: str
    text: str
    hint: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """A member's report: what it says about this session, None if the session isn't there."""

    pnode: str
    incarnation: int
    beat: SessionBeat | None


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

    epoch: int
    step: int
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Troubled:
    """What is awaited under that key did not work so far, and is tried again."""

    key: str
    text: str


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
class MemberJoined:
    """A PNode is a member under this incarnation, which is durable."""

    pnode: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class TakenOver:
    """This orchestrator found the session in the store. `logged`: the newest step of its epoch in the event log."""

    logged: int = 0


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What is committed, as the store has it. `problem`: why nothing that is deployed can be gone on with."""

    step: int
    hash: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event = (
    Acted | Move | Placed | NotPlaced | Recorded | RunRecorded | NotRecorded | Answered | Denied | Reported | Held
    | RunBroke | Beat | PartsArrived | Committed | CommitFailed | Troubled | NotDeleted | MemberLost | MemberJoined
    | TakenOver | Surveyed
    | Ticked
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is awaited: from whom, what, since when, and until when at most."""

    who: str
    what: str
    since: float
    deadline: float
    trouble: str = ""
    """What whoever is awaited said last."""


@dataclass(frozen=True, slots=True)
class Place:
    """Find a placement and the checkpoint to start from; then `Placed` or `NotPlaced`.

    `keep`: where VNodes are now; they stay there if that PNode still lives as the process it was (`incarnations`).
    `yielding`: what was asked for (`pnodes`, `placement`) may be fallen short of, and the edges that are coded stay the
    same; otherwise it is placed anew, and they are chosen anew.
    """

    pnodes: int
    placement: dict[str, str]
    keep: dict[str, str] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    yielding: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """Find out what is committed; then `Surveyed`."""


@dataclass(frozen=True, slots=True)
class Record:
    """Store the record. With `epoch`: then `Recorded`; with `run`: then `RunRecorded`; or, with any, `NotRecorded`."""

    epoch: int = 0
    run: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Ask a PNode, again under the same id until `limit_s` is over; then `Answered` or `Denied`. None: Prepare.

    There is a wait of the same key; once there is none the answer is of no use any more.
    """

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


Command = Place | Survey | Record | Send | Tell | Log | Commit | Delete
