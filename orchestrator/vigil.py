"""Whether this process still is the orchestrator of its store.

There may be another one at any time, and then that one has the store. This one finds out by a conditional write that
fails (`truth`), by a look at the term now and then, or from a PNode that knows a higher one. When its own clock shows
that it stood still (a stopped process, a sleeping machine), it looks at once. Until it knows, whatever comes is held
back: nothing is decided or sent on old knowledge.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.truth import SupersededError
from wire.errors import DCNRError

if TYPE_CHECKING:
    from orchestrator.service import Service

WATCH_S = 2.0
RETRY_S = 1.0
MAX_HELD_BACK = 50_000
"""Beyond that the oldest are dropped; what they told is told again, or missed at a deadline."""


class Vigil:
    """See the module's docstring. `gap_s`: a service that did not go round its loop for longer stood still.

    It begins in doubt; `go_on` is called once the term is raised.
    """

    def __init__(self, service: Service, *, gap_s: float) -> None:
        self._service = service
        self._gap_s = gap_s
        self._in_doubt = True
        self._held_back: deque[Callable[[], None]] = deque()
        self.stirred = service.now()
        """When the service last went round its loop."""

    def awake(self) -> bool:
        """False while it has to be found out first whether another one took over; use `hold_back` then."""
        still_s = self._service.now() - self.stirred
        if not self._in_doubt and still_s > self._gap_s and not self._service.ending:
            self._service.logger.warning("stood still", seconds=round(still_s, 1))
            self.doubt()
        return not self._in_doubt

    async def sure(self) -> None:
        """Wait until it is known."""
        while not self.awake():
            known = asyncio.Event()
            self.hold_back(known.set)
            await known.wait()

    def hold_back(self, work: Callable[[], None]) -> None:
        """Do it once that is known, if it is so; in order."""
        self._held_back.append(work)
        if len(self._held_back) > MAX_HELD_BACK:
            self._held_back.popleft()

    def doubt(self) -> None:
        """There is a sign of another orchestrator: find out before anything else."""
        if not self._in_doubt:
            self._in_doubt = True
            self._service.spawn(self._find_out(), "check of the term")

    async def _find_out(self) -> None:
        told = False
        while not await self._look(quiet=told):
            told = True
            await asyncio.sleep(RETRY_S)
        if not self._service.ending:
            self._service.membership.excuse(self._service.now())
            self.go_on()

    def go_on(self) -> None:
        """It is the orchestrator: do what was held back."""
        self._in_doubt, self.stirred = False, self._service.now()
        while self._held_back and not self._in_doubt:
            try:
                self._held_back.popleft()()
            except Exception as error:
                self._service.logger.exception("failed", error=str(error))

    async def watch(self) -> None:
        """Look at the term now and then, for ever."""
        while True:
            await asyncio.sleep(max(WATCH_S, self._service.membership.lease_s / 2))
            await self._look()

    async def _look(self, *, quiet: bool = False) -> bool:
        """Whether the term could be looked at; if it's no longer ours, the service ends."""
        try:
            await self._service.truth.still_mine()
        except SupersededError as error:
            self._service.superseded(error)
        except DCNRError as error:
            if not quiet:
                self._service.logger.warning("store not reachable", error=str(error))
            return False
        return True
