"""How commands of the membership are carried out."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

from orchestrator import membership
from orchestrator.members import Members
from wire.errors import UnreachableError
from wire.messages import PeerRef
from wire.simloop import run_sim

PEER = PeerRef("p1", 7, ["tcp://p1:1"])


def test_a_probe_whose_answer_is_known_at_once_to_be_none_is_no_endless_loop() -> None:
    """A process that was replaced can't answer; while nothing else tells of it, it is probed once in each limit."""
    probed: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def ask(*_: object, **__: object) -> object:
            probed.append(loop.time())
            raise UnreachableError("another boot has taken its address")

        def silent(pnode: str, *_: object) -> list[membership.Command]:
            return [membership.Probe(pnode, PEER, 1.0)]

        numbers = itertools.count()
        tasks: set[asyncio.Task[None]] = set()
        service = SimpleNamespace(
            bus=SimpleNamespace(ask=ask), membership=SimpleNamespace(silent=silent), now=loop.time, wall=loop.time,
            new_id=lambda: str(next(numbers)), spawn=lambda work, name: tasks.add(asyncio.ensure_future(work)),
        )  # fmt: skip
        Members(cast("Any", service)).carry([membership.Probe("p1", PEER, 1.0)])
        await asyncio.sleep(4.5)
        for task in tasks:
            task.cancel()

    run_sim(main())
    assert len(probed) == 5
