"""A breach of an invariant, and what every check is: it takes in the events one by one, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.history import Computed, Delivered, Event, Fault, History, Process, Told, Wrote

if TYPE_CHECKING:
    from tests.sim.checks.model import Model, Thing

MOST = 5
"""Breaches of one invariant that are kept: what follows from the first is noise."""


@dataclass(frozen=True, slots=True)
class Breach:
    """What was broken, when, by whom, at which step (0: none), and the records that show it."""

    invariant: str
    t: float
    text: str
    processes: tuple[str, ...] = ()
    step: int = 0
    records: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f" [{', '.join(self.processes)}]" if self.processes else ""
        step = f" step {self.step}" if self.step else ""
        lines = [f"{self.t:.3f} {self.invariant}:{who}{step} {self.text}", *(f"    {line}" for line in self.records)]
        return "\n".join(lines)


def name_of(who: str, boot: int) -> str:
    """How a process is named in a breach."""
    return f"{who}#{boot}"


def show(event: Event) -> str:
    """An event on one line, without its bytes."""
    match event:
        case Process(t, who, boot, what, detail):
            return f"{t:.3f} {name_of(who, boot)} {what}" + (f": {detail}" if detail else "")
        case Fault(t, kind, where, seconds):
            return f"{t:.3f} fault {kind} at {where}" + (f" for {seconds:.3g} s" if seconds else "")
        case Wrote(t, by, boot, how, key, sha256, size):
            return f"{t:.3f} {name_of(by, boot)} {how} {key} ({size} bytes, {sha256[:12]})"
        case Delivered(t, src, src_boot, dst, dst_boot, kind, fields):
            told = ", ".join(f"{key}={_short(value)}" for key, value in fields.items())
            return f"{t:.3f} {name_of(src, src_boot)} -> {name_of(dst, dst_boot)} {kind}({told})"
        case Computed(t, pnode, boot, session, epoch, step, weights):
            of = ", ".join(f"{vnode}={digest[:8]}" for vnode, digest in weights.items())
            return f"{t:.3f} {name_of(pnode, boot)} applied step {step} of {session} epoch {epoch}: {of}"
        case Told(t, session, what, state, step, text):
            return f"{t:.3f} client was told of {session}: {what} {state} step {step} {text}".rstrip()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Check:
    """One invariant's judge. `wrote` is called before the model has taken the write in; all others afterwards."""

    def __init__(self) -> None:
        self.breaches: list[Breach] = []
        self._counts: dict[str, int] = {}

    def breach(
        self,
        invariant: str,
        t: float,
        text: str,
        *,
        who: Iterable[str] = (),
        step: int = 0,
        events: Iterable[Event] = (),
    ) -> None:
        """Note a breach."""
        self._counts[invariant] = self._counts.get(invariant, 0) + 1
        if self._counts[invariant] <= MOST:
            records = tuple(show(event) for event in events)
            self.breaches.append(Breach(invariant, t, text, tuple(dict.fromkeys(who)), step, records))

    def process(self, event: Process, model: Model) -> None:
        """A process began or ended."""

    def wrote(self, event: Wrote, thing: Thing, model: Model) -> None:
        """A write is about to become visible; `thing`: what it is, as far as it's a control object."""

    def delivered(self, event: Delivered, model: Model) -> None:
        """A message was handed over."""

    def computed(self, event: Computed, model: Model) -> None:
        """An update was applied."""

    def told(self, event: Told, model: Model) -> None:
        """The client heard something."""

    def end(self, history: History, model: Model) -> None:
        """The history is over."""
