"""Requests and their answers: asked again under one id, carried out once.

`Questions` belongs to the side that asks, `AnswerMemory` to the side that answers. Links make a message arrive once
while both boots live; a request must also survive that its answer's link, or the process asked, was lost in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from wire.codec import Payload
from wire.errors import RemoteError
from wire.limits import LIMITS, Limits
from wire.messages import CONTROL, Message, PeerRef


class RefusedError(RemoteError):
    """A peer refused a request. `code` is stable, for programs; the message and hint are for people."""

    def __init__(self, code: str, text: str, hint: str = "", peer: str = "") -> None:
        super().__init__(text, hint=hint)
        self.code = code
        self.peer = peer


def request_id_of(message: Message) -> str:
    """The id of a request or its answer; "" for a message that has none. A hop's number is not a request id."""
    found = getattr(message, "request_id", "")
    return found if isinstance(found, str) else ""


def is_exchange(message: Message) -> bool:
    """Whether the message is one half of a request and its one answer, so that a repetition is the same request.

    Forward requests send several messages under one id (they have a `sequence`) and are told apart by their readers.
    """
    return message.lane == CONTROL and bool(request_id_of(message)) and not hasattr(message, "sequence")


class Standing(Enum):
    """What a request that arrives is to the memory."""

    NEW = 0
    RUNNING = 1
    ANSWERED = 2


@dataclass(slots=True)
class _Remembered:
    answer: Message | None = None
    frames: Sequence[Payload] = ()
    size: int = 0


class AnswerMemory:
    """Answers given, by (peer id, request id): a repeated request gets its first answer and is not carried out again.

    Bounded in number and bytes, oldest first; a request that is still running is kept longer than answered ones.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._known: OrderedDict[tuple[str, str, str], _Remembered] = OrderedDict()
        self._running: dict[tuple[str, str], tuple[str, str, str]] = {}
        self._bytes = 0

    def begin(self, sender: PeerRef, request: Message) -> Standing:
        """A request has come: carry it out only if it is NEW; if it is ANSWERED, send `answer` again."""
        request_id = request_id_of(request)
        key = (sender.id, request_id, type(request).__name__)
        remembered = self._known.get(key)
        if remembered is None:
            self._known[key] = _Remembered()
            self._running[key[:2]] = key
            self._trim()
            return Standing.NEW
        return Standing.RUNNING if remembered.answer is None else Standing.ANSWERED

    def answer(self, sender: PeerRef, request: Message) -> tuple[Message, Sequence[Payload]]:
        """The first answer to a request that is ANSWERED."""
        remembered = self._known[(sender.id, request_id_of(request), type(request).__name__)]
        assert remembered.answer is not None
        return remembered.answer, remembered.frames

    def finish(self, to: PeerRef, answer: Message, frames: Sequence[Payload], size: int) -> None:
        """An answer is being sent. Does nothing if no such request is running."""
        key = self._running.pop((to.id, request_id_of(answer)), None)
        remembered = self._known.get(key) if key is not None else None
        if key is None or remembered is None:
            return
        remembered.answer, remembered.frames, remembered.size = answer, frames, size
        self._bytes += size
        self._known.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        limits = self._limits
        while len(self._known) > limits.answers or (self._bytes > limits.answers_bytes and len(self._known) > 1):
            key, remembered = self._known.popitem(last=False)
            self._bytes -= remembered.size
            if remembered.answer is None:
                self._running.pop(key[:2], None)
