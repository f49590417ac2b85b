"""Requests: asked again under one id, carried out once, and never waited for beyond their deadline."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from wire.errors import MisuseError, UnreachableError
from wire.ids import RequestIds, is_id, new_boot, new_request_id
from wire.limits import LIMITS
from wire.messages import AskCluster, CreateSession, Hop, InferEnd, ListSessions, Ok, PeerRef, Refused
from wire.requests import AnswerMemory, RefusedError, Standing
from wire.sim import Line, SimBus, SimNetwork, run_sim


class Server:
    """Answers `AskCluster` with how often it was carried out."""

    def __init__(self, bus: SimBus, *, answers: bool = True) -> None:
        self.bus = bus
        self.carried_out: list[str] = []
        self.answers = answers
        bus.on_message(self.handle)

    def handle(self, sender: PeerRef, message: object, frames: object) -> None:
        if isinstance(message, AskCluster):
            self.carried_out.append(message.request_id)
            if self.answers:
                self.bus.send(sender, Ok(message.request_id), [str(len(self.carried_out)).encode()])
        elif isinstance(message, ListSessions):
            self.bus.send(sender, Refused(message.request_id, "unknown", "no such network", "dcnr net ls"))


def test_an_answer_comes_back_with_its_body():
    async def main() -> None:
        network = SimNetwork(1)
        server = Server(network.bus("server").open())
        client = network.bus("client", dial_only=True).open()
        to = PeerRef("", 0, server.bus.me.addresses)
        answer, frames = await client.ask(to, AskCluster("r1"), timeout_s=5)
        assert answer == Ok("r1")
        assert bytes(frames[0]) == b"1"

    run_sim(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_repeated_request_is_answered_but_not_carried_out_again(seed):
    async def main() -> None:
        network = SimNetwork(seed, line=Line(drop=0.3, duplicate=0.3, reorder=0.3))
        server = Server(network.bus("server").open())
        client = network.bus("client", dial_only=True).open()
        to = PeerRef("server", 0, server.bus.me.addresses)
        for number in range(20):
            await client.ask(to, AskCluster(f"r{number}"), timeout_s=60)
            await client.ask(to, AskCluster(f"r{number}"), timeout_s=60)  # as if the first answer had been lost
        assert server.carried_out == [f"r{number}" for number in range(20)]

    run_sim(main())


def test_the_deadline_names_the_peer_and_the_question():
    async def main() -> None:
        network = SimNetwork(1)
        server = Server(network.bus("server").open(), answers=False)
        client = network.bus("client").open()
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(UnreachableError, match=r"server at tcp://server:7700 did not answer AskCluster within 3 s"):
            await client.ask(server.bus.me, AskCluster("r"), timeout_s=3)
        assert loop.time() - start == pytest.approx(3, abs=0.01)
        with pytest.raises(UnreachableError, match="did not answer"):
            await client.ask(PeerRef("", 0, ["tcp://nobody:1"]), AskCluster("r"), timeout_s=3)

    run_sim(main())


def test_a_refusal_is_an_error_with_code_and_hint():
    async def main() -> None:
        network = SimNetwork(1)
        server, client = Server(network.bus("server").open()), network.bus("client").open()
        with pytest.raises(RefusedError, match=r"no such network \(dcnr net ls\)") as caught:
            await client.ask(server.bus.me, ListSessions("r"), timeout_s=3)
        assert caught.value.code == "unknown"

    run_sim(main())


def test_a_question_to_whoever_is_at_the_address_survives_a_restart():
    async def main() -> None:
        network = SimNetwork(1)
        first = Server(network.bus("server").open(), answers=False)
        client = network.bus("client").open()
        to = PeerRef("server", 0, first.bus.me.addresses)
        asking = asyncio.create_task(client.ask(to, AskCluster("r"), timeout_s=60))
        await asyncio.sleep(1)
        assert first.carried_out == ["r"]
        network.crash(first.bus)
        second = Server(network.bus("server").open())
        answer, _ = await asking
        assert answer == Ok("r")
        assert second.carried_out == ["r"]
        assert asyncio.get_running_loop().time() < 10

    run_sim(main())


def test_a_question_to_a_boot_fails_as_soon_as_that_boot_is_known_to_be_gone():
    async def main() -> None:
        network = SimNetwork(1)
        first, client = Server(network.bus("server").open()), network.bus("client").open()
        await client.ask(first.bus.me, AskCluster("r0"), timeout_s=5)
        network.crash(first.bus)
        network.bus("server").open()
        with pytest.raises(UnreachableError, match="has restarted"):
            await client.ask(first.bus.me, AskCluster("r1"), timeout_s=60)
        assert asyncio.get_running_loop().time() < 5

    run_sim(main())


def test_the_wrong_process_at_the_address_is_told_at_once():
    async def main() -> None:
        network = SimNetwork(1)
        server, client = Server(network.bus("server").open()), network.bus("client").open()
        with pytest.raises(UnreachableError, match="there answers server instead"):
            await client.ask(PeerRef("orchestrator", 0, server.bus.me.addresses), AskCluster("r"), timeout_s=60)

    run_sim(main())


def test_a_process_may_ask_itself():
    async def main() -> None:
        network = SimNetwork(1)
        server = Server(network.bus("server").open())
        answer, _ = await server.bus.ask(server.bus.me, AskCluster("r"), timeout_s=3)
        assert answer == Ok("r")

    run_sim(main())


def test_many_questions_at_once():
    async def main() -> None:
        network = SimNetwork(3, line=Line(drop=0.1, reorder=0.2))
        server, client = Server(network.bus("server").open()), network.bus("client").open()
        ids = [new_request_id() for _ in range(200)]
        answers = await asyncio.gather(*(client.ask(server.bus.me, AskCluster(i), timeout_s=60) for i in ids))
        assert [answer.request_id for answer, _ in answers] == ids

    run_sim(main())


def test_only_requests_can_be_asked_and_only_once_at_a_time():
    async def main() -> None:
        network = SimNetwork(1)
        server, client = Server(network.bus("server").open(), answers=False), network.bus("client").open()
        with pytest.raises(MisuseError, match="no request id"):
            await client.ask(server.bus.me, Hop("s", 1, 0, 0, 0, 0, 0, 7, "c", 0, []), timeout_s=1)
        asking = asyncio.create_task(client.ask(server.bus.me, AskCluster("r"), timeout_s=1))
        await asyncio.sleep(0.1)
        with pytest.raises(MisuseError, match="being asked already"):
            await client.ask(server.bus.me, AskCluster("r"), timeout_s=1)
        with pytest.raises(UnreachableError):
            await asking

    run_sim(main())


def test_a_late_answer_goes_to_the_handler():
    async def main() -> None:
        network = SimNetwork(1)
        server, client = network.bus("server").open(), network.bus("client").open()
        got: list[object] = []
        client.on_message(lambda sender, message, frames: got.append(message))
        server.on_message(
            lambda sender, message, frames: asyncio.get_running_loop().call_later(
                2, server.send, sender, Ok(message.request_id)
            )
        )
        with pytest.raises(UnreachableError):
            await client.ask(server.me, AskCluster("r"), timeout_s=1)
        await asyncio.sleep(5)
        assert got == [Ok("r")]

    run_sim(main())


def test_the_memory_is_bounded_in_number_and_bytes():
    me = PeerRef("c", 1)
    memory = AnswerMemory(replace(LIMITS, answers=3, answers_bytes=100))
    for number in range(5):
        assert memory.begin(me, AskCluster(f"r{number}")) is Standing.NEW
        memory.finish(me, Ok(f"r{number}"), [b""], 0)
    assert memory.begin(me, AskCluster("r4")) is Standing.ANSWERED
    assert memory.answer(me, AskCluster("r4"))[0] == Ok("r4")
    assert memory.begin(me, AskCluster("r0")) is Standing.NEW
    assert memory.begin(me, AskCluster("r0")) is Standing.RUNNING
    memory.finish(me, Ok("r0"), [b"x" * 90], 90)
    memory.begin(me, AskCluster("r9"))
    memory.finish(me, Ok("r9"), [b"x" * 90], 90)
    assert memory.begin(me, AskCluster("r0")) is Standing.NEW
    assert memory.begin(PeerRef("other", 1), AskCluster("r9")) is Standing.NEW  # ids belong to who asks


def test_one_id_for_several_messages_is_no_repetition():
    """A client frees the cache of a forward request under the request's own id."""
    memory = AnswerMemory()
    me = PeerRef("c", 1)
    create = CreateSession("r", "net", "d", "t", "text", 1, 0)
    assert memory.begin(me, create) is Standing.NEW
    assert memory.begin(me, InferEnd("r", "s")) is Standing.NEW


def test_ids():
    assert is_id("p1")
    assert is_id("a" * 63)
    for bad in ("", "A", "-a", "_a", "a.b", "a/b", "..", "a" * 64, "a\n", "é", "%2e"):
        assert not is_id(bad)
    ids = RequestIds()
    assert len({ids() for _ in range(1000)}) == 1000
    assert new_boot() != new_boot()
    assert 0 < new_boot() < 1 << 63
