"""Whose turn it is: where each stage of this PNode is in the step's schedule, and what its next action waits for. Pure.

Stages follow their schedules one action after another; an action may be queued as soon as all its inputs are here, or
queued before it on this PNode.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from networks.stages import Channel
from pnode.events import Job, JobKind
from pnode.inbox import Inbox
from pnode.schedule import Kind
from pnode.share import Share

Wait = tuple[Channel, str, int]
"""A channel, what is missing on it (activation, gradient, answer), and the microbatch."""


@dataclass(slots=True)
class _Stage:
    """Where one stage is in the current step's schedule."""

    at: int = 0
    forwards: set[int] = field(default_factory=set)  # microbatches queued
    backwards: set[int] = field(default_factory=set)


class Turns:
    """See the module."""

    def __init__(self, share: Share, inbox: Inbox) -> None:
        self._share = share
        self._inbox = inbox
        self.ins = {stage: share.plan.ins(stage) for stage in share.stages}
        self.outs = {stage: share.plan.outs(stage) for stage in share.stages}
        self._stages = {stage: _Stage() for stage in share.stages}

    def begin(self) -> None:
        """Every schedule begins anew."""
        for state in self._stages.values():
            state.at = 0
            state.forwards.clear()
            state.backwards.clear()

    def at_update(self, stage: int) -> bool:
        """Whether only U is left to this stage."""
        return self._share.schedules[stage][self._stages[stage].at].kind is Kind.UPDATE

    def take(self, stage: int, step: int) -> tuple[Job, dict[int | str, object]]:
        """The stage's next action, whose inputs are here: the job and what arrived for it."""
        state = self._stages[stage]
        action = self._share.schedules[stage][state.at]
        m = action.microbatch
        inputs: dict[int | str, object] = {}
        if action.kind is Kind.FORWARD:
            state.forwards.add(m)
            for channel in self.ins[stage]:
                if not channel.local:
                    inputs[channel.index] = self._inbox.take_hop(channel.index, step, m)
            kind = JobKind.FORWARD
        else:
            state.backwards.add(m)
            for channel in self.outs[stage]:
                if not channel.local:
                    payload = self._inbox.take_answer(channel.index, step, m)
                    if channel.index in self._share.flow.channels:
                        inputs[channel.index] = payload
            kind = JobKind.BACKWARD
        state.at += 1
        return Job(kind, step, stage, m), inputs

    def missing(self, stage: int, step: int) -> list[Wait]:
        """What the stage's next action waits for; empty if it can be queued (or only U is left to wait for)."""
        share = self._share
        action = share.schedules[stage][self._stages[stage].at]
        m = action.microbatch
        if action.kind is Kind.FORWARD:
            found = [
                (channel, "activation", m)
                for channel in self.ins[stage]
                if (
                    m not in self._stages[channel.src].forwards
                    if channel.local
                    else not self._inbox.has_hop(channel.index, step, m)
                )
            ]
            if stage not in share.flow.stages and m >= share.windows[stage]:
                found.extend(self._unanswered(stage, step, m - share.windows[stage]))
            return found
        if action.kind is Kind.BACKWARD:
            return self._unanswered(stage, step, m)
        if stage in share.flow.stages:
            return []
        late = range(max(0, share.microbatches - share.windows[stage]), share.microbatches)
        return [wait for m in late for wait in self._unanswered(stage, step, m)]

    def _unanswered(self, stage: int, step: int, m: int) -> list[Wait]:
        """Channels out of this stage on which microbatch `m` is not answered yet."""
        found: list[Wait] = []
        for channel in self.outs[stage]:
            back = channel.index in self._share.flow.channels
            if channel.local:
                reader = self._stages[channel.dst]
                here = m in (reader.backwards if back else reader.forwards)
            else:
                here = self._inbox.has_answer(channel.index, step, m)
            if not here:
                found.append((channel, "gradient" if back else "answer", m))
        return found

    def describe(self, wait: Wait, step: int) -> str:
        """The wait as a sentence."""
        channel, what, m = wait
        stage = channel.src if what == "activation" else channel.dst
        who = f"stage {stage} here" if channel.local else self._share.plan.stages[stage].pnode
        return f"{who}: {what} of '{channel.port}' for step {step + 1}, microbatch {m}"
