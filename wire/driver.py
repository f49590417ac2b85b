"""What both buses share: an endpoint, its commands carried out, timers, and requests.

A bus adds how packets travel (`_carry`), what time it is and how to be called at a time. Handlers run after the
endpoint is done with the event that caused them, so they may send at will.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wire.admission import Admission
from wire.bus import BreakHandler, Buffer, Handler, LossHandler
from wire.codec import Payload
from wire.commands import Command, Deliver, Lost, Release, Route, Transmit
from wire.endpoint import Endpoint, Source
from wire.errors import MisuseError, UnreachableError
from wire.ids import Boot, checked_id, new_boot
from wire.limits import LIMITS, Limits
from wire.link import QueueFull
from wire.messages import Message, Ok, PeerRef, Refused
from wire.requests import AnswerMemory, RefusedError, Standing, is_exchange, request_id_of
from wire.roles import may_send

TICK_S = 0.005
"""Timers closer together than this fire together."""
MEET_S = 0.02
"""How often it's looked whether a link stands that somebody waits for."""


class Handle(Protocol):
    """Something scheduled."""

    def cancel(self) -> None:
        """Don't do it."""


@dataclass(slots=True, eq=False)
class _Question:
    to: PeerRef
    request: Message
    lane: int | None = None
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    answer: tuple[Message, Sequence[memoryview]] | None = None
    error: UnreachableError | None = None
    lost: bool = False  # the peer that had it is gone; another may answer


class _Outgoing(list[Command]):
    """Carries packets out at once, so that the first is on its way while the next is made; the rest waits its turn."""

    def __init__(self, carry: Callable[[Transmit], None], upcalls: deque[Deliver | Lost]) -> None:
        super().__init__()
        self._carry = carry
        self._upcalls = upcalls

    def append(self, command: Command) -> None:
        if type(command) is Transmit:
            self._carry(command)
        elif type(command) is Release:
            super().append(command)
        else:
            self._upcalls.append(command)  # type: ignore[arg-type]


