"""Where this PNode stands with its orchestrator: incarnation, term, and whom it believes. Pure: time is passed in.

Rules:

- A term below the known one is over: who speaks in it is told so or ignored. Its process is remembered, because some
  messages carry no term.
- A higher term, a report that is answered with "unknown", or silence: register again.
- Terms of another cluster say nothing about this one's. A PNode that is admitted to another cluster begins anew.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from storage.terms import TermRecord
from wire.messages import HeartbeatAck, Registered

SILENT_BEATS, SILENT_S = 5, 10.0
SPEAKERS = 64
REPORT_EVERY_S = 2.0


class Admission(Enum):
    """What an answer to `Register` means."""

    TAKEN = "taken"
    OVER = "over"  # of a term that is over: not taken
    MOVED = "moved"  # taken, and of another cluster than before: nothing from before counts


class Standing:
    """See the module."""

    def __init__(self, now: float = 0.0) -> None:
        self.incarnation = 0
        self.term = 0
        self.cluster = ""
        self.lease_s = 0.0
        self.report_every_s = REPORT_EVERY_S
        self.acked_at = now
        self._speakers: OrderedDict[int, int] = OrderedDict()  # boot -> the highest term it spoke in

    @property
    def silent_s(self) -> float:
        """Silence for so long, and the orchestrator is looked for."""
        return max(SILENT_S, SILENT_BEATS * self.report_every_s)

    def registered(self, answer: Registered, now: float) -> Admission:
        """The orchestrator answered `Register`."""
        moved = bool(self.cluster) and answer.cluster != self.cluster
        if not moved and answer.term < self.term:
            return Admission.OVER
        self.incarnation, self.term, self.cluster = answer.incarnation, answer.term, answer.cluster
        self.lease_s, self.report_every_s = answer.lease_s, answer.report_every_s
        self.acked_at = now
        if moved:
            self._speakers.clear()
        return Admission.MOVED if moved else Admission.TAKEN

    def recall(self, cluster: str, term: int) -> None:
        """An earlier process of this PNode was a member of that cluster, in that term."""
        self.cluster, self.term = cluster, term

    def acknowledged(self, ack: HeartbeatAck, boot: int, now: float) -> bool:
        """A report was answered. True: register again."""
        if not self.speaks(boot, ack.term):
            return False
        if ack.term > self.term:
            return True
        self.acked_at = now
        return not ack.known and ack.incarnation == self.incarnation

    def speaks(self, boot: int, term: int) -> bool:
        """A process says that it is the orchestrator of this term. False if that term is over."""
        self._speakers[boot] = max(term, self._speakers.pop(boot, 0))
        while len(self._speakers) > SPEAKERS:
            self._speakers.popitem(last=False)
        return term >= self.term

    def obeys(self, boot: int, term: int) -> bool:
        """As `speaks`, for a command: a higher term counts from now on."""
        if not self.speaks(boot, term):
            return False
        self.term = term
        return True

    def outdated(self, boot: int) -> bool:
        """Whether that process spoke only in terms that are over, for messages that name none."""
        return self._speakers.get(boot, self.term) < self.term

    def silent(self, now: float) -> float:
        """Seconds since the last sign of the orchestrator, or 0.0 if that is not too long."""
        quiet = now - self.acked_at
        return quiet if quiet > self.silent_s else 0.0

    def follows(self, record: TermRecord) -> bool:
        """Whether the store's record names an orchestrator that comes after the one that is known."""
        known = not self.cluster or record.cluster == self.cluster
        return known and record.term > self.term and bool(record.addresses)
