"""How a session comes onto PNodes and off them again; a part of its core, see `sessions`.

Place, make the new epoch durable, Prepare on all, StartRun on all. PNodes that hold something of the session are
`_holders`: those that stay are never released on the way to a new epoch, since Prepare takes over their memory; those
that don't are released once the new epoch is durable.

Where nothing is placed anew, that the session is to run is durable before any PNode hears of it: an orchestrator that
comes after a crash must not find at rest what trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from orchestrator import events
from orchestrator.events import Command, Log, Record, Send, Tell
from orchestrator.life import Life, codecs_text, vnodes_text
from orchestrator.lifecycle import AWAY_S, PLACE_S, PREPARE_S, START_S, Deployment, Limits, Stage, State
from orchestrator.records import SessionRecord
from wire import messages


class Deploying(Life, ABC):
    """A session's deployment."""

    def __init__(
        self, record: SessionRecord, *, term: int, new_id: Callable[[], str], limits: Limits | None = None
    ) -> None:
        super().__init__(record, term=term, new_id=new_id, limits=limits)
        self._run = False
        """The deployment under way is to be started when it's prepared."""
        self._holders: dict[str, int] = {}
        self._recorded_epoch = record.epoch
        """The highest that is durable: nobody hears of a later one."""
        self._run_recorded = True
        """That it is to run is durable."""
        self._seen_epoch = 0
        """The highest epoch that any PNode or the store spoke of."""
        self._moving: dict[str, str] = {}
        """The placement that a run under way holds for."""
        self._moved: dict[str, int] = {}
        self._odd: dict[str, int] = {}
        self._committing: set[int] = set()

    # ------------------------------------------------------------ what the rest of the core does

    @abstractmethod
    def _started(self, now: float, out: list[Command]) -> None:
        """All PNodes run."""

    @abstractmethod
    def _begun(self, now: float, out: list[Command]) -> None:
        """A placement was made because something was lost."""

    # ------------------------------------------------------------ two phases

    def _place(
        self, now: float, out: list[Command], *, target: Mapping[str, str] | None = None, yielding: bool = False
    ) -> None:
        """Ask for a placement: `target`, or what was asked for; `yielding`: or less, and survivors keep theirs."""
        self._stage(Stage.PLACING)
        self.waits.only("commit", "room")
        self._retry_at = float("inf")
        self.waits.begin("place", "orchestrator", "placement", PLACE_S, now)
        here = self.deployment if yielding else None
        out.append(
            events.Place(
                0 if target else self.record.pnodes,
                dict(target or self.record.wanted),
                dict(here.placement) if here is not None else {},
                dict(here.incarnations) if here is not None else {},
                yielding,
            )
        )

    def _placed(self, event: events.Placed, now: float, out: list[Command]) -> None:
        if self.stage is not Stage.PLACING:
            return
        record = self.record
        self.waits.end("place", "room")
        for problem in event.problems:
            self._warn(problem, out)
        record.step = event.start_step
        if event.start_step != record.committed:
            record.committed, record.final_hash = event.start_step, event.hash
        if self._run and event.start_step >= self._goal:
            self._rest(out, "a former orchestrator committed it")
            return
        record.epoch = max(record.epoch, self._seen_epoch) + 1
        record.placement = dict(event.placement)
        record.incarnations = {pnode: event.incarnations[pnode] for pnode in dict.fromkeys(event.placement.values())}
        record.loss_pnode, record.start_step = event.loss_pnode, event.start_step
        self._take_codecs(event, out)
        self.deployment = Deployment(
            record.epoch, dict(record.placement), dict(record.incarnations), event.loss_pnode, event.start_step
        )
        self.pace.begin(event.start_step)
        self._moved.clear()
        self._odd.clear()
        self._committing.clear()
        if self.state is State.RECOVERING:
            self._begun(now, out)
        counts = {pnode: list(event.placement.values()).count(pnode) for pnode in self.pnodes}
        where = ", ".join(f"{pnode} ({vnodes_text(count)})" for pnode, count in counts.items())
        text = f"epoch {record.epoch} on {where}, from step {event.start_step}"
        text += f"; predicted: {event.step_s * 1e3:.3g} ms a step" if event.step_s and self._run else ""
        out.append(Log("placement", "\n".join((text, *event.reasons)), event.start_step))
        self._stage(Stage.RAISING)
        self.waits.begin("raise", "store", f"epoch {record.epoch}", PLACE_S, now)
        out.append(Record(epoch=record.epoch))

    def _take_codecs(self, event: events.Placed, out: list[Command]) -> None:
        """The edges that are coded; if others were before, the run no longer equals one that was never moved."""
        record, codecs = self.record, list(event.codecs)
        if record.codecs is not None and codecs != record.codecs and event.start_step:
            record.bit_exact = (
                f"not bit-exact: placed anew at step {event.start_step}, codecs were chosen anew: "
                f"{codecs_text(record.codecs) or 'none'} before, {codecs_text(codecs) or 'none'} now"
            )
            self._warn(record.bit_exact, out)
        record.codecs = codecs

    def _prepare(self, now: float, out: list[Command]) -> None:
        """The epoch is durable: tell those that are in it, and release those that no longer are."""
        self.waits.end("raise")
        self._recorded_epoch, self._run_recorded = self.record.epoch, True
        self._stage(Stage.PREPARING)
        assert self.deployment is not None
        members = self.deployment.incarnations
        former = tuple(pnode for pnode in self._holders if pnode not in members)
        if former:
            message = messages.Release(self._new_id(), self.id, self.record.epoch - 1, self._term)
            out.append(Tell(former, message, sure=True))
        self._holders = dict(members)
        for pnode in self.pnodes:
            key = self._key("prepare", pnode)
            self.waits.begin(key, pnode, "prepare its VNodes", PREPARE_S, now)
            out.append(Send(key, pnode, None, AWAY_S))

    def _start(self, now: float, out: list[Command]) -> None:
        """Tell all PNodes to run, once it's durable; one that runs already, or holds at the goal, takes no harm."""
        assert self.deployment is not None
        if not self._run_recorded:
            self.waits.begin("run", "store", "its record, before the run begins", AWAY_S, now)
            return
        until = self._goal
        self.deployment.held = {pnode: step for pnode, step in self.deployment.held.items() if step >= until}
        for pnode in self.pnodes:
            key = self._key("start", pnode)
            message = messages.StartRun(self._new_id(), self.id, self.record.epoch, self._term, until)
            self.waits.begin(key, pnode, f"start of the run until step {until}", START_S, now)
            out.append(Send(key, pnode, message, START_S))

    def _answered(self, key: str, now: float, out: list[Command]) -> None:
        if not self.waits.end(key):
            return
        kind = key.partition(" ")[0]
        if self.waits.of(kind):
            return
        if kind == "prepare" and self.stage is Stage.PREPARING:
            self._stage(Stage.UP)
            if self._run:
                self._start(now, out)
            else:
                out.append(Log("note", f"deployed on {', '.join(self.pnodes)}", self.record.step))
                out.append(Record())
        elif kind == "start" and self.stage is Stage.UP:
            self._started(now, out)

    # ------------------------------------------------------------ coming down

    def _take_down(self, out: list[Command]) -> None:
        """Release what is deployed, and forget all waits for it."""
        self.waits.only("commit")
        if self._holders:
            message = messages.Release(self._new_id(), self.id, self._recorded_epoch, self._term)
            out.append(Tell(tuple(self._holders), message, sure=True))
        self._stage(Stage.DOWN)
        self._holders = {}
        self.deployment = None
        self.record.placement, self.record.incarnations, self.record.loss_pnode = {}, {}, ""
        self.record.hold = False
        self._moving = {}
        self._retry_at = float("inf")

    def _rest(self, out: list[Command], why: str) -> None:
        """Take down a session that is active, to stand at its last committed step."""
        record = self.record
        stopping = self.state is State.STOPPING
        self._take_down(out)
        if 0 < record.steps <= record.committed:
            self._go(State.FINISHED, out, f"all {record.steps} steps are made and stored")
        elif stopping:
            self._go(State.STOPPED, out, f"step {record.committed} is stored; {why}")
        else:
            self._go(State.PAUSED, out, f"step {record.committed} is stored; {why}")
