"""Whether a deployment that an earlier orchestrator made still stands. Pure.

Each of its PNodes has to come back as the process that it was (by its incarnation) and report this epoch as prepared,
running or held. It is decided when every one of them is accounted for, well or ill, or when time is up; and never
before it is known which step is committed. One that is known to be ill does not end the wait for the others: they will
be needed for the placement that follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from wire.messages import SessionBeat

STANDS = frozenset({"prepared", "running", "held"})


class Adoption:
    """What is known of a deployment's PNodes. `incarnations`: as recorded."""

    def __init__(self, epoch: int, incarnations: Mapping[str, int]) -> None:
        self.epoch = epoch
        self.surveyed = False
        """It's known which step is committed."""
        self.problem = ""
        """Why it can't be adopted, whatever the PNodes say."""
        self.late = False
        """Nobody is waited for any longer."""
        self._incarnations = dict(incarnations)
        self._found: dict[str, str] = {}

    @property
    def missing(self) -> list[str]:
        """PNodes of which nothing certain is known yet."""
        return [pnode for pnode in self._incarnations if pnode not in self._found]

    def joined(self, pnode: str, incarnation: int) -> None:
        """A PNode registered."""
        expected = self._incarnations.get(pnode)
        if expected is not None and expected != incarnation:
            self._found[pnode] = f"{pnode} was restarted"

    def beat(self, pnode: str, incarnation: int, beat: SessionBeat | None) -> None:
        """A PNode reported; `beat`: what it says about this session, None if it does not have it."""
        expected = self._incarnations.get(pnode)
        if expected is None:
            return
        if expected != incarnation:
            self._found[pnode] = f"{pnode} was restarted"
        elif beat is None:
            self._found[pnode] = f"{pnode} does not have it any more"
        elif beat.epoch != self.epoch:
            self._found[pnode] = f"{pnode} has epoch {beat.epoch}, not {self.epoch}"
        elif beat.state in STANDS:
            self._found[pnode] = ""
        elif beat.state != "preparing":
            self._found[pnode] = f"its part on {pnode} is {beat.state}"

    def ill(self, pnode: str, text: str) -> None:
        """A PNode was lost, or its run broke."""
        if pnode in self._incarnations:
            self._found[pnode] = text

    def verdict(self) -> str | None:
        """None: not decided yet. "": it stands. Else why it does not."""
        undecided = not self._incarnations or bool(self.missing)
        if not self.surveyed or (undecided and not self.late):
            return None
        ills = [self.problem, *self._found.values()]
        if self.missing:
            ills.append(f"{', '.join(self.missing)} did not come back")
        if not self._incarnations:
            ills.append("it was not deployed")
        return "; ".join(dict.fromkeys(text for text in ills if text))
