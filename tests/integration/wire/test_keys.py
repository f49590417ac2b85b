"""Keys on real sockets: who is let in, who is not, and what the others notice of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct

import msgspec
import pytest
import zmq

from tests.integration.wire.keyed import Keyed, Recorder, running, until
from tests.integration.wire.peers import hop
from wire.codec import write_header
from wire.errors import MisuseError, UnreachableError
from wire.ids import new_boot, new_request_id
from wire.keys import KeyPair, fingerprint
from wire.messages import (
    BACKWARD,
    AskCluster,
    Hop,
    Join,
    ListPNodes,
    Members,
    Ok,
    PeerRef,
    Prepare,
    StartRun,
    TensorMeta,
)
from wire.packets import Kind
from wire.requests import RefusedError
from wire.roles import CLIENT, JOIN, ORCHESTRATOR, PNODE
from wire.zmq_bus import OpenBindError, ZmqBus, _identity


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dcnr.wire"]


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize("bind", [None, "tcp://127.0.0.1:0", "tcp://[::1]:0"])
async def test_messages_of_all_sizes_there_and_back(bind):
    a, b = Keyed("a", bind=bind), Keyed("b", bind="tcp://[::1]:0" if bind and "::" in bind else "tcp://127.0.0.1:0")
    rng = random.Random(1)
    async with running(a, b):
        for step, sizes in enumerate([[], [0], [1], [100, 0, 70_000], [1 << 20], [4 << 20], [5 << 20, 3], [17 << 20]]):
            frames = [rng.randbytes(size) for size in sizes]
            tensors = [TensorMeta("uint8", [size]) for size in sizes]
            message = Hop("run", 1, 0, step, 0, 0, 0, step, "a", 1, tensors)
            a.bus.send(b.anyone, message, frames)
            await until(lambda: b.got)
            sender, *rest = b.got.pop()
            assert rest == [message, frames]
            assert sender.key == a.pair.public
            assert sender.id == "a"
            b.bus.send(sender, message, frames, lane=BACKWARD)
            await until(lambda: a.got)
            sender, *rest = a.got.pop()
            assert rest == [message, frames]
            assert sender.key == b.pair.public
        assert not a.refused
        assert not b.refused
        assert "damaged" not in a.bus.counters() | b.bus.counters()


async def test_nothing_is_readable_on_the_line():
    a, b = Keyed("a"), Keyed("b")
    secret = b"the activations of a PNode" * 100
    async with running(a, b), Recorder(b.bus.me.addresses[0]) as line:
        a.bus.send(PeerRef("b", 0, [line.address], b.pair.public), hop(1, [len(secret)]), [secret])
        await until(lambda: b.got)
        captured = b"".join((*line.sent, *line.back))
        assert len(captured) > len(secret)
        for text in (secret[:12], b"hop", b"uint8", a.pair.secret.reveal().encode()):
            assert text not in captured
        assert b"CURVE" in captured


async def test_what_a_process_says_about_its_key_is_not_believed():
    a, b, other = Keyed("a"), Keyed("b"), KeyPair.new()
    async with running(a, b):
        a.bus._links.me = a.bus._links._directory.me = PeerRef("a", a.bus.me.boot, a.bus.me.addresses, other.public)
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.got)
        assert b.got[0][0].key == a.pair.public


async def test_a_public_bind_without_keys_is_refused():
    for bind in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://10.0.0.1:7700", "tcp://example.org:7700"):
        with pytest.raises(OpenBindError, match="dcnr keys"):
            await ZmqBus("open", bind=bind).start()
    with pytest.raises(MisuseError):
        ZmqBus("half", keys=KeyPair.new())
    one = Keyed("one", bind="tcp://0.0.0.0:0")
    async with running(one):
        assert one.bus.me.addresses


async def test_a_peer_whose_key_is_not_known_is_not_dialled():
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b):
        with pytest.raises(MisuseError, match="no key is known of b"):
            a.bus.send(PeerRef("b", 0, b.bus.me.addresses), hop(1))


# ---------------------------------------------------------------- who is not


async def test_an_unknown_key_is_refused_with_one_line(caplog):
    a, b, stranger = Keyed("a"), Keyed("b"), Keyed("c")
    async with running(a, b, strangers=[stranger]):
        with pytest.raises(UnreachableError, match="refuses this process's key"):
            await stranger.bus.ask(b.anyone, AskCluster(new_request_id()), timeout_s=3)
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.got)
        assert [message for _, message, _ in b.got] == [hop(1)]
    mark = fingerprint(stranger.pair.public)
    assert lines(caplog) == [f"refused a connection from 127.0.0.1: key {mark} is not admitted"]


async def test_one_who_is_admitted_later_gets_in_by_itself():
    a, late = Keyed("a"), Keyed("late")
    async with running(a, strangers=[late]):
        late.bus.send(a.anyone, hop(1))
        await until(lambda: a.refused)
        a.admit(late)
        await until(lambda: a.got, 15)


async def test_plain_security_is_refused(caplog):
    b = Keyed("b")
    plain = ZmqBus("c", bind="tcp://127.0.0.1:0")
    await plain.start()
    async with running(b):
        with pytest.raises(UnreachableError):
            await plain.ask(PeerRef("", 0, b.bus.me.addresses), AskCluster(new_request_id()), timeout_s=2)
        context = zmq.Context()
        for mechanism in ("null", "plain"):
            raw = context.socket(zmq.DEALER)
            raw.linger = 0
            raw.identity = _identity("b", new_boot(), 0, "0")
            if mechanism == "plain":
                raw.plain_username, raw.plain_password = b"b", b"b"
            raw.connect(b.bus.me.addresses[0])
            raw.send(b"x")
            await asyncio.sleep(0.3)
            raw.close()
        context.term()
        assert not b.got
    await plain.close()
    assert lines(caplog)[0].startswith("refused a connection from ")
    assert lines(caplog)[0].endswith(": it has no keys (plain security)")
    assert len(lines(caplog)) <= 4  # each kind of refusal once a minute and address, where that's still known


async def test_a_server_with_another_key_is_not_talked_to(caplog):
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b):
        wrong = PeerRef("b", 0, b.bus.me.addresses, KeyPair.new().public)
        a.admission.pin(msgspec.structs.replace(b.entry, key=wrong.key))
        with pytest.raises(UnreachableError, match="key is another than the expected one"):
            await a.bus.ask(wrong, AskCluster(new_request_id()), timeout_s=2)
        assert not b.got
    assert 1 <= len(lines(caplog)) <= 2
    assert all("expects another key here" in text for text in lines(caplog))


@pytest.mark.parametrize("dial_only", [False, True])
async def test_another_ones_id_with_ones_own_key_is_refused(caplog, dial_only):
    a, b, thief = Keyed("a", bind=None if dial_only else "tcp://127.0.0.1:0"), Keyed("b"), Keyed("c")
    async with running(a, b, thief):
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.got)
        # c takes a's id and boot, as a process, and as a connection under a's very identity where that can be guessed
        false = ZmqBus("a", bind="tcp://127.0.0.1:0", boot=a.bus.me.boot, keys=thief.pair, admission=thief.admission)
        await false.start()
        false.send(b.anyone, hop(666))
        await until(lambda: b.refused)
        b.bus.send(PeerRef("a", a.bus.me.boot), hop(2), lane=BACKWARD)
        await until(lambda: a.got)
        a.bus.send(b.anyone, hop(3))
        await until(lambda: len(b.got) == 2)
        await false.close()
        assert [message for _, message, _ in b.got] == [hop(1), hop(3)]
    mark = fingerprint(thief.pair.public)
    assert lines(caplog) == [f"refused packets as a with key {mark}: its key belongs to c"]


async def test_the_identity_that_a_dial_only_peer_is_answered_by_cant_be_guessed():
    a, b = Keyed("a", bind=None), Keyed("b")
    async with running(a, b):
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.got)
        [number] = {identity.rpartition(b"/")[2] for identity, _ in b.bus._guard.known}
        assert len(number) > 12
        assert int(number, 16) == a.bus._dealer_numbers[b.bus.me.addresses[0]]


# ---------------------------------------------------------------- revocation


@pytest.mark.parametrize("dial_only", [False, True])
async def test_a_revoked_key_ends_at_its_next_message(caplog, dial_only):
    a, b, c = Keyed("a", bind=None if dial_only else "tcp://127.0.0.1:0"), Keyed("b"), Keyed("c")
    async with running(a, b, c):
        sent = 0
        while len(b.got) < 50:  # in mid-run: packets are on their way all the time
            a.bus.send(b.anyone, hop(sent, [1000]), [bytes(1000)])
            c.bus.send(b.anyone, hop(sent))
            sent += 1
            await asyncio.sleep(0)
        b.admit(c)
        arrived = len([1 for peer, *_ in b.got if peer.id == "a"])
        for _ in range(200):
            with contextlib.suppress(MisuseError):
                a.bus.send(b.anyone, hop(sent, [1000]), [bytes(1000)])
            c.bus.send(b.anyone, hop(sent))
            sent += 1
            await asyncio.sleep(0.002)
        await until(lambda: [1 for peer, message, _ in b.got if (peer.id, message.step) == ("c", sent - 1)])
        assert len([1 for peer, *_ in b.got if peer.id == "a"]) == arrived
        assert [(peer.id, reason.partition(";")[0]) for peer, reason in b.lost] == [
            ("a", "a is not let in any more: its key is not admitted")
        ]
        assert not [peer for peer in b.bus.counters()["peers"] if peer.startswith("a/")]
        with pytest.raises(MisuseError):
            b.bus.send(PeerRef("a"), hop(1))
        # and its connections are gone: what it says now is refused in the handshake
        before = b.refused
        await until(lambda: b.refused > before, 20)
    mark = fingerprint(a.pair.public)
    told = lines(caplog)
    assert 1 <= len(told) <= 2
    assert all(mark in line and "not admitted" in line for line in told)


async def test_who_is_admitted_for_a_time_is_out_after_it():
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b):
        now = [1000.0]
        b.bus._wall = lambda: now[0]
        b.admission.replace(9, [msgspec.structs.replace(a.entry, until=2000.0)])
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.got)
        now[0] = 2000.0
        a.bus.send(b.anyone, hop(2))
        await until(lambda: b.refused)
        await asyncio.sleep(0.3)
        assert [message.step for _, message, _ in b.got] == [1]


# ---------------------------------------------------------------- roles


async def test_each_role_does_its_own_and_nothing_else(caplog):
    pnode, client, chief = Keyed("p", PNODE), Keyed("c", CLIENT), Keyed("o", ORCHESTRATOR)
    async with running(pnode, client, chief):
        with pytest.raises(RefusedError, match="p may not send ListPNodes: its role is pnode") as caught:
            await pnode.bus.ask(chief.anyone, ListPNodes(new_request_id()), timeout_s=10)
        assert caught.value.code == "role"
        for _ in range(2):
            with pytest.raises(RefusedError, match="role"):
                await client.bus.ask(pnode.anyone, StartRun(new_request_id(), "s", 1, 1, 1), timeout_s=10)
        client.bus.send(chief.anyone, Members(9), [b"\x90"])
        pnode.bus.send(chief.anyone, Members(9), [b"\x90"])
        question = asyncio.ensure_future(
            chief.bus.ask(PeerRef("p", pnode.bus.me.boot), Prepare(new_request_id(), "s", 1, 0, 1), timeout_s=10)
        )
        await until(lambda: pnode.got)
        sender, message, _ = pnode.got.pop()
        pnode.bus.send(sender, Ok(message.request_id))
        assert isinstance((await question)[0], Ok)
        await until(lambda: len(lines(caplog)) == 4)
        assert not chief.got
        assert not pnode.got
        assert not client.got
    assert set(lines(caplog)) == {
        "refused ListPNodes of p: its role is pnode", "refused StartRun of c: its role is client",
        "refused Members of c: its role is client", "refused Members of p: its role is pnode",
    }  # fmt: skip


async def test_a_token_alone_lets_nobody_do_anything_but_join(caplog):
    guest, chief = Keyed("join-1", JOIN, bind=None), Keyed("o", ORCHESTRATOR)
    async with running(guest, chief):
        for message in (AskCluster(new_request_id()), StartRun(new_request_id(), "s", 1, 1, 1)):
            with pytest.raises(RefusedError, match="role is join"):
                await guest.bus.ask(chief.anyone, message, timeout_s=10)
        guest.bus.send(chief.anyone, hop(1))
        guest.bus.send(chief.anyone, Join(new_request_id(), "p1", KeyPair.new().public))
        await until(lambda: chief.got)
        await asyncio.sleep(0.1)
        assert [type(message) for _, message, _ in chief.got] == [Join]


# ---------------------------------------------------------------- replay


async def test_a_handshake_repeated_by_somebody_on_the_line_is_refused(caplog):
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b), Recorder(b.bus.me.addresses[0]) as line:
        a.bus.send(PeerRef("b", 0, [line.address], b.pair.public), hop(1))
        await until(lambda: b.got)
        await until(lambda: not a.bus.queued_bytes(PeerRef("b")))
        packets = b.bus.counters()["packets_in"]
        assert any(b"INITIATE" in sent and b"MESSAGE" in sent for sent in line.sent)
        for recorded in [bytes(sent) for sent in line.sent]:
            for pieces in ([recorded], [recorded[:64], *frames(recorded)]):
                reader, writer = await line.dial()
                answer = b""
                with contextlib.suppress(OSError, TimeoutError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                        async with asyncio.timeout(0.2):
                            answer += await reader.read(65536)
                assert b"READY" not in answer
                assert (b"WELCOME" in answer) == (len(pieces) > 1)
                writer.close()
        await asyncio.sleep(0.2)
        assert [message for _, message, _ in b.got] == [hop(1)]
        fresh = b.bus.counters()["packets_in"] - packets
        assert fresh <= 2, "only what a itself sends meanwhile"
    assert lines(caplog)
    assert any("repeats somebody's handshake" in text for text in lines(caplog))


async def test_a_message_repeated_by_somebody_on_the_line_is_refused(caplog):
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b), Recorder(b.bus.me.addresses[0]) as line:
        where = PeerRef("b", 0, [line.address], b.pair.public)
        a.bus.send(where, hop(1))
        await until(lambda: len(b.got) == 1)
        [bulk] = [index for index, sent in enumerate(line.sent) if sent.count(b"MESSAGE") and b"\x07" in sent][-1:]
        recorded = bytes(line.sent[bulk])
        frame = frames(recorded)[-1]
        assert b"MESSAGE" in frame
        connections = len(line.sent)
        line.upstream[bulk].write(frame)
        await until(lambda: len(line.sent) > connections or lines(caplog), 15)
        for step in range(2, 6):
            a.bus.send(where, hop(step))
        await until(lambda: len(b.got) == 5, 30)
        assert [message.step for _, message, _ in b.got] == [1, 2, 3, 4, 5]
        assert not b.bus.counters().get("duplicates"), "it did not get as far as the link"
    assert any("repeats a message" in text for text in lines(caplog))


def frames(recorded: bytes) -> list[bytes]:
    """The ZMTP frames of a recorded connection, behind its greeting."""
    at, found = 64, []
    while at < len(recorded):
        flags = recorded[at]
        if flags & 2:
            size, body = struct.unpack_from(">Q", recorded, at + 1)[0], at + 9
        else:
            size, body = recorded[at + 1], at + 2
        found.append(recorded[at : body + size])
        at = body + size
    return found


async def test_a_flipped_bit_on_the_line_never_becomes_a_message_and_the_link_goes_on():
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b), Recorder(b.bus.me.addresses[0]) as line:
        where = PeerRef("b", 0, [line.address], b.pair.public)
        a.bus.send(where, hop(1))
        await until(lambda: len(b.got) == 1)
        for index in range(len(line.upstream)):
            frame = bytearray(frames(bytes(line.sent[index]))[-1])
            frame[-1] ^= 1
            line.upstream[index].write(bytes(frame))
        await asyncio.sleep(0.2)
        for step in range(2, 6):
            a.bus.send(where, hop(step))
        await until(lambda: len(b.got) == 5, 30)
        assert [message.step for _, message, _ in b.got] == [1, 2, 3, 4, 5]


# ---------------------------------------------------------------- fail closed


async def test_with_the_authenticator_killed_nobody_gets_in():
    a, b, stranger = Keyed("a"), Keyed("b"), Keyed("c")
    async with running(a, b, strangers=[stranger]):
        assert b.bus._guard is not None
        b.bus._guard.close()
        for one in (a, stranger):
            with pytest.raises(UnreachableError):
                await one.bus.ask(b.anyone, AskCluster(new_request_id()), timeout_s=3)
        assert not b.got
        assert b.bus.counters()["packets_in"] == 0


async def test_an_authenticator_that_fails_lets_nobody_in(caplog, monkeypatch):
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b):
        monkeypatch.setattr(b.admission, "find", lambda key, now: 1 / 0)
        with pytest.raises(UnreachableError):
            await a.bus.ask(b.anyone, AskCluster(new_request_id()), timeout_s=2)
        assert not b.got
    assert lines(caplog) == ["the authenticator failed: ZeroDivisionError: division by zero"]


async def test_a_packet_of_a_connection_without_a_proved_key_is_nobodys(monkeypatch):
    """Should libzmq ever hand over such a one."""
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b):
        monkeypatch.setattr("wire.guard._user", lambda frame: "")
        a.bus.send(b.anyone, hop(1))
        await until(lambda: b.refused)
        assert not b.got


async def test_a_raw_packet_of_an_admitted_key_is_still_checked():
    """An admitted peer with a program of its own: another source in the header than its identity says."""
    a, b = Keyed("a"), Keyed("b")
    async with running(a, b):
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.linger = 0
        raw.identity = _identity("a", 77, 0, "0")
        raw.curve_serverkey = b.pair.public.encode()
        raw.curve_publickey, raw.curve_secretkey = a.pair.public.encode(), a.pair.secret.reveal().encode()
        raw.connect(b.bus.me.addresses[0])
        raw.send(write_header(Kind.HELLO, "c", 77, "b", 0, PeerRef("c", 77), 1, (0, 0, 0)))
        await until(lambda: b.bus.counters().get("refused_sources"))
        assert not b.bus.counters()["peers"]
        raw.close()
        context.term()


def test_the_log_is_the_standard_one(caplog):
    caplog.set_level(logging.WARNING)
    from wire.guard import _log

    assert _log.name == "dcnr.wire"
