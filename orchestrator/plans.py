"""What clients ask about placements: plan a network, and see what a deployed session would gain elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator import events, views
from orchestrator.lifecycle import ActionRefusedError
from orchestrator.machines import machines_for
from orchestrator.placement import plan
from orchestrator.placing import groups_of
from orchestrator.rebalance import compare
from wire import messages

if TYPE_CHECKING:
    from orchestrator.driver import SessionDriver
    from orchestrator.records import NetworkRecord
    from orchestrator.service import Service


async def plan_network(service: Service, record: NetworkRecord, pnodes: int) -> messages.PlanInfo:
    """Where a network would go. Raises `DCNRError`."""
    listed = await service.catalog.get(record.digest)
    machines, cores = machines_for(service)
    return views.plan(await asyncio.to_thread(plan, listed.work, machines, pnodes=max(0, pnodes), cores=cores))


async def rebalance(service: Service, driver: SessionDriver, *, apply: bool) -> messages.RebalanceInfo:
    """Compare a session's placement with the best one, and with `apply` have it move there, if that is any better.

    Raises `DCNRError`.
    """
    session, here = driver.session, driver.session.deployment
    if not session.deployed or here is None:
        raise ActionRefusedError(f"{session.id} is not deployed", hint=f"dcnr resume {session.id}")
    listed = await service.catalog.get(session.record.network_digest)
    machines, cores = machines_for(service, but=session.id)
    coded = groups_of(session.record.codecs or [])
    found = await asyncio.to_thread(compare, listed.work, machines, here.placement, cores=cores, coded=coded)
    moves = apply and bool(found.moved)
    if moves:
        if session.deployment is not here:
            raise ActionRefusedError(f"{session.id} was placed anew meanwhile", hint="ask again")
        best = {str(node): pnode for node, pnode in found.best.placement.items()}
        await driver.act(events.Move(best))
    return messages.RebalanceInfo(
        session=session.id,
        present=views.plan(found.present),
        best=views.plan(found.best),
        gain=found.gain,
        moved=found.moved,
        moved_bytes=found.moved_bytes,
        applied=moves,
    )
