"""What there is to place on: PNodes as placement sees them."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from orchestrator.lifecycle import ACTIVE, Stage
from orchestrator.work import Machine

if TYPE_CHECKING:
    from orchestrator.service import Service


def machines_for(service: Service, but: str = "") -> tuple[list[Machine], dict[str, int]]:
    """PNodes that may be used, less the memory and speed that other sessions than `but` use; and cores by host."""
    held: dict[str, int] = {}
    busy: dict[str, int] = {}
    for name, driver in service.sessions.items():
        if name == but or driver.session.stage is Stage.DOWN:
            continue
        for pnode in driver.session.pnodes:
            held[pnode] = held.get(pnode, 0) + driver.placing.memory_bytes.get(pnode, 0)
            busy[pnode] = busy.get(pnode, 0) + (driver.session.state in ACTIVE)
    found = []
    threads: dict[str, int] = {}
    for member in service.membership.usable():
        profile = member.profile
        threads[profile.host] = max(threads.get(profile.host, 1), profile.threads)
        found.append(
            Machine(
                member.id,
                max(profile.flops, 1e6) / (1 + busy.get(member.id, 0)),
                max(0, profile.memory_bytes - held.get(member.id, 0)),
                max(profile.link_bytes_s, 1.0),
                max(profile.link_latency_s, 0.0),
                profile.host,
            )
        )
    here = socket.gethostname()
    cores = {here: max(1, (os.cpu_count() or 1) // threads[here])} if here in threads else {}
    return found, cores
