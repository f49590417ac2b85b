"""A PNode's membership on the simulated network, in virtual time: orchestrators come, go, and are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from pnode.hub import Bounds, Hub
from pnode.membership import Membership
from pnode.remembered import Remembered, memory_file, remember
from storage.open import open_store
from storage.sealed import seal
from storage.terms import TERM_KEY, TermRecord
from wire.admission import Admission
from wire.keys import KeyPair
from wire.messages import Goodbye, Heartbeat, HeartbeatAck, Message, PeerRef, Profile, Refused, Register, Registered
from wire.requests import RefusedError
from wire.roles import ORCHESTRATOR
from wire.sim import SimBus, SimNetwork, run_sim

PROFILE = Profile("host", "cpu", 1, 1e9, 1 << 30, 1e9, 1e-4, "2.0", "cpu", "1")


class Orchestrator:
    """Admits whoever asks; `deaf`: hears nothing."""

    def __init__(
        self, net: SimNetwork, name: str, term: int, *, cluster: str = "c", refuse: str = "", store: str = ""
    ) -> None:
        self.term, self.cluster, self.refuse, self.deaf = term, cluster, refuse, False
        self.store = store
        self.left: list[Goodbye] = []
        self.registers: list[tuple[float, Register]] = []
        self.beats: list[Heartbeat] = []
        self.known = True
        self.bus: SimBus = net.bus(name)
        self.bus.on_message(self._on_message)
        self.bus.on_loss(lambda peer, reason: None)
        self.bus.open()

    @property
    def address(self) -> str:
        return self.bus.me.addresses[0]

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        if self.deaf:
            return
        if isinstance(message, Register):
            self.registers.append((asyncio.get_running_loop().time(), message))
            if self.refuse:
                self.bus.send(sender, Refused(message.request_id, self.refuse, "no"))
                return
            number = max(1, message.held)
            self.bus.send(
                sender, Registered(message.request_id, number, self.term, 10.0, 2.0, self.store, self.cluster)
            )
        elif isinstance(message, Goodbye):
            self.left.append(message)
        elif isinstance(message, Heartbeat):
            self.beats.append(message)
            self.bus.send(sender, HeartbeatAck(message.incarnation, self.term, self.known))


class PNode:
    """A membership with nothing behind it."""

    def __init__(self, net: SimNetwork, home: Path, address: str, store: str = "") -> None:
        self.admissions: list[bool] = []
        self.bus = net.bus("p1")
        clock = asyncio.get_running_loop().time
        self.log = LogCapture()
        log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[self.log])
        self.hub = Hub(
            "p1", self.bus, PeerRef("", 0, [address]), home, Bounds(), asyncio.ensure_future, log, clock=clock
        )
        self.membership = Membership(self.hub, self, store, open_store, log)
        self.bus.on_message(self._on_message)
        self.bus.on_loss(self.membership.lost)  # type: ignore[arg-type]
        self.bus.open()

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, HeartbeatAck):
            self.membership.acknowledged(sender, message)

    def beat(self, incarnation: int, term: int) -> Heartbeat:
        return Heartbeat("p1", incarnation, term, [], 0, 0.0, "idle", 0.0)

    def admitted(self, *, moved: bool) -> None:
        self.admissions.append(moved)

    def warnings(self, word: str) -> list[str]:
        told = [f"{entry}" for entry in self.log.entries if entry["log_level"] == "warning"]
        return [text for text in told if word in text]


def simulate(home: Path, script: Callable[[SimNetwork, Callable[..., PNode]], Coroutine[Any, Any, None]]) -> None:
    """Run `script` with a PNode's tasks beside it; they end with it."""

    async def main() -> None:
        net = SimNetwork(1)
        tasks: list[asyncio.Task[None]] = []
        lives: list[PNode] = []

        def pnode(address: str, store: str = "") -> PNode:
            """A process of p1; one that was there before is killed."""
            while tasks:
                tasks.pop().cancel()
            if lives:
                net.crash(lives[-1].bus)
            found = PNode(net, home, address, store)
            lives.append(found)
            tasks.append(asyncio.ensure_future(found.membership.register(PROFILE)))
            tasks.append(asyncio.ensure_future(found.membership.report()))
            return found

        try:
            await script(net, pnode)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run_sim(main())


async def put_term(home: Path, term: int, *addresses: str, cluster: str = "c") -> str:
    url = str(home / "store")
    await open_store(url).put(TERM_KEY, seal(TermRecord(cluster, term, list(addresses))))
    return url


