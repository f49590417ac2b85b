"""A simulated network behind the same bus: delays, losses, duplicates, reordering, damage, partitions, slow lines, and
hints of connections that closed.

Everything random comes from one seed, so that a run can be repeated exactly. The links are those that ship: `SimBus`
drives the same `Endpoint` as `ZmqBus`. Time is virtual on `SimClock` or `SimLoop`.

    network = SimNetwork(seed=7)
    a, b = network.bus("a"), network.bus("b")
    network.set_line("a", "b", Line(drop=0.1))
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from wire.codec import Payload
from wire.commands import Command, Route, Transmit
from wire.driver import Driver, Handle
from wire.endpoint import Endpoint, Source
from wire.ids import Boot
from wire.limits import LIMITS, Limits
from wire.messages import CONTROL, PeerRef
from wire.simloop import LoopClock, SimClock, SimLoop, run_sim

__all__ = ["Hints", "Line", "LoopClock", "SimBus", "SimClock", "SimLoop", "SimNetwork", "run_sim"]

PORT = 7700


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Seconds."""

    def call_at(self, when: float, what: Callable[[], None]) -> Handle:
        """Call `what` then."""


@dataclass(frozen=True, slots=True)
class Line:
    """How one direction between two processes behaves. Probabilities are per packet.

    `reorder`: the packet takes up to `reorder_s` longer and later ones may overtake it; others keep their order within
    a lane. `rate_bytes_s` None: unlimited; control has its own share, as it has its own connection.
    """

    delay_s: float = 0.001
    jitter_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.05
    damage: float = 0.0
    rate_bytes_s: float | None = None
    cut: bool = False  # nothing arrives


@dataclass(frozen=True, slots=True)
class Hints:
    """Who is told that a connection closed (`Bus.on_break`): each other process with this chance, `within_s`."""

    chance: float = 0.0
    within_s: float = 0.0


