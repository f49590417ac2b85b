"""The simulated network of the world: `wire.sim` with lines between machines, targeted losses, and buses that belong to
a life: what arrives for a frozen process waits, and for a dead one it is lost."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.sim.life import LIFE, Life, Stand, WorldLoop
from tests.sim.record import Recorder
from wire.bus import Frame, Handler
from wire.codec import Payload, read_header
from wire.commands import Deliver, Transmit
from wire.driver import Handle
from wire.endpoint import Source
from wire.ids import Boot
from wire.limits import LIMITS
from wire.messages import Message, Ok, PeerRef, Refused, Registered
from wire.packets import Data, Kind
from wire.requests import request_id_of
from wire.sim import Line, SimBus, SimNetwork

ANSWERS = (Ok, Refused, Registered)


def nobody() -> contextvars.Context:
    """The context of the world itself."""
    context = contextvars.Context()
    context.run(LIFE.set, None)
    return context


class _Clock:
    """Packets travel whatever becomes of their sender."""

    def __init__(self, loop: WorldLoop) -> None:
        self._loop = loop
        self._context = nobody()

    def now(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, what: Callable[[], None]) -> Handle:
        return self._loop.call_at(when, what, context=self._context)


@dataclass(slots=True)
class Loss:
    """Packets that carry this kind of message (its tag) are lost: `count` of them, after the first `skip`.

    `deep`: not on the line, where the link sends them again, but between the link and whoever they are meant for, as if
    the receiver had a bug: nobody knows.
    """

    kind: str
    count: int = 1
    skip: int = 0
    deep: bool = False

    def hits(self, tag: object) -> bool:
        """Whether a message of this kind is one to lose."""
        if tag != self.kind or self.count <= 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.count -= 1
        return True


class WorldNetwork(SimNetwork):
    """See the module. A line is between two machines (`SimBus.place`)."""

    def __init__(self, loop: WorldLoop, seed: int, recorder: Recorder, line: Line) -> None:
        super().__init__(seed, clock=_Clock(loop), line=line)
        self.loop = loop
        self.recorder = recorder
        self.losses: list[Loss] = []

    def carry(self, src: SimBus, packet: Transmit) -> None:
        """A packet sets out, unless it is one that is to be lost."""
        if self.losses and packet.kind is Kind.DATA and self._loses(src, packet):
            self.counters["dropped"] += 1
            return
        super().carry(src, packet)

    def _loses(self, src: SimBus, packet: Transmit) -> bool:
        header = read_header(packet.parts[0])
        if not isinstance(header, Data) or not header.message:
            return False
        return self.loses(header.message[0], f"{src.me.id}>{header.dst}", deep=False)

    def loses(self, tag: object, where: str, *, deep: bool) -> bool:
        """Whether this message is to be lost here."""
        for loss in self.losses:
            if loss.deep == deep and loss.hits(tag):
                self.recorder.fault(f"{'swallow' if deep else 'lose'}_{loss.kind}", where, 0.0)
                self.recorder.say(f"FAULT a message {loss.kind} {where} is lost")
                return True
        return False

    def set_lines(self, lines: Mapping[tuple[str, str], Line]) -> None:
        """How packets travel between two machines; elsewhere as on the world's usual line."""
        self._lines = dict(lines)


class WorldBus(SimBus):
    """The bus of one life."""

    def __init__(self, network: WorldNetwork, life: Life, address: str) -> None:
        super().__init__(network, life.name, Boot(life.boot), address, LIMITS)
        self.place = life.machine
        self.life = life
        self._world = network.loop
        self._recorder = network.recorder

    def receive(self, source: Source, parts: list[Payload]) -> None:
        """A packet has arrived at the machine."""
        stand = self.life.stand
        if stand is Stand.RUNS:
            self.life.context.run(self._take, source, parts)
        elif stand is Stand.FROZEN:
            self._world.call_soon(self._take, source, parts, context=self.life.context)

    def _take(self, source: Source, parts: list[Payload]) -> None:
        super().receive(source, parts)

    def connection_closed(self, name: str, boot: int) -> None:
        """A connection of that process closed: the machine's system knows."""
        stand = self.life.stand
        if stand is Stand.RUNS:
            self.life.context.run(self._take_closed, name, boot)
        elif stand is Stand.FROZEN:
            self._world.call_soon(self._take_closed, name, boot, context=self.life.context)

    def _take_closed(self, name: str, boot: int) -> None:
        self._recorder.say(f"{self.life.machine:14} sees a connection of {name}, boot {boot}, close")
        super().connection_closed(name, boot)

    def on_message(self, handler: Handler) -> None:
        """See Bus; what is handed over is recorded."""
        recorder, life = self._recorder, self.life

        def recorded(sender: PeerRef, message: Message, frames: Sequence[Frame]) -> None:
            recorder.delivered(sender.id, sender.boot, life, message)
            handler(sender, message, frames)

        super().on_message(recorded)

    def _deliver(self, command: Deliver) -> None:
        message = command.message
        network = self._network
        assert isinstance(network, WorldNetwork)
        if network.losses and network.loses(
            message.__struct_config__.tag, f"{command.sender.id}>{self.life.name}", deep=True
        ):
            return
        if isinstance(message, ANSWERS):
            question = self._questions.get(request_id_of(message))
            before = question.answer if question is not None else None
            super()._deliver(command)
            if question is not None and question.answer is not before:
                self._recorder.delivered(command.sender.id, command.sender.boot, self.life, message)
            return
        super()._deliver(command)

    def _call_later(self, delay_s: float, what: Callable[[], None]) -> Handle:
        return self._world.call_later(delay_s, what, context=self.life.context)

    def _call_soon(self, what: Callable[[], None]) -> None:
        self._world.call_soon(what, context=self.life.context)

    def _failed(self, error: Exception) -> None:
        import traceback

        text = "".join(traceback.format_exception(error)[-3:])
        self._recorder.error(f"{self.life.name}: a handler of the bus failed: {error!r}\n{text}")
