"""What happens to a session on a PNode (events), and what its core asks for (commands).

Steps are counted from 0 for the step that is being made; "applied" is the number of steps already made, which is what
people and the orchestrator see. Payloads (tensors, frames) are opaque here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Cause(Enum):
    """Why a run can't go on (`RunFailed.cause`). After peer, compute, wait and store it may go on placed anew."""

    NUMBERS = "numbers"  # a value is not finite
    PEER = "peer"  # another member's process is gone
    COMPUTE = "compute"  # the compute thread died or hangs, or memory ran out
    WAIT = "wait"  # nothing came for too long
    STORE = "store"  # the store was away for too long
    INPUT = "input"  # the network or the data can't be trained with
    DEFECT = "defect"  # of DCNR, or two versions of it together


class JobKind(Enum):
    """What the compute thread can be asked for."""

    FORWARD = "F"
    BACKWARD = "B"
    TIES = "ties"  # copy out the gradients of borrowed parameters
    REPORT = "report"  # add the lent parameters' gradients, sum squares, collect losses
    UPDATE = "U"
    DISCARD = "discard"  # drop the gradients of a step that isn't applied
    VERSION = "version"  # take over the owner's new parameter
    CUT = "cut"  # copy the state of all VNodes


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work for the compute thread; fields that its kind doesn't use keep their defaults."""

    kind: JobKind
    step: int
    stage: int = -1
    microbatch: int = -1
    vnode: str = ""
    scale: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.microbatch if self.microbatch >= 0 else ''} of step {self.step + 1}"
        if self.stage >= 0:
            text += f" in stage {self.stage}"
        return f"{text} for '{self.vnode}'" if self.vnode else text


@dataclass(frozen=True, slots=True)
class Done:
    """What a job gave. Only the fields of its kind are filled.

    `sends`: channel -> payload (F, B). `shared`: user -> payload (TIES) or owner -> payload (UPDATE). `count`: targets
    of a microbatch (F and B of the loss stage), of the step (REPORT). `trace`: UPDATE. The rest: REPORT and CUT.
    """

    sends: Mapping[int, object] = field(default_factory=dict)
    shared: Mapping[str, object] = field(default_factory=dict)
    count: int = 0
    norms: tuple[tuple[int, float], ...] = ()
    finite: bool = True
    culprit: str = ""
    loss: float = 0.0
    note: str = ""  # digest of the step's sample ids
    cut: object = None
    trace: object = None


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Started:
    """Run until `until` steps are applied."""

    until: int


@dataclass(frozen=True, slots=True)
class HopArrived:
    """A hop from `sender` in this epoch."""

    sender: str
    step: int
    microbatch: int
    channel: int
    backward: bool
    request_id: int
    count: int
    payload: object


@dataclass(frozen=True, slots=True)
class TieGradientArrived:
    """The gradient of a lent parameter, gathered by its user elsewhere."""

    sender: str
    step: int
    user: str
    payload: object


@dataclass(frozen=True, slots=True)
class TieVersionArrived:
    """A borrowed parameter as it is after U(step) at its owner."""

    sender: str
    step: int
    owner: str
    payload: object


@dataclass(frozen=True, slots=True)
class ReportArrived:
    """A member's squared gradient norms of a step."""

    sender: str
    step: int
    norms: tuple[tuple[int, float], ...]
    finite: bool
    culprit: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict on a step; see `wire.messages.Verdict`."""

    step: int
    apply: bool
    scale: float
    count: int
    gradient_norm: float
    hold: bool
    save: bool
    culprit: str


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """The loss's PNode decided."""

    sender: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class HoldAsked:
    """Stop after the step that is being made (only at the loss's PNode)."""

    save: bool


@dataclass(frozen=True, slots=True)
class JobDone:
    """The compute thread finished a job."""

    job: Job
    done: Done


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The compute thread could not do a job."""

    job: Job
    vnode: str
    text: str
    hint: str = ""
    cause: Cause = Cause.DEFECT


@dataclass(frozen=True, slots=True)
class Saved:
    """The cut after `applied` steps is in the store (or, with `error`, can't be put there)."""

    applied: int
    error: str = ""
    cause: Cause = Cause.STORE


@dataclass(frozen=True, slots=True)
class CutCommitted:
    """The orchestrator says that the cut after `applied` steps is durable."""

    applied: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Another member's process is gone, or can't be reached any more."""

    pnode: str
    reason: str


@dataclass(frozen=True, slots=True)
class WaitedTooLong:
    """The driver's limit for a wait is over; `option` sets it."""

    limit_s: float
    cause: Cause = Cause.WAIT
    option: str = "--wait-limit"


@dataclass(frozen=True, slots=True)
class Broke:
    """The driver found something that ends the run: a wrong tensor, a dead compute thread, a defect."""

    vnode: str
    text: str
    hint: str
    cause: Cause = Cause.DEFECT


@dataclass(frozen=True, slots=True)
class Released:
    """Forget the session."""


Event = (
    Started | HopArrived | TieGradientArrived | TieVersionArrived | ReportArrived | VerdictArrived | HoldAsked
    | JobDone | JobFailed | Saved | CutCommitted | PeerLost | WaitedTooLong | Broke | Released
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Compute:
    """Put a job into the compute thread's queue, with what arrived for it: channel, user or owner -> payload."""

    job: Job
    inputs: Mapping[int | str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendHop:
    """Send an activation, a gradient, or (payload None) the empty answer."""

    to: str
    step: int
    microbatch: int
    channel: int
    backward: bool
    request_id: int
    count: int
    payload: object


@dataclass(frozen=True, slots=True)
class SendTieGradient:
    """Send a borrowed parameter's gradient to its owner."""

    to: str
    step: int
    user: str
    payload: object


@dataclass(frozen=True, slots=True)
class SendTieVersion:
    """Send a lent parameter to a PNode that uses it."""

    to: str
    step: int
    owner: str
    payload: object


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send this PNode's norms to the PNode of the loss."""

    to: str
    step: int
    norms: tuple[tuple[int, float], ...]
    finite: bool
    culprit: str


@dataclass(frozen=True, slots=True)
class SendVerdict:
    """Send the decision to the other members."""

    to: tuple[str, ...]
    decision: Decision


@dataclass(frozen=True, slots=True)
class SaveCut:
    """Save the state after `applied` steps; answer with `Saved`."""

    applied: int
    cut: object


@dataclass(frozen=True, slots=True)
class TellProgress:
    """A step was applied (only at the loss's PNode)."""

    applied: int
    loss: float
    count: int
    gradient_norm: float
    seconds: float
    note: str


@dataclass(frozen=True, slots=True)
class TellApplied:
    """U(step) is done here; `trace` is what the job wants to be written about it."""

    applied: int
    trace: object = None


@dataclass(frozen=True, slots=True)
class TellHeld:
    """This share holds after `applied` steps."""

    applied: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The run can't go on. `told` false: the orchestrator hears of it from another, or by a lease.

    `peer`: the PNode that can't be reached, for the cause "peer".
    """

    applied: int
    vnode: str
    text: str
    hint: str
    cause: Cause
    peer: str = ""
    told: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """A message was refused: count it and log why."""

    code: str
    text: str


Command = (
    Compute | SendHop | SendTieGradient | SendTieVersion | SendReport | SendVerdict | SaveCut | TellProgress
    | TellApplied | TellHeld | Fail | Refuse
)  # fmt: skip
