"""What has come for a session before it is wanted: hops, answers and tied parameters, each in its slot. Pure.

A slot takes one message once. What came before, lies beyond the sender's window, is not awaited, or comes from the
wrong member is refused, with a code for counting and a text for the log; so memory is bounded by windows.
"""

from __future__ import annotations

from networks.stages import Channel
from pnode.events import HopArrived, TieGradientArrived, TieVersionArrived
from pnode.share import Share

Refusal = tuple[str, str]
"""Code and text."""

Key = tuple[int, int, int]
"""Channel, step, microbatch."""


class Inbox:
    """See the module."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._channels: dict[int, Channel] = {channel.index: channel for channel in share.plan.channels}
        self._lenders = {str(owner): share.borrowed[user] for user, owner in share.owner_of.items()}
        self._hops: dict[Key, object] = {}
        self._answers: dict[Key, object] = {}
        self._sent: set[Key] = set()  # forward hops sent and not answered
        self._answered: dict[int, int] = {}  # channel -> hops answered in all, as the reader
        self._owed: dict[Key, tuple[str, int]] = {}  # hop to answer -> (sender, request id)
        self._tie_gradients: dict[tuple[str, int], object] = {}
        self._tie_versions: dict[tuple[str, int], object] = {}

    def __len__(self) -> int:
        kept = (self._hops, self._answers, self._sent, self._owed, self._tie_gradients, self._tie_versions)
        return sum(len(each) for each in kept)

    def clear(self) -> None:
        """Drop everything: the run has failed."""
        for each in (self._hops, self._answers, self._sent, self._owed, self._tie_gradients, self._tie_versions):
            each.clear()

    def request_id(self, channel: int, step: int, microbatch: int) -> int:
        """The number of a forward hop; its answer carries the same."""
        return (step * self._share.microbatches + microbatch) * max(1, len(self._channels)) + channel + 1

    # ------------------------------------------------------------------------------------ hops

    def put_hop(self, event: HopArrived) -> Refusal | None:
        """Keep a forward hop, or the answer to one that was sent; otherwise why not."""
        key = (event.channel, event.step, event.microbatch)
        share = self._share
        channel = self._channels.get(event.channel)
        if channel is None:
            return "stray-hop", f"there is no channel {event.channel}"
        ours, theirs = (channel.src, channel.dst) if event.backward else (channel.dst, channel.src)
        if ours not in share.schedules or share.plan.stages[theirs].pnode != event.sender:
            return "stray-hop", f"channel {event.channel} does not bring {event.sender}'s hops here"
        if not 0 <= event.microbatch < share.microbatches or not 0 <= event.step < share.steps:
            return "bad-hop", f"no step {event.step}, microbatch {event.microbatch} in this run"
        if event.backward:
            if key not in self._sent or event.request_id != self.request_id(*key):
                return "duplicate-hop", f"an answer to {key} is not awaited"
            self._sent.discard(key)
            self._answers[key] = event.payload
            return None
        place = (event.step - share.start_step) * share.microbatches + event.microbatch
        answered = self._answered.get(event.channel, 0)
        if place < answered or key in self._hops or key in self._owed:
            return "duplicate-hop", f"hop {key} came before"
        if place >= answered + share.windows[channel.src]:
            return "beyond-window", f"hop {key} is beyond the window of stage {channel.src}"
        self._hops[key] = event.payload
        self._owed[key] = (event.sender, event.request_id)
        return None

    def has_hop(self, channel: int, step: int, microbatch: int) -> bool:
        """Whether a forward hop waits in its slot."""
        return (channel, step, microbatch) in self._hops

    def take_hop(self, channel: int, step: int, microbatch: int) -> object:
        """Take a forward hop out of its slot; it stays owed until it is answered."""
        return self._hops.pop((channel, step, microbatch))

    def answer(self, channel: int, step: int, microbatch: int) -> tuple[str, int]:
        """A hop is being answered: to whom, and under which request id."""
        self._answered[channel] = self._answered.get(channel, 0) + 1
        return self._owed.pop((channel, step, microbatch))

    def sent(self, channel: int, step: int, microbatch: int) -> int:
        """A forward hop is being sent: its request id; from now on an answer is awaited."""
        self._sent.add((channel, step, microbatch))
        return self.request_id(channel, step, microbatch)

    def has_answer(self, channel: int, step: int, microbatch: int) -> bool:
        """Whether the answer to a sent hop is here."""
        return (channel, step, microbatch) in self._answers

    def take_answer(self, channel: int, step: int, microbatch: int) -> object:
        """Take an answer out of its slot."""
        return self._answers.pop((channel, step, microbatch))

    def begin(self, step: int) -> None:
        """A step begins: answers of earlier ones (the empty ones of forward-only stages) are done with."""
        self._answers = {key: payload for key, payload in self._answers.items() if key[1] >= step}

    # ------------------------------------------------------------------------------------ ties

    def put_tie_gradient(self, event: TieGradientArrived, step: int, reported: bool) -> Refusal | None:
        """Keep a lent parameter's gradient, of this step (unless it was `reported`) or the next one."""
        known = any((event.user, event.sender) in users for users in self._share.lent.values())
        key = (event.user, event.step)
        due = event.step == step + 1 or (event.step == step and not reported)
        if not known or not due or key in self._tie_gradients:
            return "stray-tie", f"gradient of {event.user} for step {event.step} from {event.sender} is not awaited"
        self._tie_gradients[key] = event.payload
        return None

    def missing_tie_gradients(self, step: int) -> list[tuple[str, str]]:
        """(user, PNode) of lent parameters whose gradients are not here."""
        lent = (pair for users in self._share.lent.values() for pair in users)
        return [(user, pnode) for user, pnode in lent if (user, step) not in self._tie_gradients]

    def take_tie_gradients(self, step: int) -> dict[int | str, object]:
        """All gradients of lent parameters of a step, in network order."""
        lent = [user for users in self._share.lent.values() for user, _ in users]
        return {user: self._tie_gradients.pop((user, step)) for user in lent}

    def put_tie_version(self, event: TieVersionArrived, step: int, due: set[str]) -> Refusal | None:
        """Keep a borrowed parameter after U of this step, or of the last one if it is still `due`."""
        key = (event.owner, event.step)
        wanted = event.step == step or (event.step == step - 1 and event.owner in due)
        if self._lenders.get(event.owner) != event.sender or key in self._tie_versions or not wanted:
            return "stray-tie", f"version of {event.owner} after step {event.step} is not awaited"
        self._tie_versions[key] = event.payload
        return None

    def has_tie_version(self, owner: str, step: int) -> bool:
        """Whether the owner's parameter after U(step) is here."""
        return (owner, step) in self._tie_versions

    def take_tie_version(self, owner: str, step: int) -> object:
        """Take it out of its slot."""
        return self._tie_versions.pop((owner, step))

    def lender(self, owner: str) -> str:
        """The PNode of the owner of a borrowed parameter."""
        return self._lenders[owner]