class Driver(ABC):
    """Base of the buses; implements `wire.bus.Bus`."""

    def __init__(self, peer_id: str, *, boot: Boot | None = None, limits: Limits = LIMITS) -> None:
        self._id = checked_id(peer_id, "peer id")
        self._boot = boot if boot is not None else new_boot()
        self._limits = limits
        self._endpoint: Endpoint | None = None
        self._handler: Handler | None = None
        self._loss_handler: LossHandler | None = None
        self._break_handler: BreakHandler | None = None
        self._admission: Admission | None = None  # of a bus with keys: who may send what
        self._questions: dict[str, _Question] = {}
        self._memory = AnswerMemory(limits)
        self._upcalls: deque[Deliver | Lost] = deque()
        self._out = _Outgoing(self._carry, self._upcalls)
        self._in_upcall = False
        self._timer: Handle | None = None
        self._timer_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._idle: asyncio.Event | None = None  # set when everything sent is acknowledged, if somebody waits for it

    # ------------------------------------------------------------ what a bus adds

    @abstractmethod
    def _carry(self, packet: Transmit) -> None:
        """Put a packet on its way, or lose it."""

    @abstractmethod
    def _release(self, route: Route) -> None:
        """Nobody is reached by this route any longer."""

    def _now(self) -> float:
        """The time, in seconds of a clock that never goes back."""
        return time.monotonic()

    def _call_later(self, delay_s: float, what: Callable[[], None]) -> Handle:
        return self._running_loop.call_later(delay_s, what)

    def _call_soon(self, what: Callable[[], None]) -> None:
        self._running_loop.call_soon(what)

    def _wall(self) -> float:
        """The clock that admissions end by."""
        return time.time()

    def _trouble(self, to: PeerRef) -> str:
        """What is known of why this peer can't be reached; "" if nothing."""
        return ""

    def _told(self, subject: str, text: str) -> None:  # noqa: B027, a bus without keys refuses nobody
        """Something was refused, for the log."""

    def _failed(self, error: Exception) -> None:
        """A handler raised; the bus goes on."""
        self._running_loop.call_exception_handler({"message": "a handler of the bus failed", "exception": error})

    # ------------------------------------------------------------ Bus

    @property
    def me(self) -> PeerRef:
        """This process, as others see it."""
        return self._links.me

    @property
    def _links(self) -> Endpoint:
        if self._endpoint is None:
            raise MisuseError("the bus has not been started", hint="await bus.start()")
        return self._endpoint

    def on_message(self, handler: Handler) -> None:
        """Set the one handler of incoming messages."""
        self._handler = handler

    def on_loss(self, handler: LossHandler) -> None:
        """Set the one handler of lost peers."""
        self._loss_handler = handler

    def on_break(self, handler: BreakHandler) -> None:
        """Set the one handler of connections that closed."""
        self._break_handler = handler

    def send(self, to: PeerRef, message: Message, frames: Sequence[Buffer] = (), *, lane: int | None = None) -> None:
        """Queue a message, fire and forget; see `wire.bus.Bus.send`."""
        self._usable()
        if is_exchange(message):
            size = sum(map(len, frames))
            self._memory.finish(to, message, frames, size)
        self._links.send(to, message, frames, lane, self._now(), self._out)
        self._settle(later=True)

    async def ask(
        self, to: PeerRef, message: Message, frames: Sequence[Buffer] = (), *, timeout_s: float, lane: int | None = None
    ) -> tuple[Message, Sequence[memoryview]]:
        """Send a request and wait for its answer; see `wire.bus.Bus.ask`."""
        request_id = request_id_of(message)
        if not request_id:
            raise MisuseError(f"{type(message).__name__} has no request id, so it can't be asked")
        if request_id in self._questions:
            raise MisuseError(f"request {request_id} is being asked already")
        question = _Question(to, message, lane)
        self._questions[request_id] = question
        try:
            async with asyncio.timeout(timeout_s):
                answer, its_frames = await self._persist(question, frames)
        except TimeoutError:
            trouble = self._trouble(to)
            raise UnreachableError(
                f"{_named(to)} did not answer {type(message).__name__} within {timeout_s:g} s"
                + (f": {trouble}" if trouble else ""),
                hint="is it running, and reachable from here?",
            ) from None
        finally:
            del self._questions[request_id]
        if isinstance(answer, Refused):
            raise RefusedError(answer.code, answer.text, answer.hint, peer=to.id)
        return answer, its_frames

    async def _persist(self, question: _Question, frames: Sequence[Buffer]) -> tuple[Message, Sequence[memoryview]]:
        """Send, and send again: soon when the peer was lost, else ever more rarely, and never what still waits."""
        pause_s = self._limits.ask_again_s
        while True:
            question.lost = False
            with contextlib.suppress(QueueFull):
                self.send(question.to, question.request, frames, lane=question.lane)
            while not question.lost:
                question.stirred.clear()
                if question.answer is not None:
                    return question.answer
                if question.error is not None:
                    raise question.error
                try:
                    async with asyncio.timeout(pause_s):
                        await question.stirred.wait()
                except TimeoutError:
                    pause_s = min(2 * pause_s, 30.0)
                    if not self.queued_bytes(question.to):
                        break
            if question.lost:
                await asyncio.sleep(self._limits.hello_s)

    async def meet(self, to: PeerRef, *, timeout_s: float) -> None:
        """Make the link to a peer stand; see `wire.bus.Bus.meet`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._usable()
                    stands = self._links.greet(to, self._now(), self._out)
                    self._settle(later=True)
                    if stands:
                        return
                    await asyncio.sleep(MEET_S)
        except TimeoutError:
            trouble = self._trouble(to)
            text = f"{_named(to)} did not answer within {timeout_s:g} s" + (f": {trouble}" if trouble else "")
            raise UnreachableError(text, hint="is it running, and reachable from here?") from None

    def queued_bytes(self, to: PeerRef) -> int:
        """Bytes sent to this peer that it has not acknowledged."""
        return self._links.queued_bytes(to)

    def heard(self) -> list[PeerRef]:
        """The processes from which anything arrived since the last call."""
        return self._links.heard(self._now())

    def forget(self, to: PeerRef) -> None:
        """Drop the link to this peer and what is queued for it."""
        self._links.forget(to, self._out)
        self._settle(later=True)

    def counters(self) -> dict[str, Any]:
        """Counts of messages, resends and refusals, and what is queued per peer, as a plain dict."""
        return self._links.snapshot()

    # ------------------------------------------------------------ events

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _abandon(self) -> None:
        """Nobody will answer any more."""
        for question in self._questions.values():
            question.error = UnreachableError(f"{_named(question.to)} was not waited for: this bus was closed")
            question.stirred.set()

    def _usable(self) -> None:
        if self._closed:
            raise MisuseError("the bus is closed")

    def _arrived(self, source: Source, header: Payload, frames: Sequence[memoryview]) -> None:
        """A packet has come. The caller calls `_batch_done` after the last of a batch."""
        self._links.on_frames(source, header, frames, self._now(), self._out)
        if self._out or self._upcalls:
            self._perform()

    def _broke(self, name: str, boot: int) -> None:
        """A connection that this process had dialled closed, and all that came over it was taken."""
        peer = self._links.broke(name, boot)
        if peer is not None and self._break_handler is not None and not self._closed:
            try:
                self._break_handler(peer)
            except Exception as error:
                self._failed(error)

    def _batch_done(self) -> None:
        self._links.flush(self._now(), self._out)
        self._settle()
        if self._idle is not None and self._links.idle():
            self._idle.set()

    def _tick(self) -> None:
        self._timer = None
        if self._closed or self._endpoint is None:
            return
        self._links.on_tick(self._now(), self._out)
        self._settle()

    def _settle(self, *, later: bool = False) -> None:
        if self._out or self._upcalls:
            self._perform(later=later)
        soonest = self._links.soonest
        if soonest is None or self._closed:
            return
        if self._timer is not None:
            if self._timer_at <= soonest + TICK_S:
                return
            self._timer.cancel()
        self._timer_at = soonest
        delay_s = max(soonest - self._now(), TICK_S)
        self._timer = self._call_later(delay_s, self._tick)

    def _perform(self, *, later: bool = False) -> None:
        """Carry out what the endpoint asks for. `later`: handlers run after the caller has gone on."""
        if self._out:
            released = self._out.copy()
            self._out.clear()
            for command in released:
                if type(command) is Release and not self._links.reaches(command.route):
                    self._release(command.route)
        if self._in_upcall or not self._upcalls:
            return
        if later:
            self._call_soon(self._run_upcalls)
        else:
            self._run_upcalls()

    def _run_upcalls(self) -> None:
        """Handlers one after another, never one inside another."""
        if self._in_upcall:
            return
        self._in_upcall = True
        try:
            while self._upcalls:
                upcall = self._upcalls.popleft()
                try:
                    if type(upcall) is Deliver:
                        self._deliver(upcall)
                    elif type(upcall) is Lost:
                        self._lost(upcall)
                except Exception as error:
                    self._failed(error)
        finally:
            self._in_upcall = False

    def _deliver(self, command: Deliver) -> None:
        message, sender = command.message, command.sender
        if self._admission is not None and not self._may(sender, message):
            return
        if is_exchange(message):
            question = self._questions.get(request_id_of(message))
            if question is not None and _answers(question, sender, message):
                question.answer = (message, command.frames)
                question.stirred.set()
                return
            if not isinstance(message, Ok | Refused):
                match self._memory.begin(sender, message):
                    case Standing.RUNNING:
                        return
                    case Standing.ANSWERED:
                        answer, frames = self._memory.answer(sender, message)
                        self.send(sender, answer, frames)
                        return
        if self._handler is not None:
            self._handler(sender, message, command.frames)

    def _may(self, sender: PeerRef, message: Message) -> bool:
        """Whether the sender's role allows such a message; if not, it is told so."""
        if sender == self.me:
            return True
        assert self._admission is not None
        entry = self._admission.find(sender.key, self._wall())
        if entry is not None and entry.id == sender.id and may_send(entry.role, message):
            return True
        role = entry.role if entry is not None else "nobody"
        kind = type(message).__name__
        self._told(f"{sender.key} {kind}", f"refused {kind} of {sender.id}: its role is {role}")
        request_id = request_id_of(message)
        if entry is not None and request_id and not isinstance(message, Ok | Refused):
            text = f"{sender.id} may not send {kind}: its role is {role}"
            self._links.send(sender, Refused(request_id, "role", text), (), None, self._now(), self._out)
        return False

    def _lost(self, command: Lost) -> None:
        peer = command.peer
        for question in list(self._questions.values()):
            to = question.to
            mine = to.id in ("", peer.id) if not to.boot else (to.id, to.boot) == (peer.id, peer.boot)
            if not mine or (not to.boot and not set(to.addresses) & set(peer.addresses)):
                continue
            if to.boot or not peer.boot:
                text = f"{_named(to)} can't answer {type(question.request).__name__}: {command.reason}"
                question.error = UnreachableError(text)
            else:
                question.lost = True
            question.stirred.set()
        if self._loss_handler is not None and not self._closed:
            self._loss_handler(peer, command.reason)


def _answers(question: _Question, sender: PeerRef, message: Message) -> bool:
    """Whether this is an answer: from the one asked, and not the request itself (a process may ask itself)."""
    return type(message) is not type(question.request) and question.to.id in ("", sender.id)


def _named(to: PeerRef) -> str:
    where = f" at {to.addresses[0]}" if to.addresses else ""
    return f"{to.id or 'whoever answers'}{where}"
