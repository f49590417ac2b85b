"""The states of a session and of its deployment, which may follow which, and the limits of its waits. Pure data.

States:

    created     known, nothing was run yet
    starting    being placed, prepared on all PNodes, and started
    running     steps are being made
    recovering  something was lost: being placed anew, to go on from the last committed step
    pausing     a hold was asked for; the step under way ends, is saved and committed
    paused      holds at a committed step (or never made one); goes on with `resume`
    stopping    as pausing, then released
    stopped     released; goes on with `resume`
    finished    all steps are made and the last one is committed; may stay deployed for inference
    failed      can't go on as it is; `error` says why; goes on with `resume` from the last committed step

Beside the state there is the deployment's stage:

    down        nothing is deployed
    adopting    an earlier orchestrator deployed it; whether it still stands is being found out
    placing     where the VNodes go is being decided, or room for them is awaited
    raising     the new epoch is being made durable
    preparing   PNodes build their VNodes
    up          all of them are there
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from wire.errors import DCNRError

PLACE_S = 180.0
PREPARE_S = 180.0
"""Without any progress (`SessionBeat.moved`); a Prepare that gets on may take `AWAY_S`."""
START_S = 30.0
HOLD_S = 60.0
COMMIT_S = 300.0
"""Until all parts of a cut are there; while a store is away it's `AWAY_S`."""
STALL_S = 900.0
"""Without a step for so long a run is placed anew; PNodes give up a wait of their own much earlier."""
AWAY_S = 24 * 3600.0
"""How long a store may be away."""
RECOVER_S = 3600.0
"""How long room for a session that recovers is awaited."""
RETRY_S = 5.0
REFUSED_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that depend on settings. `adopt_s`: how long a take-over waits for PNodes to come back."""

    adopt_s: float = 25.0
    recover_s: float = RECOVER_S


class State(Enum):
    """See the module's docstring."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATED: frozenset({State.STARTING, State.STOPPED}),
    State.STARTING: frozenset(
        {State.RUNNING, State.RECOVERING, State.PAUSED, State.STOPPED, State.FINISHED, State.FAILED}
    ),
    State.RUNNING: frozenset(
        {State.STARTING, State.RECOVERING, State.PAUSING, State.PAUSED, State.STOPPING, State.FINISHED, State.FAILED}
    ),
    State.RECOVERING: frozenset({State.RUNNING, State.PAUSED, State.STOPPED, State.FINISHED, State.FAILED}),
    State.PAUSING: frozenset({State.PAUSED, State.STOPPING, State.FINISHED, State.FAILED}),
    State.PAUSED: frozenset({State.STARTING, State.STOPPED}),
    State.STOPPING: frozenset({State.STOPPED, State.FINISHED, State.FAILED}),
    State.STOPPED: frozenset({State.STARTING}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset({State.STARTING, State.STOPPED}),
}
"""running > starting: a rebalance, which holds for a moment and is placed anew."""

ACTIVE = frozenset({State.STARTING, State.RUNNING, State.RECOVERING, State.PAUSING, State.STOPPING})
"""A run is under way: it can't be undeployed or removed."""

RESUMABLE = frozenset({State.CREATED, State.PAUSED, State.STOPPED, State.FAILED})


class Stage(Enum):
    """How far a deployment is."""

    DOWN = "down"
    ADOPTING = "adopting"
    PLACING = "placing"
    RAISING = "raising"
    PREPARING = "preparing"
    UP = "up"


STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.DOWN: frozenset({Stage.DOWN, Stage.ADOPTING, Stage.PLACING}),
    Stage.ADOPTING: frozenset({Stage.DOWN, Stage.PLACING, Stage.UP}),
    Stage.PLACING: frozenset({Stage.DOWN, Stage.PLACING, Stage.RAISING}),
    Stage.RAISING: frozenset({Stage.DOWN, Stage.PLACING, Stage.PREPARING}),
    Stage.PREPARING: frozenset({Stage.DOWN, Stage.PLACING, Stage.UP}),
    Stage.UP: frozenset({Stage.DOWN, Stage.PLACING}),
}


class ActionRefusedError(DCNRError):
    """An action that the session's state does not allow."""

    code = "state"


class SessionBug(AssertionError):
    """A transition that the table forbids; the text ends with the session's story."""


@dataclass(slots=True)
class Deployment:
    """Where an epoch of the session runs."""

    epoch: int
    placement: dict[str, str]
    incarnations: dict[str, int]
    loss_pnode: str
    start_step: int
    held: dict[str, int] = field(default_factory=dict)
    """The step after which each PNode holds; emptied when a run starts."""

    @property
    def pnodes(self) -> list[str]:
        """Its PNodes, by first VNode."""
        return list(dict.fromkeys(self.placement.values()))