class SimNetwork:
    """The lines and the processes on them. `clock` None: the running event loop's time."""

    def __init__(self, seed: int, *, clock: Clock | None = None, line: Line | None = None) -> None:
        self.random = random.Random(seed)
        self.hints = Hints()
        """Of processes that end, and of connections that break and stand again."""
        self._hint_random = random.Random(f"hints/{seed}")
        self.clock: Clock = clock if clock is not None else LoopClock()
        self.counters: Counter[str] = Counter()
        self._default = line if line is not None else Line()
        self._lines: dict[tuple[str, str], Line] = {}
        self._by_address: dict[str, SimBus] = {}
        self._by_boot: dict[tuple[str, int], SimBus] = {}
        self._arrival: dict[tuple[str, str, int], float] = {}
        self._free: dict[tuple[str, str, bool], float] = {}
        self._frozen: dict[SimBus, list[Callable[[], None]]] = {}
        self._epochs: dict[tuple[str, str], int] = {}  # connections since the start, per direction
        self._boots = 0

    # ------------------------------------------------------------ processes

    def bus(self, peer_id: str, *, dial_only: bool = False, limits: Limits = LIMITS) -> SimBus:
        """A new process's bus; a second one of the same id is a restart under a new boot at the same address."""
        self._boots += 1
        address = "" if dial_only else f"tcp://{peer_id}:{PORT}"
        return SimBus(self, peer_id, Boot(self._boots), address, limits)

    def crash(self, bus: SimBus) -> None:
        """The process is gone without a word; the system closes its connections."""
        self.remove(bus)
        bus.die()
        self.close_connections(bus, self.hints)

    def freeze(self, bus: SimBus) -> None:
        """SIGSTOP: what arrives waits, nothing is handled, no timer fires."""
        self._frozen.setdefault(bus, [])

    def thaw(self, bus: SimBus) -> None:
        """SIGCONT."""
        for event in self._frozen.pop(bus, []):
            event()
        bus.wake()

    def frozen(self, bus: SimBus) -> bool:
        """Whether it stands still."""
        return bus in self._frozen

    def add(self, bus: SimBus, address: str) -> None:
        """It can be reached from now on."""
        self._by_boot[(bus.me.id, bus.me.boot)] = bus
        if address:
            self._by_address[address] = bus

    def remove(self, bus: SimBus) -> None:
        """It can't be reached any more."""
        self._by_boot.pop((bus.me.id, bus.me.boot), None)
        for address in [address for address, other in self._by_address.items() if other is bus]:
            del self._by_address[address]
        self._frozen.pop(bus, None)

    # ------------------------------------------------------------ lines

    def set_line(self, src: str, dst: str, line: Line, *, both: bool = False) -> None:
        """How packets from `src` to `dst` (ids) travel from now on."""
        self._lines[(src, dst)] = line
        if both:
            self._lines[(dst, src)] = line

    def line(self, src: str, dst: str) -> Line:
        """How they travel now."""
        return self._lines.get((src, dst), self._default)

    def partition(self, src: str, dst: str, *, one_way: bool = False) -> None:
        """Nothing passes from `src` to `dst`, nor back unless `one_way`."""
        for pair in [(src, dst)] if one_way else [(src, dst), (dst, src)]:
            self._lines[pair] = replace(self.line(*pair), cut=True)

    def heal(self, src: str, dst: str) -> None:
        """Both directions pass again."""
        for pair in [(src, dst), (dst, src)]:
            self._lines[pair] = replace(self.line(*pair), cut=False)

    def reconnect(self, src: str, dst: str) -> None:
        """The connections break and stand again: what is under way from `src` to `dst` is lost."""
        for lane in range(3):
            self._arrival.pop((src, dst, lane), None)
        self._epochs[(src, dst)] = self._epochs.get((src, dst), 0) + 1
        for bus in [bus for bus in self._by_boot.values() if bus.place == src]:
            self.close_connections(bus, self.hints, to=dst)

    def close_connections(self, bus: SimBus, hints: Hints, *, to: str = "") -> None:
        """Others are told that a connection of this process closed, whether it lives or not. `to`: only who is there.

        What is under way may come before or after. A line that is cut then takes no such word from the dead.
        """
        dead = self._by_boot.get((bus.me.id, bus.me.boot)) is not bus
        for other in [other for other in self._by_boot.values() if other is not bus and to in ("", other.place)]:
            if self._hint_random.random() < hints.chance:
                when = self.clock.now() + self._hint_random.uniform(0, hints.within_s)
                self.clock.call_at(when, partial(self._tell_closed, bus, other, dead=dead))

    def _tell_closed(self, bus: SimBus, other: SimBus, *, dead: bool) -> None:
        if dead and self.line(bus.place, other.place).cut:
            return
        self.counters["hints"] += 1
        tell = partial(other.connection_closed, bus.me.id, bus.me.boot)
        if other in self._frozen:
            self._frozen[other].append(tell)
        else:
            tell()

    # ------------------------------------------------------------ packets

    def carry(self, src: SimBus, packet: Transmit) -> None:
        """A packet sets out."""
        route = packet.route
        if route.address:
            target = self._by_address.get(route.address)
            if target is None:
                self.counters["refused_connections"] += 1
                return
        else:
            target = self._by_boot.get((route.id, route.boot))
            if target is None:
                self.counters["unroutable"] += 1
                return
        pair = (src.place, target.place)
        line = self.line(*pair)
        rng = self.random
        parts = [bytes(part) for part in packet.parts]
        self.counters["packets"] += 1
        if line.cut or rng.random() < line.drop:
            self.counters["dropped"] += 1
            return
        if rng.random() < line.damage:
            self.counters["damaged"] += 1
            place = rng.randrange(len(parts))
            parts[place] = _damaged(parts[place], rng)
        bound = Source(src.me.id, src.me.boot, packet.lane) if route.address else Source("", 0, packet.lane)
        arrival = self._when(pair, packet.lane, line, sum(map(len, parts)))
        self._schedule(arrival, pair, target, bound, parts)
        if rng.random() < line.duplicate:
            self.counters["duplicated"] += 1
            self._schedule(arrival + rng.uniform(0, line.reorder_s), pair, target, bound, parts)

    def _when(self, pair: tuple[str, str], lane: int, line: Line, size: int) -> float:
        now = self.clock.now()
        begin = now
        if line.rate_bytes_s is not None:
            share = (*pair, lane == CONTROL)
            begin = max(now, self._free.get(share, 0.0)) + size / line.rate_bytes_s
            self._free[share] = begin
        arrival = begin + line.delay_s + self.random.uniform(0, line.jitter_s)
        if self.random.random() < line.reorder:
            self.counters["reordered"] += 1
            return arrival + self.random.uniform(0, line.reorder_s)
        arrival = max(arrival, self._arrival.get((*pair, lane), 0.0))
        self._arrival[(*pair, lane)] = arrival
        return arrival

    def _schedule(self, when: float, pair: tuple[str, str], target: SimBus, source: Source, parts: list[bytes]) -> None:
        epoch = self._epochs.get(pair, 0)

        def arrive() -> None:
            if self.line(*pair).cut or self._epochs.get(pair, 0) != epoch:
                self.counters["dropped"] += 1
            elif target in self._frozen:
                self._frozen[target].append(partial(target.receive, source, list(parts)))
            else:
                target.receive(source, list(parts))

        self.clock.call_at(when, arrive)


