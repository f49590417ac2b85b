"""What one session tells the orchestrator about its run, and tells again to an orchestrator that comes later.

Steps since the last committed one are kept (bounded), as are the ends of the run: all of it is told anew after each
registration, and the orchestrator takes it as often as it comes.
"""

from __future__ import annotations

import asyncio
from collections import deque

from networks.recipe import Recipe, lr_at
from pnode.events import Fail, TellProgress
from pnode.hub import Hub
from pnode.share import Share
from wire.errors import DCNRError
from wire.messages import Message, Progress, RunFailed, RunHeld, StepReport

PROGRESS_S = 0.2
BACKLOG_STEPS = 10_000
STEPS_PER_MESSAGE = 200
"""A header holds 64 KiB, a report some 150 bytes."""


class Reports:
    """See the module. Called in the event loop's thread."""

    def __init__(self, hub: Hub, share: Share, recipe: Recipe) -> None:
        self._hub = hub
        self._share = share
        self._recipe = recipe
        self._fresh: list[StepReport] = []
        self._backlog: deque[StepReport] = deque(maxlen=BACKLOG_STEPS)
        self._told_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._failure: RunFailed | None = None
        self.error = ""
        """Why the run can't go on here; "" while it can."""

    def close(self) -> None:
        """Tell nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------------------------ once

    def step(self, told: TellProgress) -> None:
        """A step was applied: told at once, or with others a little later."""
        recipe = self._recipe
        report = StepReport(
            told.applied, told.loss, told.count, told.gradient_norm, lr_at(recipe, told.applied - 1), told.seconds,
            recipe.batch, told.note,
        )  # fmt: skip
        self._fresh.append(report)
        self._backlog.append(report)
        self._hub.step_seconds(self._share.session, told.seconds)
        due = self._told_at + PROGRESS_S - self._hub.clock()
        if due <= 0:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(due, self.flush)

    def flush(self) -> None:
        """Tell the steps that were not told."""
        self.close()
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._told_at = self._hub.clock()
            self._steps(fresh)

    def _steps(self, reports: list[StepReport]) -> None:
        share = self._share
        for start in range(0, len(reports), STEPS_PER_MESSAGE):
            part = reports[start : start + STEPS_PER_MESSAGE]
            self._tell(Progress(share.session, share.epoch, share.replica, share.pnode, part))

    def held(self, applied: int) -> None:
        """This share holds."""
        share = self._share
        self.flush()
        self._tell(RunHeld(share.session, share.epoch, share.replica, applied, share.pnode))

    def failed(self, fail: Fail) -> None:
        """The run can't go on here."""
        share = self._share
        self.error = fail.text
        self.flush()
        self._hub.log.error(
            "run failed", session=share.session, epoch=share.epoch, cause=fail.cause.value, vnode=fail.vnode,
            text=fail.text, told=fail.told,
        )  # fmt: skip
        if fail.told:
            self._failure = RunFailed(
                share.session, share.epoch, share.replica, fail.applied, share.pnode, fail.vnode, fail.text[:4000],
                fail.hint, fail.cause.value, fail.peer,
            )  # fmt: skip
            self._tell(self._failure)

    # ------------------------------------------------------------------------------------ again

    def committed(self, applied: int) -> None:
        """Steps up to here need not be told again."""
        while self._backlog and self._backlog[0].step <= applied:
            self._backlog.popleft()

    def announce(self, held: int | None) -> None:
        """Tell what an orchestrator needs that knows nothing; `held`: the step after which this share holds."""
        self._fresh.clear()
        self._steps(list(self._backlog))
        if self._failure is not None:
            self._tell(self._failure)
        elif held is not None:
            self.held(held)

    def _tell(self, message: Message) -> None:
        """Send to the orchestrator; if it is away, it is told again when there is one."""
        try:
            self._hub.bus.send(self._hub.orchestrator, message)
        except DCNRError as error:
            kind = type(message).__name__
            self._hub.log.warning("untold", session=self._share.session, message=kind, error=str(error))
