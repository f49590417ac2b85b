"""Whatever the network does, a lane delivers each message once and in order, or the peer is reported lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.errors import MisuseError
from wire.limits import LIMITS, MIB
from wire.link import QueueFull
from wire.messages import BACKWARD, CONTROL, FORWARD, LANES, Hop, Message, PeerRef, TensorMeta
from wire.sim import Hints, Line, SimBus, SimClock, SimNetwork

SMALL = replace(LIMITS, window_bytes=4000, window_packets=8, early_bytes=8000, early_packets=12, ack_packets=4)


def hop(step: int, size: int = 0) -> Hop:
    tensors = [TensorMeta("uint8", [size])] if size else []
    return Hop("run", 1, 0, step, 0, 0, 0, step, "a", 0, tensors)


class Log:
    """What a bus has handed over."""

    def __init__(self, bus: SimBus) -> None:
        self.steps: list[int] = []
        self.by_lane: dict[int, list[int]] = {lane: [] for lane in LANES}
        self.frames: dict[int, bytes] = {}
        self.lost: list[tuple[PeerRef, str]] = []
        bus.on_message(self.took)
        bus.on_loss(lambda peer, reason: self.lost.append((peer, reason)))

    def took(self, sender: PeerRef, message: Message, frames: object) -> None:
        assert isinstance(message, Hop)
        self.steps.append(message.step)
        self.by_lane[message.microbatch if message.microbatch else 0].append(message.step)
        for frame in frames:  # type: ignore[attr-defined]
            self.frames[message.step] = bytes(frame)


def pair(seed: int, line: Line, limits=SMALL, back: Line | None = None):
    clock = SimClock()
    network = SimNetwork(seed, clock=clock)
    network.set_line("a", "b", line)
    network.set_line("b", "a", back if back is not None else line)
    a, b = network.bus("a", limits=limits).open(), network.bus("b", limits=limits).open()
    return clock, network, a, b, Log(a), Log(b)


def until(clock: SimClock, condition: Callable[[], bool], seconds: float = 300.0) -> None:
    assert clock.run(clock.now() + seconds, stop=condition), "it never happened"


lines = st.builds(
    Line,
    delay_s=st.sampled_from([0.0, 0.001, 0.08]),
    jitter_s=st.sampled_from([0.0, 0.02]),
    drop=st.sampled_from([0.0, 0.1, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
    reorder=st.sampled_from([0.0, 0.5]),
    reorder_s=st.sampled_from([0.01, 0.5]),
    damage=st.sampled_from([0.0, 0.1]),
    rate_bytes_s=st.sampled_from([None, 50_000.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    there=lines,
    back=lines,
    sizes=st.lists(st.sampled_from([0, 1, 100, 3000, 9000]), min_size=1, max_size=30),
    known_boot=st.booleans(),
)
def test_once_and_in_order_on_any_line(seed, there, back, sizes, known_boot):
    clock, _, a, b, _, log = pair(seed, there, back=back)
    to = b.me if known_boot else PeerRef("b", 0, b.me.addresses)
    for step, size in enumerate(sizes):
        a.send(to, hop(step, size), [bytes([step % 251]) * size] if size else [])
    until(clock, lambda: len(log.steps) == len(sizes) and a.queued_bytes(b.me) == 0)
    clock.run(clock.now() + 5)
    assert log.steps == list(range(len(sizes)))
    assert all(log.frames[step] == bytes([step % 251]) * size for step, size in enumerate(sizes) if size)
    assert log.lost == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), line=lines, back=lines, count=st.integers(1, 25))
def test_both_directions_and_all_lanes(seed, line, back, count):
    clock, _, a, b, log_a, log_b = pair(seed, line, back=back)
    for step in range(count):
        for lane in LANES:
            a.send(b.me, replace_lane(hop(step), lane), lane=lane)
            b.send(a.me, replace_lane(hop(step), lane), lane=lane)
    lost = lambda: log_a.lost or log_b.lost  # noqa: E731 - four of ten packets go, so a minute without any is possible
    until(clock, lambda: lost() or len(log_a.steps) == len(log_b.steps) == 3 * count)
    for log in (log_a, log_b):
        for lane in LANES:
            assert log.by_lane[lane] == list(range(len(log.by_lane[lane]) if lost() else count))


def replace_lane(message: Hop, lane: int) -> Hop:
    return Hop(*[getattr(message, name) if name != "microbatch" else lane for name in message.__struct_fields__])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    events=st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["cut", "one_way", "heal", "reconnect"])), max_size=8),
    line=lines,
)
def test_partitions_and_broken_connections_delay_but_lose_nothing(seed, events, line):
    clock, network, a, b, _, log = pair(seed, line)
    for when, event in events:
        match event:
            case "cut":
                clock.call_at(when, lambda: network.partition("a", "b"))
            case "one_way":
                clock.call_at(when, lambda: network.partition("b", "a", one_way=True))
            case "heal":
                clock.call_at(when, lambda: network.heal("a", "b"))
            case "reconnect":
                clock.call_at(when, lambda: network.reconnect("a", "b"))
    clock.call_at(4.0, lambda: network.heal("a", "b"))
    for step in range(20):
        clock.call_at(step * 0.2, lambda step=step: a.send(b.me, hop(step, 500), [b"x" * 500]))
    until(clock, lambda: len(log.steps) == 20)
    assert log.steps == list(range(20))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), line=lines, crash_at=st.floats(0, 2))
def test_a_restarted_receiver_is_reported_and_nothing_is_delivered_twice(seed, line, crash_at):
    clock, network, a, b, log_a, log_b = pair(seed, line)
    old = b.me
    restarted: list[Log] = []

    def restart() -> None:
        network.crash(b)
        restarted.append(Log(network.bus("b", limits=SMALL).open()))

    clock.call_at(crash_at, restart)
    for step in range(20):
        clock.call_at(step * 0.1, lambda step=step: a.send(old, hop(step, 300), [b"y" * 300]))
    clock.run(400.0)
    assert log_b.steps == list(range(len(log_b.steps)))
    assert restarted[0].steps == []
    if len(log_b.steps) < 20:
        assert log_a.lost
        assert all(peer.boot == old.boot for peer, _ in log_a.lost)


def test_the_reason_of_a_loss_names_what_was_under_way():
    clock, network, a, b, log_a, _ = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.crash(b)
    a.send(b.me, hop(1))
    network.bus("b").open()
    clock.run(10.0)
    [(peer, reason)] = log_a.lost
    assert peer == b.me
    assert "restarted" in reason
    assert "1 Hop" in reason
    a.send(b.me, hop(2))  # a send to a boot that is known to be dead is reported, never silent
    clock.run(11.0)
    assert len(log_a.lost) == 2


def test_silence_ends_in_a_loss():
    clock, network, a, b, log_a, _ = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.partition("a", "b")
    a.send(b.me, hop(1))
    clock.run(50.0)
    assert log_a.lost == []
    clock.run(80.0)
    [(_, reason)] = log_a.lost
    assert "acknowledged nothing for" in reason
    network.heal("a", "b")  # the same boot may be reached again, by a new life of the link
    a.send(b.me, hop(2))
    clock.run(90.0)
    assert a.queued_bytes(b.me) == 0


def test_nobody_at_the_address_ends_in_a_loss():
    clock = SimClock()
    network = SimNetwork(1, clock=clock)
    a = network.bus("a").open()
    log = Log(a)
    a.send(PeerRef("", 0, ["tcp://nowhere:1"]), hop(0))
    clock.run(61.0)
    assert "did not answer for 60 s" in log.lost[0][1]


def test_a_peer_that_stands_still_costs_no_more_than_the_limit_and_gets_nothing_twice():
    limits = replace(LIMITS, queue_bytes=1 * MIB, window_bytes=64 * 1024)
    clock, network, a, b, _, log = pair(1, Line(), limits=limits)
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.freeze(b)
    sent = 1
    while a.queued_bytes(b.me) <= limits.queue_bytes - 10_100:
        a.send(b.me, hop(sent, 10_000), [bytes(10_000)])
        sent += 1
        clock.run(clock.now() + 0.01)
    with pytest.raises(QueueFull, match="wait for b"):
        a.send(b.me, hop(sent, 10_000), [bytes(10_000)])
    assert a.queued_bytes(b.me) <= limits.queue_bytes
    before = network.counters["packets"]
    clock.run(clock.now() + 20.0)
    assert network.counters["packets"] - before < 40  # pings and greetings only, ever more rarely
    network.thaw(b)
    until(clock, lambda: len(log.steps) == sent)
    assert log.steps == list(range(sent))
    snapshot = a.counters()["peers"]
    assert all(peer["resends"] == 0 for peer in snapshot.values())


def test_a_message_above_the_window_goes_alone():
    clock, _, a, b, _, log = pair(1, Line(rate_bytes_s=1e6))
    a.send(b.me, hop(0))
    clock.run(1.0)
    for step in range(1, 4):
        a.send(b.me, hop(step, 20_000), [bytes(20_000)])
        assert 20_000 <= a.counters()["peers"][f"b/{b.me.boot}"]["flying_bytes"] <= 20_200
    until(clock, lambda: log.steps == [0, 1, 2, 3])


def test_control_does_not_wait_behind_bulk():
    clock, _, a, b, _, log = pair(1, Line(rate_bytes_s=12.5e6), limits=LIMITS)
    a.send(b.me, hop(0))
    clock.run(1.0)
    for step in range(1, 4):
        a.send(b.me, hop(step, 3 * MIB), [bytes(3 * MIB)], lane=FORWARD)
    a.send(b.me, hop(99), lane=CONTROL)
    until(clock, lambda: len(log.steps) == 5)
    assert log.steps.index(99) == 1


def test_large_messages_are_cut_and_put_together():
    clock, network, a, b, _, _ = pair(3, Line(drop=0.05, duplicate=0.1, reorder=0.2, damage=0.05), limits=LIMITS)
    frames = [bytes([n]) * size for n, size in ((1, 5 * MIB + 3), (2, 0), (3, 1), (4, 2 * MIB))]
    got: list[list[bytes]] = []
    b.on_message(lambda sender, message, its: got.append([bytes(frame) for frame in its]))
    message = Hop("run", 1, 0, 0, 0, 0, 0, 1, "a", 0, [TensorMeta("uint8", [len(frame)]) for frame in frames])
    for _ in range(3):
        a.send(b.me, message, frames, lane=BACKWARD)
    until(clock, lambda: len(got) == 3)
    assert got == [frames] * 3
    assert network.counters["damaged"] > 0


def test_a_frame_changed_before_it_is_acknowledged_ends_the_link_with_that_reason():
    clock, network, a, b, log_a, log_b = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.set_line("a", "b", Line(damage=0.5))
    frame = bytearray(1000)
    a.send(b.me, hop(1, 1000), [frame])
    frame[5] = 1
    clock.run(30.0)
    assert "was changed by this process" in log_a.lost[0][1]
    assert log_b.steps == [0]


def test_a_line_that_always_damages_is_given_up():
    clock, network, a, b, log_a, log_b = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.set_line("a", "b", Line(damage=1.0))
    a.send(b.me, hop(1, 1000), [bytes(1000)])
    clock.run(90.0)
    assert log_a.lost[0][0].id == "b"
    assert log_b.steps == [0]


def test_dial_only_peers_receive_on_their_own_connection():
    clock = SimClock()
    network = SimNetwork(5, clock=clock, line=Line(drop=0.1, reorder=0.1))
    server, client = network.bus("server").open(), network.bus("client", dial_only=True).open()
    echoed = Log(client)
    server.on_message(lambda sender, message, frames: server.send(sender, message, [bytes(f) for f in frames]))
    for step in range(10):
        client.send(PeerRef("", 0, server.me.addresses), hop(step, 50), [bytes(50)])
    until(clock, lambda: len(echoed.steps) == 10)
    assert echoed.steps == list(range(10))
    log = Log(server)
    client.shut()
    clock.run(clock.now() + 1)
    assert "has closed" in log.lost[0][1]
    with pytest.raises(MisuseError, match="no address and no link"):
        server.send(PeerRef("somebody", 5), hop(0))


def test_forget_drops_what_is_queued_and_begins_anew():
    clock, network, a, b, log_a, log_b = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.partition("a", "b")
    a.send(b.me, hop(1))
    a.forget(b.me)
    assert a.queued_bytes(b.me) == 0
    network.heal("a", "b")
    a.send(b.me, hop(2))
    b.send(a.me, hop(3))
    until(clock, lambda: log_b.steps == [0, 2] and log_a.steps == [3])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    there=lines.map(lambda line: replace(line, drop=min(line.drop, 0.1), damage=0.0)),
    back=lines.map(lambda line: replace(line, drop=min(line.drop, 0.1), damage=0.0)),
    deeds=st.lists(
        st.sampled_from(["a sends", "b sends", "a asks whoever is there", "b asks whoever is there"]),
        min_size=2,
        max_size=12,
    ),
    pause_s=st.sampled_from([0.0, 0.05, 1.0, 12.0]),
)
def test_whoever_answers_is_the_one_that_is_known(seed, there, back, deeds, pause_s):
    """A link to an address, and one to the process there, become one: neither ends up in a life the other left."""
    clock, _, a, b, log_a, log_b = pair(seed, there, back=back)
    for step, deed in enumerate(deeds):
        one, other = (a, b) if deed.startswith("a") else (b, a)
        one.send(PeerRef("", 0, other.me.addresses) if deed.endswith("there") else other.me, hop(step))
        clock.run(clock.now() + pause_s)
    clock.run(clock.now() + 30)
    for _ in range(2):
        a.send(PeerRef("", 0, b.me.addresses), hop(1000))
        b.send(PeerRef("", 0, a.me.addresses), hop(1000))
        a.send(b.me, hop(1001))
        b.send(a.me, hop(1001))
        clock.run(clock.now() + 30)
    for log in (log_a, log_b):
        assert log.steps.count(1000) == log.steps.count(1001) == 2, (log.steps, log.lost)
        assert log.lost == []
    assert sorted(step for step in log_a.steps + log_b.steps if step < 1000) == list(range(len(deeds)))


def test_an_address_is_asked_after_its_process_was_forgotten_and_came_back_by_itself():
    """The other side, which forgot nothing, greeted first."""
    clock, network, a, b, log_a, log_b = pair(1, Line())
    a.send(b.me, hop(0))
    clock.run(1.0)
    network.partition("a", "b")
    b.send(a.me, hop(1))
    clock.run(2.0)
    a.forget(b.me)
    network.heal("a", "b")
    until(clock, lambda: log_a.steps == [1])
    a.send(PeerRef("", 0, b.me.addresses), hop(2))
    until(clock, lambda: log_b.steps == [0, 2])
    assert log_a.lost == log_b.lost == []


def test_the_other_id_at_the_address_is_a_loss():
    clock, _, a, b, log_a, log_b = pair(1, Line())
    a.send(PeerRef("c", 0, b.me.addresses), hop(0))
    clock.run(5.0)
    assert "there answers b instead" in log_a.lost[0][1]
    assert log_b.steps == []


def test_same_seed_same_run():
    def run(seed: int) -> tuple[list[int], dict[str, int], float]:
        clock, network, a, b, _, log = pair(seed, Line(drop=0.2, duplicate=0.2, reorder=0.3, jitter_s=0.01))
        for step in range(50):
            a.send(b.me, hop(step, 100), [bytes(100)])
        until(clock, lambda: len(log.steps) == 50)
        return log.steps, dict(network.counters), clock.now()

    assert run(5) == run(5)
    assert run(5) != run(6)


class TestHints:
    """Others may be told that a connection closed."""

    def world(self, hints: Hints = Hints(1.0, 0.5)):  # noqa: B008
        clock, network, a, b, _, _ = pair(1, Line())
        network.hints = hints
        told: list[tuple[float, str, int]] = []
        a.on_break(lambda peer: told.append((clock.now(), peer.id, peer.boot)))
        b.send(PeerRef("a", 0, ["tcp://a:7700"]), hop(1))
        clock.run(1.0)
        return clock, network, a, b, told

    def test_of_a_process_that_is_gone(self):
        clock, network, _, b, told = self.world()
        network.crash(b)
        clock.run(2.0)
        assert [(who, boot) for _, who, boot in told] == [("b", b.me.boot)]
        assert 1.0 <= told[0][0] <= 1.5

    def test_of_one_that_lives_and_nothing_is_lost(self):
        clock, network, a, b, told = self.world()
        network.close_connections(b, Hints(1.0))
        b.send(a.me, hop(2))
        clock.run(2.0)
        assert [who for _, who, _ in told] == ["b"]
        assert not b.queued_bytes(a.me)

    def test_where_a_connection_stands_again(self):
        clock, network, _, _, told = self.world()
        network.reconnect("b", "a")
        clock.run(2.0)
        assert [who for _, who, _ in told] == ["b"]

    def test_by_chance_and_not_at_all(self):
        for hints, expected in ((Hints(), 0), (Hints(0.5), 50)):
            clock, network, _, b, told = self.world(hints)
            for _ in range(100):
                network.close_connections(b, hints)
            clock.run(2.0)
            assert abs(len(told) - expected) <= 15 * bool(expected)

    def test_the_dead_behind_a_cut_line_close_nothing(self):
        clock, network, _, b, told = self.world()
        network.partition("a", "b")
        network.crash(b)
        clock.run(2.0)
        assert told == []

    def test_whoever_stands_still_is_told_later(self):
        clock, network, a, b, told = self.world()
        network.freeze(a)
        network.crash(b)
        clock.run(5.0)
        assert told == []
        network.thaw(a)
        assert [who for _, who, _ in told] == ["b"]
