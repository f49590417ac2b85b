"""The driver of one session's commits: collects what PNodes say of their parts, and makes whole cuts the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator import events
from orchestrator.commits import BadPartsError, Committer, CutCollector, environment_note, manifest_of
from orchestrator.lifecycle import Stage
from orchestrator.truth import SupersededError
from orchestrator.waits import said_by
from wire import messages
from wire.errors import DCNRError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.catalog import Listed
    from orchestrator.driver import SessionDriver
    from wire.messages import Part, PartsSaved

MAX_EARLY = 4096
"""Reports of parts kept while a deployment is being taken over."""


class Cutting:
    """Parts, cuts and commits of a session; see the module's docstring."""

    def __init__(self, driver: SessionDriver) -> None:
        record = driver.session.record
        self._driver = driver
        self.committer = Committer(driver.service.store, record.network, record.session)
        self._cuts: CutCollector | None = None
        self._listed: Listed | None = None
        self._ready: dict[int, tuple[list[Part], list[str]]] = {}
        self._early: list[tuple[PartsSaved, Sequence[Part]]] = []

    def begin(self, epoch: int, placement: Mapping[str, str], listed: Listed) -> None:
        """Collect the cuts of an epoch; those of another are dropped."""
        self._cuts = CutCollector(epoch, placement, listed.stateful)
        self._listed = listed
        self._ready.clear()
        early, self._early = self._early, []
        for message, parts in early:
            self.parts_saved(message, parts)

    def parts_saved(self, message: PartsSaved, parts: Sequence[Part]) -> None:
        """A PNode's parts of a cut are in the store."""
        driver, record = self._driver, self._driver.session.record
        if message.epoch != record.epoch:
            return
        if driver.session.adoption is not None and (self._cuts is None or self._cuts.epoch != message.epoch):
            if len(self._early) < MAX_EARLY:
                self._early.append((message, parts))
            return
        if message.step <= record.committed:
            told = messages.Committed(record.session, record.epoch, 0, record.committed)
            driver.service.tell(message.pnode, told, limit_s=0.0)
            return
        if self._cuts is None or self._cuts.epoch != message.epoch:
            return
        try:
            cut = self._cuts.add(message.pnode, message.step, parts, message.environment)
        except BadPartsError as error:
            driver.note("warning", str(error))
            return
        if cut is not None and message.step not in self._ready:
            self._ready[message.step] = (self._cuts.ordered(cut), sorted(cut.environments))
            driver.feed(events.PartsArrived(message.epoch, message.step))

    def awaited(self, step: int) -> list[str]:
        """Whose parts of that step are awaited."""
        if self._cuts is None or self._driver.session.deployment is None:
            return []
        return self._cuts.awaited().get(step, [])

    def _wanted(self, epoch: int) -> bool:
        """Whether a cut of that epoch is still worth waiting for the store."""
        session = self._driver.session
        return session.record.epoch == epoch and session.stage in (Stage.UP, Stage.ADOPTING)

    async def commit(self, epoch: int, step: int) -> None:
        """Make a cut the head; the session hears what came of it, in any case."""
        driver = self._driver
        async with self.committer.lock:
            ready = self._ready.pop(step, None)
            if ready is None or self._cuts is None or self._cuts.epoch != epoch or driver.session.record.epoch != epoch:
                driver.feed(events.CommitFailed(epoch, step, "it is of no use any more"))
                return
            try:
                await self._commit(epoch, step, *ready)
            except SupersededError as error:
                driver.service.superseded(error)
            except DCNRError as error:
                driver.feed(events.CommitFailed(epoch, step, error.message, error.hint))
            except Exception as error:
                driver.feed(events.CommitFailed(epoch, step, *defect(error)))
                raise

    async def _commit(self, epoch: int, step: int, parts: list[Part], environment: list[str]) -> None:
        driver, service, record = self._driver, self._driver.service, self._driver.session.record
        cuts, listed = self._cuts, self._listed
        assert cuts is not None
        assert listed is not None
        before, data = self.committer.environment, listed.recipe.data
        manifest = manifest_of(
            record,
            parts,
            step=step,
            head=self.committer.head,
            term=service.term,
            batch=listed.recipe.batch,
            sampler=data.sampler if data is not None else "",
            environment=environment,
            created_s=service.wall(),
        )
        cuts.done(step)
        under_way = cuts.under_way() | {part.digest for later, _ in self._ready.values() for part in later}
        head = await self.committer.commit(
            manifest,
            wanted=lambda: self._wanted(epoch),
            still_mine=service.truth.still_mine,
            troubled=lambda text: driver.feed(events.Troubled(f"commit {step}", said_by("the orchestrator", text))),
        )
        note = environment_note(before, environment) if head.step == step else ""
        driver.feed(events.Committed(epoch, head.step, head.hash, note))
        if not driver.session.removing and (problem := await self.committer.prune(record.keep, under_way)):
            driver.note("warning", problem)


def defect(error: Exception) -> tuple[str, str]:
    """Text and hint of what nobody foresaw: whoever waits has to hear of it now, not at a deadline."""
    return f"{type(error).__name__}: {error}", "this is a defect of DCNR: please report it, with the orchestrator's log"
