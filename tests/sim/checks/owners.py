"""Terms, epochs and incarnations only grow, and fence.

- A term is taken by one process, and each is higher than all before. Who writes a record or head has a term; what it
  says in the head is its own; no process with a lower term changes an object after one with a higher term did.
- A session's epoch never falls, nor its committed step; what an epoch was recorded with stays as it was.
- An incarnation is stored before it is told, never falls, and is told to one process only.
- A process that ended does and writes nothing, beyond writes that were on their way to the store.
"""

from __future__ import annotations

from tests.sim.checks.breach import Check, name_of
from tests.sim.checks.formats import Record
from tests.sim.checks.model import Model, Thing, Who
from tests.sim.history import Computed, Delivered, History, Process, Wrote

IN_FLIGHT_S = 60.0
"""A write of a process that has ended may still reach the store for so long."""

ENDS_WITHIN_S = 60.0
"""An orchestrator whose term is over, awake and with its store, ends within this time."""

CONTROL = ("Registered", "HeartbeatAck", "Prepare", "StartRun", "HoldRun", "Release")


class Owners(Check):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._writers: dict[str, tuple[int, Wrote]] = {}  # key -> highest term that wrote it
        self._cluster = ""
        self._told: dict[tuple[str, int], tuple[Who, Delivered]] = {}

    def wrote(self, event: Wrote, thing: Thing, model: Model) -> None:
        """See the module."""
        kind = thing.key.kind
        self._after_end(event, model)
        if kind == "term":
            self._term(event, thing, model)
        elif kind in ("record", "incarnations", "epochs", "head"):
            self._control(event, thing, model)

    def _after_end(self, event: Wrote, model: Model) -> None:
        life = model.lives.get((event.by, event.boot))
        if life is not None and life.ended is not None and event.t > life.ended.t + IN_FLIGHT_S:
            self.breach(
                "the dead do nothing", event.t, "a write arrived long after its process ended",
                who=[name_of(event.by, event.boot)], events=[life.ended, event],
            )  # fmt: skip

    def _term(self, event: Wrote, thing: Thing, model: Model) -> None:
        who = (event.by, event.boot)
        if event.how == "delete" or thing.problem or thing.term is None:
            self.breach(
                "terms grow", event.t, f"the term was {thing.problem or 'deleted'}", who=[name_of(*who)], events=[event]
            )
            return
        cluster, term = thing.term
        owner = model.term_owner.get(term)
        same = owner == who and term == model.term
        if term <= model.term and not same:
            raised = [model.store["registry/term.json"].by] if "registry/term.json" in model.store else []
            self.breach(
                "terms grow", event.t, f"term {term} was taken when there was term {model.term}",
                who=[name_of(*who), *([name_of(*owner)] if owner is not None else [])], events=[*raised, event],
            )  # fmt: skip
        if self._cluster and cluster != self._cluster:
            self.breach("terms grow", event.t, f"cluster {self._cluster} became {cluster}", events=[event])
        self._cluster = self._cluster or cluster

    def _control(self, event: Wrote, thing: Thing, model: Model) -> None:
        who = (event.by, event.boot)
        term = model.terms.get(who, 0)
        if not term:
            self.breach(
                "one orchestrator", event.t, f"{event.key} was written by a process that has no term",
                who=[name_of(*who)], events=[event],
            )  # fmt: skip
        highest = self._writers.get(event.key)
        if highest is not None and term < highest[0]:
            self.breach(
                "one orchestrator", event.t, f"term {term} wrote {event.key} after term {highest[0]} did",
                who=[name_of(highest[1].by, highest[1].boot), name_of(*who)], events=[highest[1], event],
            )  # fmt: skip
        else:
            self._writers[event.key] = (term, event)
        if thing.problem:
            self.breach("whole records", event.t, thing.problem, who=[name_of(*who)], events=[event])
        if thing.head is not None and thing.head.term != term:
            self.breach(
                "one orchestrator", event.t, f"a head of term {thing.head.term} was written under term {term}",
                who=[name_of(*who)], step=thing.head.step, events=[event],
            )  # fmt: skip
        if thing.record is not None:
            self._record(event, thing.record, model)
        if thing.granted is not None:
            before = model.granted()
            fell = [pnode for pnode, number in before.items() if thing.granted.get(pnode, 0) < number]
            if fell:
                self.breach(
                    "incarnations grow", event.t, f"the incarnations granted to {fell} fell", who=[name_of(*who)],
                    events=[model.store[event.key].by, event],
                )  # fmt: skip

    def _record(self, event: Wrote, record: Record, model: Model) -> None:
        who = [name_of(event.by, event.boot)]
        newest = model.newest.get(record.session, 0)
        before = model.record(record.session)
        shown = [model.store[event.key].by, event] if event.key in model.store else [event]
        if record.epoch < newest:
            self.breach("epochs grow", event.t, f"epoch {newest} became {record.epoch}", who=who, events=shown)
        if before is not None and record.committed < before.committed:
            self.breach(
                "committed is durable", event.t, f"committed step {before.committed} became {record.committed}",
                who=who, step=record.committed, events=shown,
            )  # fmt: skip
        known = model.epochs.get((record.session, record.epoch))
        if known is None or not record.placement:  # it is not deployed any more
            return
        first = known.record
        was = (first.placement, first.incarnations, first.start_step)
        if was != (record.placement, record.incarnations, record.start_step):
            self.breach(
                "epochs grow", event.t, f"epoch {record.epoch} was recorded with another placement, incarnations or "
                f"start step before", who=who, events=[known.by, event],
            )  # fmt: skip

    def delivered(self, event: Delivered, model: Model) -> None:
        """What an orchestrator says is of its own term; incarnations are unique and durable."""
        source = (event.src, event.src_boot)
        term = event.fields.get("term")
        if event.kind in CONTROL and isinstance(term, int) and term != model.terms.get(source, 0):
            self.breach(
                "one orchestrator", event.t, f"{event.kind} of term {term} from a process of term "
                f"{model.terms.get(source, 0)}", who=[name_of(*source)], events=[event],
            )  # fmt: skip
        if event.kind != "Registered":
            return
        number, who = event.fields.get("incarnation"), (event.dst, event.dst_boot)
        if not isinstance(number, int):
            return
        if model.granted().get(event.dst, 0) < number:
            self.breach(
                "incarnations grow", event.t, f"incarnation {number} of {event.dst} was told before it was stored",
                who=[name_of(*who)], events=[event],
            )  # fmt: skip
        holder, first = self._told.setdefault((event.dst, number), (who, event))
        if holder != who:
            self.breach(
                "incarnations grow", event.t, f"incarnation {number} of {event.dst} was granted twice",
                who=[name_of(*holder), name_of(*who)], events=[first, event],
            )  # fmt: skip

    def computed(self, event: Computed, model: Model) -> None:
        """Only the living compute."""
        who = (event.pnode, event.boot)
        life = model.lives.get(who)
        if life is None or life.ended is not None or life.frozen:
            state = "unknown" if life is None else "ended" if life.ended is not None else "frozen"
            ended = [life.ended] if life is not None and life.ended is not None else []
            self.breach(
                "the dead do nothing", event.t, f"a step was applied by a process that is {state}",
                who=[name_of(*who)], step=event.step, events=[*ended, event],
            )  # fmt: skip

    def process(self, event: Process, model: Model) -> None:
        """Boots are unique."""

    def end(self, history: History, model: Model) -> None:
        """Who was superseded has ended."""
        for who, term in model.terms.items():
            life = model.lives.get(who)
            if life is None or life.ended is not None or life.frozen or term >= model.term:
                continue
            later = min(t for number, t in model.raised_s.items() if number > term)
            since = max(later, life.thawed_s, history.healed_s)
            if history.end_s > since + ENDS_WITHIN_S:
                self.breach(
                    "one orchestrator", history.end_s,
                    f"term {term} has been over for {history.end_s - since:.0f} s, and its orchestrator still runs",
                    who=[name_of(*who)], events=[life.began],
                )  # fmt: skip
