"""Links that one side or both forget, again and again: what is sent later arrives once, or its loss is told soon."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.unit.wire.test_delivery import Log, hop, pair, until
from wire.commands import Transmit
from wire.limits import LIMITS, MIB
from wire.messages import PeerRef
from wire.packets import Kind
from wire.sim import Line, SimBus, SimNetwork

DROPPED = "has dropped what had arrived"
PROMPT_S = 20.0
"""A third of the time after which a link is given up; pings, the slowest part, come every 4 s at last."""


@dataclass
class Side:
    """One of the two processes, and what of its messages must arrive."""

    bus: SimBus
    log: Log
    owed: set[int] = field(default_factory=set)

    def paid(self, other: Side) -> bool:
        return bool(self.log.lost) or self.owed <= set(other.log.steps)


def anyone_at(bus: SimBus) -> PeerRef:
    return PeerRef("", 0, bus.me.addresses)


def random_line(rng: random.Random) -> Line:
    return Line(
        delay_s=rng.choice([0.0, 0.001, 0.003]),
        jitter_s=rng.choice([0.0, 0.002]),
        drop=rng.choice([0.0, 0.05]),
        duplicate=rng.choice([0.0, 0.3]),
        reorder=rng.choice([0.0, 0.5]),
        reorder_s=rng.choice([0.005, 0.3]),
    )


def run_schedule(seed: int, *, by_address: bool) -> str:
    """Random deeds on both sides, milliseconds apart. Returns what broke a rule, or ""."""
    rng = random.Random(seed)
    clock, network, a, b, log_a, log_b = pair(seed, random_line(rng), back=random_line(rng))
    sides = [Side(a, log_a), Side(b, log_b)]
    for step in range(rng.randint(3, 14)):
        one, other = rng.sample(sides, 2)
        names = [other.bus.me, anyone_at(other.bus)] if by_address else [other.bus.me]
        if rng.random() < 0.4:
            for name in rng.sample(names, rng.randint(1, len(names))):
                one.bus.forget(name)
            one.owed.clear()
        else:
            one.bus.send(rng.choice(names), hop(step))
            one.owed.add(step)
        clock.run(clock.now() + rng.choice([0.0, 0.0005, 0.001, 0.002, 0.005, 0.02]))
    one, other = sides
    if not clock.run(clock.now() + PROMPT_S, stop=lambda: one.paid(other) and other.paid(one)):
        return "neither delivered nor lost"
    clock.run(clock.now() + 100.0)
    if any(DROPPED not in reason for side in sides for _, reason in side.log.lost):
        return f"another loss: {log_a.lost} {log_b.lost}"
    before = network.counters["packets"]
    clock.run(clock.now() + 200.0)
    if network.counters["packets"] != before or not a.counters()["peers"].keys() <= {f"b/{b.me.boot}"}:
        return "it does not come to rest"
    if any(peer["queued_packets"] for bus in (a, b) for peer in bus.counters()["peers"].values()):
        return "something waits for ever"
    network.set_line("a", "b", Line(), both=True)
    known = len(log_a.lost), len(log_b.lost)
    a.send(b.me, hop(100))
    b.send(a.me, hop(101))
    clock.run(clock.now() + 5.0)
    if log_b.steps[-1:] != [100] or log_a.steps[-1:] != [101] or known != (len(log_a.lost), len(log_b.lost)):
        return "the link does not work afterwards"
    for log in (log_a, log_b):
        if len(set(log.steps)) != len(log.steps):
            return "delivered twice"
        if not by_address and log.steps != sorted(log.steps):
            return "out of order"
    return ""


@pytest.mark.parametrize("by_address", [False, True])
def test_whatever_is_forgotten_when_what_is_sent_later_arrives_or_its_loss_is_told(by_address):
    broken = {seed: found for seed in range(350) if (found := run_schedule(seed, by_address=by_address))}
    assert not broken, broken


class Carrier:
    """A line whose packets a test may hold back, by the sender's id and their kind, and let go later."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.held: list[tuple[SimBus, Transmit]] = []
        self.holding: set[tuple[str, Kind]] = set()
        self._carry = network.carry
        network.carry = self.carry  # type: ignore[method-assign]

    def carry(self, src: SimBus, packet: Transmit) -> None:
        if (src.place, packet.kind) in self.holding:
            self.held.append((src, packet))
        else:
            self._carry(src, packet)

    def let_go(self) -> None:
        self.holding.clear()
        for src, packet in self.held:
            self._carry(src, packet)
        self.held.clear()


def test_a_late_answer_out_of_an_earlier_life_does_not_end_greeting():
    clock, network, a, b, log_a, log_b = pair(1, Line())
    carrier = Carrier(network)
    carrier.holding = {("b", Kind.WELCOME)}
    a.send(b.me, hop(0))
    clock.run(0.1)
    b.forget(a.me)
    b.send(a.me, hop(1))  # greets under a new stream
    clock.run(0.2)
    b.forget(a.me)
    carrier.let_go()
    clock.run(5.0)
    assert log_b.steps == [0]
    assert log_a.lost == []


def test_what_waited_for_an_address_goes_on_even_if_the_answer_is_late():
    clock, network, a, b, log_a, log_b = pair(1, Line())
    carrier = Carrier(network)
    carrier.holding = {("b", Kind.WELCOME)}
    a.send(anyone_at(b), hop(0))
    clock.run(0.1)
    b.forget(a.me)
    b.send(a.me, hop(1))
    until(clock, lambda: log_a.steps == [1])
    carrier.let_go()
    until(clock, lambda: log_b.steps == [0], 5.0)
    assert log_a.lost == log_b.lost == []


def test_a_process_that_has_seen_a_newer_stream_says_so_and_gets_one():
    """It was greeted by name and by address; of the two links the newer one was forgotten."""
    clock, network, a, b, log_a, log_b = pair(1, Line())
    carrier = Carrier(network)
    carrier.holding = {("a", Kind.HELLO)}
    a.send(b.me, hop(0))
    carrier.held.clear()
    carrier.let_go()
    a.send(anyone_at(b), hop(1))
    a.forget(anyone_at(b))
    until(clock, lambda: log_b.steps == [0], 5.0)
    assert log_a.lost == log_b.lost == []


def test_what_was_acknowledged_out_of_order_and_then_forgotten_is_reported_lost():
    clock, network, a, b, log_a, log_b = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.partition("a", "b", one_way=True)
    a.send(b.me, hop(1))
    network.heal("a", "b")
    a.send(b.me, hop(2))  # early: acknowledged, and kept until the first has come
    clock.run(1.1)
    b.forget(a.me)
    until(clock, lambda: bool(log_a.lost), 5.0)
    [(peer, reason)] = log_a.lost
    assert peer == b.me
    assert DROPPED in reason
    assert "1 Hop" in reason
    a.send(b.me, hop(3))
    until(clock, lambda: log_b.steps == [0, 3], 5.0)


def test_a_message_whose_first_chunks_were_forgotten_is_reported_lost():
    clock, _, a, b, log_a, log_b = pair(1, Line(rate_bytes_s=5e6), limits=LIMITS)
    a.send(b.me, hop(0))
    clock.run(1.0)
    a.send(b.me, hop(1, 5 * MIB), [bytes(5 * MIB)])
    clock.run(1.5)
    b.forget(a.me)
    b.send(a.me, hop(7))  # the line is slow: b's own greeting is the first to tell
    until(clock, lambda: bool(log_a.lost), 5.0)
    assert DROPPED in log_a.lost[0][1]
    a.send(b.me, hop(2))
    until(clock, lambda: log_b.steps == [0, 2] and log_a.steps == [7], 10.0)