def test_it_registers_reports_and_keeps_its_incarnation(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        orchestrator = Orchestrator(net, "o", 3)
        one = pnode(orchestrator.address)
        await asyncio.sleep(7.0)
        assert [message.held for _, message in orchestrator.registers] == [0]
        assert [(beat.incarnation, beat.term) for beat in orchestrator.beats] == [(1, 3)] * 4
        orchestrator.known = False
        await asyncio.sleep(3.0)
        orchestrator.known = True
        assert {message.held for _, message in orchestrator.registers[1:]} == {1}
        assert one.admissions[:2] == [False, False]

    simulate(tmp_path, script)


def test_it_asks_ever_more_rarely_and_never_in_step_with_others(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        pnode("tcp://o:7700")
        times = []
        for _ in range(2):
            await asyncio.sleep(120.0)
            orchestrator = Orchestrator(net, "o", 3, refuse="bug")
            await asyncio.sleep(200.0)
            times.append([when for when, _ in orchestrator.registers])
            net.crash(orchestrator.bus)
        pauses = [later - earlier for earlier, later in zip(times[0], times[0][1:], strict=False)]
        assert pauses
        assert all(5.0 <= pause <= 10.1 for pause in pauses), pauses
        assert len({round(pause, 3) for pause in pauses}) == len(pauses)

    simulate(tmp_path, script)


@pytest.mark.parametrize("code", ["held", "identity", "full"])
def test_a_refusal_for_good_ends_it(tmp_path: Path, code: str) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        orchestrator = Orchestrator(net, "o", 3, refuse=code)
        pnode(orchestrator.address)
        await asyncio.sleep(5.0)

    with pytest.raises(RefusedError, match="no"):
        simulate(tmp_path, script)


def test_an_orchestrator_that_was_replaced_is_not_believed(tmp_path: Path) -> None:
    """The old one still answers at the address that was given by hand; the new one is found in the store."""

    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        old = Orchestrator(net, "o", 3)
        url = await put_term(tmp_path, 3, old.address)
        one = pnode(old.address, url)
        await asyncio.sleep(5.0)
        new = Orchestrator(net, "q", 4)
        old.deaf = True
        await put_term(tmp_path, 4, new.address)
        await asyncio.sleep(60.0)
        assert one.membership.standing.term == 4
        assert [message.held for _, message in new.registers] == [1]
        old.deaf = False
        heard = len(old.beats)
        new.deaf = True
        await asyncio.sleep(60.0)
        assert old.registers[1:], "it was asked again"
        assert one.membership.standing.term == 4
        assert len(old.beats) == heard, "but not taken"
        new.deaf = False
        await asyncio.sleep(60.0)
        assert len(new.registers) >= 2
        assert one.hub.orchestrator.addresses == [new.address]

    simulate(tmp_path, script)


def test_a_record_of_another_cluster_or_an_equal_term_is_not_followed(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        old = Orchestrator(net, "o", 3)
        url = await put_term(tmp_path, 9, "tcp://q:7700", cluster="another")
        other = Orchestrator(net, "q", 9, cluster="another")
        one = pnode(old.address, url)
        await asyncio.sleep(0.2)
        assert one.membership.standing.term == 3
        old.deaf = True
        await asyncio.sleep(60.0)
        await put_term(tmp_path, 3, "tcp://q:7700")
        await asyncio.sleep(60.0)
        assert not other.registers

    simulate(tmp_path, script)


def test_without_a_readable_store_it_goes_on_asking(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        url = str(tmp_path / "store")
        await open_store(url).put(TERM_KEY, b"not a record")
        old = Orchestrator(net, "o", 3)
        one = pnode(old.address, url)
        await asyncio.sleep(5.0)
        net.crash(old.bus)
        await asyncio.sleep(60.0)
        again = Orchestrator(net, "o", 4)
        await asyncio.sleep(30.0)
        assert one.membership.standing.term == 4
        assert again.beats

    simulate(tmp_path, script)


def test_another_cluster_at_the_address_is_told_to_the_rest(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        old = Orchestrator(net, "o", 7)
        one = pnode(old.address)
        await asyncio.sleep(5.0)
        net.crash(old.bus)
        Orchestrator(net, "o", 1, cluster="d")
        await asyncio.sleep(60.0)
        assert one.admissions == [False, True]
        assert one.membership.standing.term == 1

    simulate(tmp_path, script)


# ------------------------------------------------------------------------------------ from one life to the next


def test_after_a_restart_an_orchestrator_that_moved_is_found_in_the_store(tmp_path: Path) -> None:
    """It's told the old address again, and no store."""

    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        url = await put_term(tmp_path, 3, "tcp://o:7700")
        old = Orchestrator(net, "o", 3, store=url)
        pnode(old.address)
        await asyncio.sleep(1.0)
        net.crash(old.bus)
        new = Orchestrator(net, "q", 4, store=url)
        await put_term(tmp_path, 4, new.address)
        again = pnode(old.address)
        await asyncio.sleep(10.0)
        assert [message.held for _, message in new.registers] == [0], "a new process has no incarnation"
        assert again.hub.orchestrator.addresses == [new.address]
        assert (again.membership.standing.cluster, again.membership.standing.term) == ("c", 4)
        assert new.beats

    simulate(tmp_path, script)


def test_after_a_restart_it_is_found_where_it_was_last_though_the_store_is_away(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        url = await put_term(tmp_path, 4, "tcp://q:7700")
        new = Orchestrator(net, "q", 4, store=url)
        pnode("tcp://o:7700", url)
        await asyncio.sleep(30.0)
        assert len(new.registers) == 1
        (tmp_path / "store").rename(tmp_path / "away")
        pnode("tcp://o:7700")
        await asyncio.sleep(12.0)
        assert len(new.registers) == 2

    simulate(tmp_path, script)


def test_with_keys_the_one_that_is_remembered_is_known_by_its_key_and_without_a_key_it_does_not_count(
    tmp_path: Path,
) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        key, there = KeyPair.new().public, ["tcp://q:7700"]
        for known, found in ((key, [PeerRef("", 0, there, key)]), ("", [])):
            remember(memory_file(tmp_path, "p1"), Remembered("tcp://o:7700", "c", 4, there, key=known))
            again = pnode("tcp://o:7700")
            again.hub.admission = Admission()
            await asyncio.sleep(1.0)
            assert [peer for peer in again.membership._candidates if peer.addresses == there] == found
            entry = again.hub.admission.find(key, 0.0)
            assert (entry is not None and entry.role == ORCHESTRATOR) == bool(found)

    simulate(tmp_path, script)


def test_after_a_restart_an_orchestrator_that_was_replaced_is_not_believed(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        url = await put_term(tmp_path, 4, "tcp://q:7700")
        old, new = Orchestrator(net, "o", 3, store=url), Orchestrator(net, "q", 4, store=url)
        old.deaf = True
        pnode(old.address, url)
        await asyncio.sleep(30.0)
        old.deaf = False
        again = pnode(old.address)
        await asyncio.sleep(30.0)
        assert old.registers
        assert not old.beats
        assert len(new.registers) == 2
        assert new.beats[-1].term == 4
        assert again.warnings("which is over")

    simulate(tmp_path, script)


@pytest.mark.parametrize("damage", ["cut", "flipped", "nonsense", "a folder"])
def test_a_damaged_memory_is_as_none_and_said_once(tmp_path: Path, damage: str) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        old = Orchestrator(net, "o", 3, store=await put_term(tmp_path, 3, "tcp://o:7700"))
        pnode(old.address)
        await asyncio.sleep(1.0)
        file = memory_file(tmp_path, "p1")
        data = file.read_bytes()
        file.unlink()
        if damage == "a folder":
            file.mkdir()
        else:
            place = len(data) // 2
            file.write_bytes({
                "cut": data[:place], "nonsense": b"nonsense",
                "flipped": data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :],
            }[damage])  # fmt: skip
        net.crash(old.bus)
        again = pnode(old.address)
        await asyncio.sleep(60.0)
        assert again.hub.store is None
        assert len(again.warnings("was remembered does not count")) == 1
        later = Orchestrator(net, "o", 4)
        await asyncio.sleep(30.0)
        assert later.beats, "it is as a new one"

    simulate(tmp_path, script)


def test_a_memory_that_can_not_be_written_is_said_and_does_no_harm(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        memory_file(tmp_path, "p1").mkdir()
        old = Orchestrator(net, "o", 3)
        one = pnode(old.address)
        await asyncio.sleep(10.0)
        assert old.beats
        assert one.warnings("can't be remembered")

    simulate(tmp_path, script)


def test_who_gives_another_orchestrator_means_another_cluster(tmp_path: Path) -> None:
    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        url = await put_term(tmp_path, 3, "tcp://o:7700")
        old = Orchestrator(net, "o", 3, store=url)
        pnode(old.address)
        await asyncio.sleep(1.0)
        other = Orchestrator(net, "q", 1, cluster="d")
        other.deaf = True
        again = pnode(other.address)
        await asyncio.sleep(60.0)
        assert len(old.registers) == 1, "it waits for the one that it was told of"
        other.deaf = False
        await asyncio.sleep(20.0)
        assert again.membership.standing.cluster == "d"
        pnode(other.address)
        await asyncio.sleep(1.0)
        assert len(other.registers) >= 2

    simulate(tmp_path, script)


def test_only_at_the_address_of_the_option_it_comes_into_another_cluster(tmp_path: Path) -> None:
    """Where the orchestrator was last, another cluster's listens now: a port is used again by anybody."""

    async def script(net: SimNetwork, pnode: Callable[..., PNode]) -> None:
        url = await put_term(tmp_path, 4, "tcp://q:7700")
        new = Orchestrator(net, "q", 4, store=url)
        pnode("tcp://o:7700", url)
        await asyncio.sleep(30.0)
        net.crash(new.bus)
        stranger = Orchestrator(net, "q", 9, cluster="d")
        again = pnode("tcp://o:7700")
        await asyncio.sleep(60.0)
        assert stranger.registers
        assert len(stranger.left) == len(stranger.registers), "it takes its leave each time"
        assert not stranger.beats
        assert not again.membership.registered.is_set()
        meant = Orchestrator(net, "o", 1, cluster="e")
        await asyncio.sleep(30.0)
        assert meant.beats
        assert again.admissions == [True]

    simulate(tmp_path, script)