def _damaged(part: bytes, rng: random.Random) -> bytes:
    if not part:
        return part
    changed = bytearray(part)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


class SimBus(Driver):
    """`wire.bus.Bus` on a simulated network. `open` and `shut` are `start` and `close` without asyncio."""

    def __init__(self, network: SimNetwork, peer_id: str, boot: Boot, address: str, limits: Limits) -> None:
        super().__init__(peer_id, boot=boot, limits=limits)
        self.place = peer_id
        """Lines are between places; two processes of one id may be at different ones."""
        self._network = network
        self._address = address
        self._endpoint = Endpoint(PeerRef(peer_id, boot, [address] if address else []), limits)

    def open(self) -> SimBus:
        """Be reachable."""
        self._network.add(self, self._address)
        return self

    async def start(self) -> None:
        """Be reachable."""
        self.open()

    def shut(self) -> None:
        """Say goodbye and be gone."""
        if self._closed:
            return
        goodbyes: list[Command] = []
        self._links.close("closed in good order", goodbyes)
        for command in goodbyes:
            if isinstance(command, Transmit):
                self._carry(command)
        self._network.remove(self)
        self.die()

    async def close(self) -> None:
        """Say goodbye and be gone. Idempotent."""
        self.shut()

    def die(self) -> None:
        """Do nothing any more."""
        self._closed = True
        self._abandon()
        if self._timer is not None:
            self._timer.cancel()

    def receive(self, source: Source, parts: list[Payload]) -> None:
        """A packet has arrived."""
        if not self._closed:
            self._arrived(source, parts[0], [memoryview(part) for part in parts[1:]])
            self._batch_done()

    def connection_closed(self, name: str, boot: int) -> None:
        """A connection of that process closed."""
        if not self._closed:
            self._broke(name, boot)

    def wake(self) -> None:
        """Time goes on after a freeze."""
        self._tick()

    def _tick(self) -> None:
        self._timer = None
        if not self._network.frozen(self):
            super()._tick()

    def _carry(self, packet: Transmit) -> None:
        self._network.carry(self, packet)

    def _release(self, route: Route) -> None:
        del route

    def _now(self) -> float:
        return self._network.clock.now()

    def _call_later(self, delay_s: float, what: Callable[[], None]) -> Handle:
        return self._network.clock.call_at(self._now() + delay_s, what)

    def _call_soon(self, what: Callable[[], None]) -> None:
        self._network.clock.call_at(self._now(), what)

    def _failed(self, error: Exception) -> None:
        raise error
