"""Exactly once, by one owner, with the truth's numbers.

- An epoch is recorded, with its placement and start step, before anybody applies a step in it.
- In an epoch each VNode is applied by one process, the placement's, under the incarnation that the record names; its
  steps follow one another from the epoch's start step, and every VNode of the process is in each.
- No member is more than a step ahead of another: U(s+1) needs everybody's report of s+1, which needs everybody's U(s).
- Weights, samples and losses after each step are the undisturbed run's, in every epoch and every replay.
- A process never applies in an epoch after it applied in a higher one, nor more than one update (the one that was in
  the compute thread) of an epoch that it was told to release.
"""

from __future__ import annotations

from tests.sim.checks.breach import Check, name_of
from tests.sim.checks.formats import item
from tests.sim.checks.model import Epoch, Model, Who
from tests.sim.history import Computed, Delivered, History, Truth


class Training(Check):
    """See the module."""

    def __init__(self, truth: Truth, session: str) -> None:
        super().__init__()
        self._truth = truth
        self._session = session
        self._last: dict[tuple[str, int, str], Computed] = {}  # session, epoch, VNode
        self._process: dict[tuple[str, int, Who], Computed] = {}
        self._highest: dict[tuple[str, Who], Computed] = {}
        self._released: dict[tuple[str, Who], tuple[int, Delivered]] = {}
        self._after_release: dict[tuple[str, Who], int] = {}
        self._done: dict[int, set[str]] = {}

    def computed(self, event: Computed, model: Model) -> None:
        """See the module."""
        epoch = model.epochs.get((event.session, event.epoch))
        who = (event.pnode, event.boot)
        if epoch is None:
            self.breach(
                "epochs are recorded first", event.t, f"a step of epoch {event.epoch} was applied before it was stored",
                who=[name_of(*who)], step=event.step, events=[event],
            )  # fmt: skip
        else:
            self._order(event, epoch, who)
            self._owner(event, epoch, who, model)
            self._skew(event, epoch, model)
        self._fences(event, who)
        if event.session == self._session:
            self._numbers(event, who)

    def delivered(self, event: Delivered, model: Model) -> None:
        """A release counts if its term is not below what the process knows."""
        if event.kind == "Release":
            who = (event.dst, event.dst_boot)
            session, epoch, term = (event.fields.get(name) for name in ("session", "epoch", "term"))
            if isinstance(epoch, int) and isinstance(term, int) and term >= model.known_term.get(who, 0):
                before = self._released.get((str(session), who))
                if before is None or epoch > before[0]:
                    self._released[str(session), who] = (epoch, event)
                    self._after_release[str(session), who] = 0
        elif event.kind == "Progress" and event.fields.get("session") == self._session:
            for report in event.fields.get("steps") or ():  # type: ignore[attr-defined]
                self._report(event, report)

    # ------------------------------------------------------------ order and owners

    def _order(self, event: Computed, epoch: Epoch, who: Who) -> None:
        start = epoch.record.start_step
        for vnode in event.weights:
            place = (event.session, event.epoch, vnode)
            before = self._last.get(place)
            last = before.step if before is not None else start
            shown = [event] if before is None else [before, event]
            if before is not None and (before.pnode, before.boot) != who:
                self.breach(
                    "one owner", event.t, f"{vnode} was applied by two processes in epoch {event.epoch}",
                    who=[name_of(before.pnode, before.boot), name_of(*who)], step=event.step, events=shown,
                )  # fmt: skip
            if event.step <= last:
                self.breach(
                    "exactly once", event.t,
                    f"{vnode} was applied again: step {event.step} after step {last} of epoch {event.epoch}",
                    who=[name_of(*who)], step=event.step, events=shown,
                )  # fmt: skip
            elif event.step > last + 1:
                self.breach(
                    "exactly once", event.t,
                    f"{vnode} left out steps: step {event.step} follows step {last} of epoch {event.epoch}",
                    who=[name_of(*who)], step=event.step, events=shown,
                )  # fmt: skip
            self._last[place] = event
        mine = (event.session, event.epoch, who)
        before = self._process.get(mine)
        last = before.step if before is not None else start
        if event.step != last + 1:
            self.breach(
                "exactly once", event.t, f"step {event.step} follows step {last} of epoch {event.epoch}",
                who=[name_of(*who)], step=event.step, events=[event] if before is None else [before, event],
            )  # fmt: skip
        self._process[mine] = event

    def _owner(self, event: Computed, epoch: Epoch, who: Who, model: Model) -> None:
        record = epoch.record
        wanted = {
            vnode
            for vnode, pnode in record.placement.items()
            if pnode == event.pnode and vnode in self._truth.weights.get(event.step, {})
        }
        if event.session == self._session and set(event.weights) != wanted:
            self.breach(
                "one owner", event.t,
                f"{sorted(event.weights)} were applied, but epoch {event.epoch} places {sorted(wanted)} there",
                who=[name_of(*who)], step=event.step, events=[epoch.by, event],
            )  # fmt: skip
        granted = record.incarnations.get(event.pnode)
        if granted not in model.told_incarnations.get(who, set()):
            told = sorted(model.told_incarnations.get(who, set()))
            self.breach(
                "one owner", event.t,
                f"epoch {event.epoch} is for incarnation {granted} of {event.pnode}; this process was granted {told}",
                who=[name_of(*who)], step=event.step, events=[epoch.by, event],
            )  # fmt: skip

    def _skew(self, event: Computed, epoch: Epoch, model: Model) -> None:
        for pnode in sorted(epoch.members):
            last = model.applied.get((event.session, event.epoch, pnode), epoch.record.start_step)
            if last < event.step - 1:
                self.breach(
                    "exactly once", event.t,
                    f"step {event.step} was applied, but {pnode} has applied only step {last} of epoch {event.epoch}",
                    who=[name_of(event.pnode, event.boot), pnode], step=event.step, events=[event],
                )  # fmt: skip

    def _fences(self, event: Computed, who: Who) -> None:
        place = (event.session, who)
        highest = self._highest.get(place)
        if highest is not None and event.epoch < highest.epoch:
            self.breach(
                "fenced by epoch", event.t, f"a step of epoch {event.epoch} was applied after one of {highest.epoch}",
                who=[name_of(*who)], step=event.step, events=[highest, event],
            )  # fmt: skip
        if highest is None or event.epoch >= highest.epoch:
            self._highest[place] = event
        released = self._released.get(place)
        if released is not None and event.epoch <= released[0]:
            self._after_release[place] += 1
            if self._after_release[place] > 1:
                self.breach(
                    "fenced by epoch", event.t, f"epoch {event.epoch} goes on though it was released",
                    who=[name_of(*who)], step=event.step, events=[released[1], event],
                )  # fmt: skip

    # ------------------------------------------------------------ numbers

    def _numbers(self, event: Computed, who: Who) -> None:
        truth = self._truth
        if not 1 <= event.step <= truth.steps:
            self.breach(
                "same numbers", event.t, f"there is no step {event.step} in this run", who=[name_of(*who)],
                step=event.step, events=[event],
            )  # fmt: skip
            return
        expected = truth.weights[event.step]
        for vnode, digest in event.weights.items():
            if expected.get(vnode) != digest:
                self.breach(
                    "same numbers", event.t,
                    f"the weights of {vnode} are {digest[:12]}, the truth's are {expected.get(vnode, 'none')[:12]}",
                    who=[name_of(*who)], step=event.step, events=[event],
                )  # fmt: skip
        if event.samples:
            if event.samples != truth.samples[event.step]:
                self.breach(
                    "same numbers", event.t, "the samples of this step are not the truth's", who=[name_of(*who)],
                    step=event.step, events=[event],
                )  # fmt: skip
            if event.loss != truth.losses[event.step]:
                self.breach(
                    "same numbers", event.t, f"the loss is {event.loss!r}, the truth's is {truth.losses[event.step]!r}",
                    who=[name_of(*who)], step=event.step, events=[event],
                )  # fmt: skip
        self._done.setdefault(event.step, set()).update(event.weights)

    def _report(self, event: Delivered, report: object) -> None:
        step, loss, samples = item(report, "step", 0), item(report, "loss", 1), item(report, "ids_digest", 7, "")
        who = [name_of(event.src, event.src_boot)]
        if not isinstance(step, int) or step not in self._truth.losses:
            self.breach("same numbers", event.t, f"step {step!r} was reported", who=who, events=[event])
            return
        if loss != self._truth.losses[step] or (samples and samples != self._truth.samples[step]):
            self.breach(
                "same numbers", event.t, f"loss {loss!r} and samples {str(samples)[:12]} were reported, "
                f"the truth's are {self._truth.losses[step]!r} and {self._truth.samples[step][:12]}",
                who=who, step=step, events=[event],
            )  # fmt: skip

    def end(self, history: History, model: Model) -> None:
        """A run that ended well has made every step of every VNode."""
        if history.ended != "finished":
            return
        for step in range(1, history.steps + 1):
            missing = set(self._truth.weights.get(step, {})) - self._done.get(step, set())
            if missing:
                self.breach(
                    "exactly once", history.end_s, f"nobody ever applied step {step} of {sorted(missing)}", step=step
                )
                return
