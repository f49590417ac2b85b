"""The history itself is one that can be: otherwise the simulated world is wrong, and nothing it shows counts."""

from __future__ import annotations

from tests.sim.checks.breach import Check, name_of
from tests.sim.checks.model import Model, Thing
from tests.sim.history import Computed, Delivered, Event, History, Process, Wrote


class Sanity(Check):
    """Time never goes back, boots are unique, nothing is handed to the dead, and a store holds what was written."""

    def __init__(self) -> None:
        super().__init__()
        self._t = 0.0
        self._boots: dict[tuple[str, int], Process] = {}
        self._computed = 0

    def _time(self, event: Event) -> None:
        if event.t < self._t:
            self.breach("the history can be", event.t, f"time went back from {self._t:.3f}", events=[event])
        self._t = max(self._t, event.t)

    def process(self, event: Process, model: Model) -> None:
        """See the class."""
        self._time(event)
        who = (event.id, event.boot)
        if event.what == "start":
            if who in self._boots:
                self.breach("the history can be", event.t, "a boot began twice", who=[name_of(*who)], events=[event])
            self._boots[who] = event
        elif who not in self._boots:
            self.breach("the history can be", event.t, "it never began", who=[name_of(*who)], events=[event])

    def wrote(self, event: Wrote, thing: Thing, model: Model) -> None:
        """See the class."""
        self._time(event)
        if event.how == "if_absent" and event.key in model.store:
            self.breach("the history can be", event.t, "if_absent replaced an object", events=[event])

    def delivered(self, event: Delivered, model: Model) -> None:
        """See the class."""
        self._time(event)
        life = model.lives.get((event.dst, event.dst_boot))
        if life is not None and (life.ended is not None or life.frozen):
            self.breach(
                "the history can be", event.t, "a message was handed to a process that is dead or frozen",
                who=[name_of(event.dst, event.dst_boot)], events=[event],
            )  # fmt: skip

    def computed(self, event: Computed, model: Model) -> None:
        """See the class."""
        self._time(event)
        self._computed += 1

    def end(self, history: History, model: Model) -> None:
        """See the class."""
        if not self._computed:
            self.breach("the history can be", history.end_s, "nobody ever computed anything")
        differ = sorted(
            key
            for key in history.store.keys() | model.store.keys()
            if history.store.get(key, ("", 0))[0] != (model.store[key].sha256 if key in model.store else "")
        )
        if differ:
            self.breach("the history can be", history.end_s, f"the store holds other bytes than were written: {differ}")
