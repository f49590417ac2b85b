"""What clients are shown of PNodes, networks, sessions and plans."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from orchestrator import membership
from orchestrator.life import codecs_text
from orchestrator.lifecycle import ACTIVE
from orchestrator.placement import Plan
from orchestrator.waits import said_by, sentence
from wire import messages

if TYPE_CHECKING:
    from orchestrator.driver import SessionDriver
    from orchestrator.records import NetworkRecord
    from orchestrator.service import Service

STALLED_S = 2.0
"""A PNode's own wait is shown once it takes so long."""


def pnodes(service: Service) -> list[messages.PNodeInfo]:
    """All PNodes, lost ones too, by id."""
    now = service.now()
    vnodes: dict[str, int] = {}
    sessions: dict[str, list[str]] = {}
    for name, driver in sorted(service.sessions.items()):
        deployment = driver.session.deployment
        if deployment is None:
            continue
        for pnode in deployment.placement.values():
            vnodes[pnode] = vnodes.get(pnode, 0) + 1
        for pnode in deployment.pnodes:
            sessions.setdefault(pnode, []).append(name)
    return [
        messages.PNodeInfo(
            pnode=name,
            state=member.state.value,
            incarnation=member.incarnation,
            peer=member.peer,
            profile=member.profile,
            seen_s=now - member.seen,
            sessions=sessions.get(name, []),
            vnodes=vnodes.get(name, 0),
            rss_bytes=member.rss_bytes,
            loop_lag_s=member.loop_lag_s,
            compute=member.compute,
            health=member.health,
        )
        for name, member in sorted(service.membership.members.items())
    ]


def network(service: Service, record: NetworkRecord) -> messages.NetworkInfo:
    """A network with its sessions."""
    mine = [name for name, driver in service.sessions.items() if driver.session.record.network == record.network]
    return messages.NetworkInfo(
        record.network, record.digest, record.vnodes, record.parameters, sorted(mine), record.created
    )


def session(service: Service, driver: SessionDriver) -> messages.SessionInfo:
    """A session as it is now."""
    core, record = driver.session, driver.session.record
    return messages.SessionInfo(
        session=record.session,
        network=record.network,
        state=record.state,
        epoch=record.epoch,
        step=record.step,
        steps=record.steps,
        until=record.until,
        loss=record.loss,
        tokens_s=core.pace.tokens_s if core.state in ACTIVE else 0.0,
        committed=record.committed,
        pnodes=core.pnodes,
        created=record.created,
        error=record.error or core.cause,
        hint=record.hint,
        waiting=waiting(service, driver),
        deployed=core.deployed,
        bit_exact=record.bit_exact,
        final_hash=record.final_hash,
        eta_s=core.eta_s(),
        data=record.data,
        tokenizer_digest=record.tokenizer_digest,
        data_digest=record.data_digest,
        recoveries=record.recoveries,
        codecs=codecs_text(record.codecs or []),
    )


def waiting(service: Service, driver: SessionDriver) -> list[str]:
    """Who is awaited, for what and since when: by the orchestrator, then by the PNodes themselves."""
    now = service.now()
    found = [line for line in driver.session.waiting(now) if not line.startswith("the pipeline: ")]
    for key in driver.session.waits.of("parts"):
        step = int(key.partition(" ")[2])
        if names := driver.cutting.awaited(step):
            wait = driver.session.waits[key]
            what = f"{', '.join(names)}: parts of step {step}"
            found.append(sentence(what, now - wait.since, wait.deadline - wait.since))
    if driver.session.state not in ACTIVE:
        return found
    for member, beat in membership.beats_of(service.membership.members.values(), driver.session.id):
        if beat.epoch != driver.session.record.epoch or beat.state == "failed":
            continue  # why it failed is no wait
        if beat.waiting_for and beat.waiting_s >= STALLED_S:
            what = f"{member.id} waits for {said_by(member.id, beat.waiting_for)}"
            found.append(sentence(what, beat.waiting_s, beat.limit_s))
    limit_s = service.membership.lease_s + 2 * service.membership.probe_s
    for pnode in driver.session.pnodes:
        known = service.membership.find(pnode)
        if known is not None and known.state is membership.State.SUSPECT:
            found.append(sentence(f"{pnode}: a sign of life", now - max(known.seen, known.flowed), limit_s))
    return found


def deployment(service: Service, driver: SessionDriver) -> messages.DeploymentInfo:
    """Where a deployed session's VNodes are."""
    record, here = driver.session.record, driver.session.deployment
    assert here is not None
    return messages.DeploymentInfo(
        session=record.session,
        network=record.network,
        network_digest=record.network_digest,
        epoch=here.epoch,
        placement=here.placement,
        peers=driver.peers,
        tokenizer_digest=record.tokenizer_digest,
        data_digest=record.data_digest,
        step=record.step,
        store=service.store_url,
        codecs=record.codecs or [],
    )


def plan(found: Plan) -> messages.PlanInfo:
    """A plan for `dcnr plan`."""
    forecast = found.forecast
    return messages.PlanInfo(
        placement={str(node): pnode for node, pnode in found.placement.items()},
        step_s=forecast.step_s if math.isfinite(forecast.step_s) else 0.0,
        compute_s=forecast.compute_s,
        wire_bytes={f"{source} -> {target}": size for (source, target), size in sorted(forecast.wire_bytes.items())},
        memory_bytes=forecast.memory_bytes,
        reasons=list(found.reasons),
    )
