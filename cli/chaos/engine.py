"""A run, a fleet and a schedule: watches the run, hurts the fleet, and says how it went.

One event loop does it all. `hurts` holds what each kind of fault does. Two faults may overlap: what lasts (an absence,
a pause, a cut) goes on in the background, and `settle` decides whether the next one waits for a new step of the run.
Every wait ends: without a new step for `stuck_s` the run counts as stuck, and is shown with what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cli.chaos import hurts
from cli.chaos.faults import Fault, Kind, Schedule
from cli.chaos.fleet import Fleet
from cli.chaos.sight import Sight
from cli.client import Client
from cli.terminal import Terminal
from wire.errors import DCNRError

LOOK_S = 0.25
ANSWER_S = 4.0
TICK_S = 0.02


class ChaosError(DCNRError):
    """The run did not stand what was done to it: it failed, or nothing moves any more."""


@dataclass(slots=True)
class Wound:
    """One fault as it happened. Times in seconds since the run began; `recovered_s`: from the fault (from its end, if
    it lasted) to the first step that had not been made before, None if there was none any more."""

    number: int
    kind: Kind
    at_s: float = 0.0
    step: int = 0
    target: str = ""
    text: str = ""
    counts: bool = True
    """False: nothing was hit (the run had just ended, a second victim came too late)."""
    recovered_s: float | None = None
    redone: int = 0
    hurt_member: bool = False
    """The victim held VNodes."""
    seconds: float = 0.0
    """How long the fault was to last."""
    lasts: bool = False
    """It is not over at once."""
    before: int = 0
    """Steps that had been made again before it."""
    epoch: int = 0
    """Of the run when it happened."""


@dataclass(slots=True, eq=False)
class _Open:
    """A wound that has not healed: the highest step, the steps made again, and the time when it happened or ended.

    `epoch`: a step counts only in a later one; until then those made before the fault may still be told.
    """

    wound: Wound
    mark: int
    redone: int
    since: float
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """How far to go. `faults`, `seconds`: stop hurting after so many, so long (0: until the run ends)."""

    faults: int = 0
    seconds: float = 0.0
    stuck_s: float = 120.0
    pause_at_end: bool = False
    """When the faults are over, hold the run at the step it is in; otherwise it goes on to its end."""


@dataclass(slots=True)
class Outcome:
    """How a run ended. `breaches` are what must not be; `missing` counts the steps whose loss nobody told."""

    session: str
    state: str
    step: int
    final_hash: str
    seconds: float
    wounds: list[Wound]
    redone: int
    breaches: list[str]
    flipped: int = 0
    missing: int = 0
    epochs: int = 0
    recoveries: int = 0

    @property
    def good(self) -> bool:
        """Nothing happened that must not."""
        return not self.breaches

    def counts(self) -> Counter[str]:
        """Faults that hit, by kind."""
        return Counter(str(wound.kind) for wound in self.wounds if wound.counts)


@dataclass(slots=True)
class Told:
    """What a display is told, all optional."""

    hurt: Callable[[Wound], None] = lambda wound: None
    healed: Callable[[Wound], None] = lambda wound: None
    tick: Callable[[Sight], None] = lambda sight: None


class Engine:
    """See the module's docstring."""

    def __init__(
        self, fleet: Fleet, session: str, schedule: Schedule, rules: Rules, *, told: Told | None = None
    ) -> None:
        self.fleet = fleet
        self.session = session
        self.schedule = schedule
        self.rules = rules
        self.told = told or Told()
        self.sight = Sight()
        self.wounds: list[Wound] = []
        self.began = time.monotonic()
        self.client: Client | None = None
        self.pausing = False
        self._open: list[_Open] = []
        self._unmissed_s = 10.0 + 4 * fleet.shape.lease_s
        self._ends: list[_Open] = []
        """Of faults that still last."""
        self._lasting: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._problem: BaseException | None = None

    # ------------------------------------------------------------ life

    async def run(self) -> Outcome:
        """Hurt the run until it ends or the rules say enough; then let it end. Raises `ChaosError`."""
        async with self.watching():
            number = 0
            while not self.over and not self._enough(number):
                await self._apply(self.schedule.fault(number))
                number += 1
            await self._heal()
            await self._end()
            return self.outcome()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """While the body runs, the run is watched; begins with its first step."""
        self.began = time.monotonic()
        watch = asyncio.ensure_future(self._watch())
        try:
            await self.until(lambda: self.sight.highest > 0 or self.over, "the first step")
            yield
        finally:
            watch.cancel()
            for task in list(self._lasting):
                task.cancel()
            await asyncio.gather(watch, *self._lasting, return_exceptions=True)

    @property
    def over(self) -> bool:
        """The run is at its end."""
        return self.sight.state == "finished"

    def outcome(self) -> Outcome:
        """How it is now."""
        info, sight = self.sight.info, self.sight
        return Outcome(
            session=self.session,
            state=sight.state,
            step=info.committed if info is not None else 0,
            final_hash=info.final_hash if info is not None else "",
            seconds=time.monotonic() - self.began,
            wounds=self.wounds,
            redone=sight.redone,
            breaches=list(sight.breaches),
            flipped=sum(gate.flipped for gate in self.fleet.gates()),
            missing=len(sight.missing(info.committed)) if info is not None else 0,
            epochs=info.epoch if info is not None else 0,
            recoveries=info.recoveries if info is not None else 0,
        )

    def _enough(self, number: int) -> bool:
        limit, seconds = self.rules.faults, self.rules.seconds
        return bool((limit and number >= limit) or (seconds and time.monotonic() - self.began >= seconds))

    # ------------------------------------------------------------ faults

    async def _apply(self, fault: Fault) -> None:
        if fault.settle:
            await self.until(lambda: not (self._open or self._ends) or self.over, "a new step")
        await self.sleep(fault.wait_s)
        if self.over or self._enough(fault.number):
            return
        wound = Wound(fault.number, fault.kind, seconds=fault.seconds)
        self.strike(wound)
        self.wounds.append(wound)
        await hurts.HURTS[fault.kind](self, fault, wound)
        self.told.hurt(wound)
        if wound.counts and not wound.lasts:
            epoch = wound.epoch if wound.hurt_member else 0
            self._open.append(_Open(wound, wound.step, wound.before, self.began + wound.at_s, epoch))

    def strike(self, wound: Wound) -> None:
        """It happens now."""
        wound.at_s, wound.step = time.monotonic() - self.began, self.sight.highest
        wound.before, wound.epoch = self.sight.redone, self.sight.epoch

    def later(self, work: Coroutine[Any, Any, None], wound: Wound | None = None) -> None:
        """Let something go on beside the rest; if it fails, the run is over. With `wound`, that fault lasts as long."""
        task = asyncio.ensure_future(work)
        self._lasting.add(task)
        task.add_done_callback(self._gone)
        if wound is not None:
            wound.lasts = True
            opened = _Open(wound, 0, wound.before, 0.0)
            self._ends.append(opened)
            task.add_done_callback(lambda _: self._ended(opened))

    def _ended(self, opened: _Open) -> None:
        self._ends.remove(opened)
        opened.mark, opened.since = self.sight.highest, time.monotonic()
        self._open.append(opened)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._lasting.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._problem = self._problem or problem

    async def _heal(self) -> None:
        """Wait until all that lasts is over: what was killed is back, what was paused goes on, every line is free."""
        while self._lasting:
            await asyncio.wait(self._lasting, timeout=1.0)
            self._raise()
        for gate in self.fleet.gates():
            for source in gate.sources():
                gate.set(source, None)
        for seat in self.fleet.seats.values():
            if seat.paused:
                self.fleet.go_on(seat.name)
            if not seat.alive:
                self.fleet.start(seat.name)

    async def _end(self) -> None:
        """To the end of the run, or to a hold."""
        if not self.rules.pause_at_end:
            await self.until(lambda: self.over, "the end of the run")
            return
        mark = self.sight.highest
        await self.until(lambda: (self.sight.highest > mark and not self._open) or self.over, "a new step")
        self.pausing = True
        while self.sight.state not in ("paused", "finished"):
            if self.sight.state == "running" and self.client is not None:
                with contextlib.suppress(DCNRError):
                    await self.client.act(self.session, "pause", timeout_s=10.0)
            await self.sleep(0.1)

    # ------------------------------------------------------------ waiting

    async def until(
        self, ready: Callable[[], bool], what: str, *, timeout_s: float | None = None, every_s: float = TICK_S
    ) -> bool:
        """Wait until `ready()`; False at the deadline. Raises `ChaosError` when the run is stuck or failed."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while not ready():
            self._raise()
            if time.monotonic() > deadline:
                return False
            still = self.sight.still_s(time.monotonic()) if self.sight.moved else time.monotonic() - self.began
            if still > self.rules.stuck_s and not self.over:
                raise ChaosError(f"no new step for {still:.0f} s, while waiting for {what}: {self.describe()}")
            await asyncio.sleep(every_s)
        return True

    async def sleep(self, seconds: float) -> None:
        """Wait, but not beyond the end of the run."""
        await self.until(lambda: self.over, "time", timeout_s=seconds)

    def describe(self) -> str:
        """How things stand, in one line."""
        info = self.sight.info
        seats = ", ".join(
            f"{seat.name} {'paused' if seat.paused else 'runs' if seat.alive else 'is dead'}"
            for seat in self.fleet.seats.values()
        )
        if info is None:
            return f"nothing seen of {self.session}; {seats}"
        waits = "; ".join(info.waiting) or "nobody says for whom it waits"
        error = f"; {info.error}" if info.error else ""
        return f"{self.session} is {info.state} at step {info.step}, epoch {info.epoch}{error}; {waits}; {seats}"

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self.sight.state == "failed":
            raise ChaosError(f"the run failed: {self.describe()}")

    # ------------------------------------------------------------ watching

    def rewatch(self) -> None:
        """The orchestrator is another process now: connect anew."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            self._watching = asyncio.ensure_future(self._look_on())
            try:
                await self._watching
            except asyncio.CancelledError:
                mine = asyncio.current_task()
                if mine is not None and mine.cancelling():
                    self._watching.cancel()
                    await asyncio.gather(self._watching, return_exceptions=True)
                    raise
            except DCNRError:
                pass
            except Exception as problem:
                self._problem = self._problem or problem
                raise
            self.client = None
            await asyncio.sleep(0.05)

    async def _look_on(self) -> None:
        async with Client(self.fleet.direct, Terminal("json"), timeout_s=ANSWER_S) as client:
            after, replay = 0, True
            while True:
                seen = await client.watch(self.session, after, 0.0 if replay else LOOK_S)
                self.client = client
                self.sight.take(seen.session, seen.events, time.monotonic(), replay=replay and bool(self.wounds))
                after = seen.events[-1].seq if seen.events else after
                replay = replay and bool(seen.events)
                self._healed()
                self.told.tick(self.sight)
                if seen.session.state == "paused" and not self.pausing:
                    await client.act(self.session, "resume", timeout_s=30.0)

    def _healed(self) -> None:
        now = time.monotonic()
        for opened in self._open:
            if opened.epoch and self.sight.epoch > opened.epoch:
                opened.mark, opened.epoch = self.sight.highest, 0
        done = [
            opened
            for opened in self._open
            if self.sight.highest > opened.mark and (not opened.epoch or now - opened.since > self._unmissed_s)
        ]
        self._open = [opened for opened in self._open if opened not in done]
        for opened in done:
            opened.wound.recovered_s = now - opened.since
            opened.wound.redone = self.sight.redone - opened.redone
            self.told.healed(opened.wound)
