"""The driver of one session's placements: finds the checkpoint to start from and where the VNodes go.

A checkpoint from which a PNode could not prepare is read through, part by part; a damaged one is passed over for the
newest older one that is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from networks.codecs import CodedGroup
from orchestrator import events, membership
from orchestrator.cutting import defect
from orchestrator.lifecycle import Stage
from orchestrator.machines import machines_for
from orchestrator.placement import Plan, hand_placed, memory_needs, plan
from orchestrator.repair import place_again
from orchestrator.truth import SupersededError
from orchestrator.waits import said_by
from storage.keys import part_key
from storage.parallel import in_parallel
from storage.retention import newest_complete
from storage.store import CorruptError, NotFoundError, StoreUnavailableError
from storage.transfer import check_verified
from wire.errors import DCNRError
from wire.messages import CodedEdges, Deployment, Message, Part, PeerRef, Prepare
from wire.refusals import STALE_EPOCH, STALE_TERM, STORE_AWAY, SUPERSEDED, UNHEALTHY

if TYPE_CHECKING:
    from networks.graph import NodeId
    from orchestrator.catalog import Listed
    from orchestrator.driver import SessionDriver
    from storage.checkpoints import Manifest, Resume
    from storage.store import Store

SURVEY_RETRY_S = 2.0
TRIES = 5
READERS = 4
MAX_RELAYS = 4
SOUND = frozenset({STORE_AWAY, UNHEALTHY, SUPERSEDED, STALE_TERM, STALE_EPOCH})
"""Codes of refusals to prepare that say nothing about the checkpoint."""


class Placing:
    """Placements and take-overs of a session; see the module's docstring."""

    def __init__(self, driver: SessionDriver) -> None:
        self._driver = driver
        self.listed: Listed | None = None
        self.memory_bytes: dict[str, int] = {}
        """What the present deployment needs, by PNode."""
        self._resume: Resume | None = None
        self._doubtful = False
        self._avoid: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def begin(self, command: events.Place) -> None:
        """Find a placement; one that is being looked for is of no use any more."""
        if self._task is not None:
            self._task.cancel()
        driver = self._driver
        self._task = driver.service.spawn(self._place(command), f"placement of {driver.session.id}")

    def refused(self, code: str) -> None:
        """A PNode could not prepare; the checkpoint may be the reason."""
        self._doubtful = self._doubtful or code not in SOUND

    # ------------------------------------------------------------ a placement

    async def _place(self, command: events.Place) -> None:
        driver = self._driver
        try:
            if command.yielding:
                await self._verdicts(command)
            for _ in range(TRIES):
                if await self._placed(command):
                    return
            failed = events.NotPlaced("PNodes come and go while VNodes are being placed", "try again")
        except asyncio.CancelledError:
            raise
        except SupersededError as error:
            driver.service.superseded(error)
            return
        except StoreUnavailableError as error:
            failed = events.NotPlaced(said_by("the orchestrator", error.message), error.hint, who="store")
        except DCNRError as error:
            failed = events.NotPlaced(error.message, error.hint, final=self.listed is None)
        except Exception as error:
            driver.feed(events.NotPlaced(*defect(error), final=True))
            raise
        driver.feed(failed)

    async def _verdicts(self, command: events.Place) -> None:
        """Wait until it is known which of the former members are dead."""
        service = self._driver.service

        def in_doubt(pnode: str, incarnation: int) -> bool:
            member = service.membership.find(pnode)
            return (
                member is not None
                and member.incarnation == incarnation
                and member.state is membership.State.SUSPECT
            )  # fmt: skip

        with suppress(TimeoutError):
            async with asyncio.timeout(service.membership.lease_s):
                while any(in_doubt(pnode, incarnation) for pnode, incarnation in command.incarnations.items()):
                    await service.members.changed.wait()

    async def _placed(self, command: events.Place) -> bool:
        """Place; False if somebody left meanwhile. Raises `DCNRError`."""
        driver, service = self._driver, self._driver.service
        session, record = driver.session, driver.session.record
        listed = self.listed = await self._list()
        work = listed.work
        if command.yielding and record.codecs is not None:
            work = replace(work, coded=groups_of(record.codecs))
        machines, cores = machines_for(service, but=session.id)
        problems: list[str] = []
        if command.yielding:
            keep = {
                vnode: pnode
                for vnode, pnode in command.keep.items()
                if (member := service.membership.find(pnode)) is not None
                and member.incarnation == command.incarnations.get(pnode)
            }
            result, problems = await asyncio.to_thread(
                place_again,
                work,
                machines,
                pnodes=command.pnodes,
                wanted=command.placement,
                keep=keep,
                cores=cores,
            )
        elif command.placement:
            result = await asyncio.to_thread(hand_placed, work, machines, command.placement, cores=cores)
        else:
            result = await asyncio.to_thread(plan, work, machines, pnodes=command.pnodes, cores=cores)
        async with driver.cutting.committer.lock:
            resume = await self._checkpoint()
            if session.stage is not Stage.PLACING:
                return True
            usable = {member.id: member.incarnation for member in service.membership.usable()}
            placement = {str(node): pnode for node, pnode in result.placement.items()}
            if not usable.keys() >= set(placement.values()):
                return False
            step = resume.manifest.step if resume.manifest is not None else 0
            problems += resume.problems
            if step < record.committed:
                problems.append(f"step {record.committed} was committed, but the newest complete checkpoint is {step}")
            self._resume = resume
            self.memory_bytes = dict(result.forecast.memory_bytes)
            loss = placement[str(listed.graph.loss)] if listed.graph.loss is not None else ""
            driver.feed(_event(result, placement, usable, loss, resume, problems))
        return True

    def raised(self, epoch: int) -> None:
        """The placement that was found is the session's, under this epoch."""
        driver, record = self._driver, self._driver.session.record
        assert self.listed is not None
        driver.cutting.begin(epoch, record.placement, self.listed)
        driver.service.registry.put_placement(record.session, epoch, record.placement)

    async def _list(self) -> Listed:
        self.listed = None
        record = self._driver.session.record
        listed = await self._driver.service.catalog.get(record.network_digest)
        if record.data_digest and listed.graph.loss is None:
            raise DCNRError(f"{record.network} has no loss, so it can't be trained", hint="dcnr net show")
        return listed

    # ------------------------------------------------------------ checkpoints

    async def _checkpoint(self) -> Resume:
        """The newest checkpoint that is whole; call with the committer's lock held. Raises `StoreError`."""
        driver, service = self._driver, self._driver.service
        committer = driver.cutting.committer
        await committer.settle(service.truth.still_mine)
        while True:
            resume = await newest_complete(service.store, committer.prefix, avoid=self._avoid)
            damage: list[str] = []
            if self._doubtful and resume.manifest is not None:
                damage = await damaged_parts(service.store, committer.prefix, resume.manifest)
            if not damage:
                break
            assert resume.manifest is not None
            self._avoid.add(resume.manifest_key)
            for text in damage:
                service.logger.warning("checkpoint damaged", session=driver.session.id, step=resume.manifest.step,
                                       key=resume.manifest_key, damage=text)  # fmt: skip
                driver.note("warning", f"the checkpoint of step {resume.manifest.step} is damaged: {text}")
        self._doubtful = False
        committer.go_on_from(resume)
        return resume

    def prepare(self) -> tuple[Message, list[bytes]]:
        """The message and body that deploy this epoch on any of its PNodes."""
        driver, service = self._driver, self._driver.service
        record, deployment, resume = driver.session.record, driver.session.deployment, self._resume
        assert deployment is not None
        assert resume is not None
        head = resume if resume.manifest is not None else None
        body = Deployment(
            session=record.session,
            network=record.network,
            network_digest=record.network_digest,
            placement=deployment.placement,
            peers=driver.peers,
            incarnations=deployment.incarnations,
            orchestrator=service.bus.me,
            data_digest=record.data_digest,
            tokenizer_digest=record.tokenizer_digest,
            steps=record.steps,
            seed=record.seed,
            start_step=deployment.start_step,
            manifest_digest=head.manifest_digest if head is not None else "",
            manifest_key=head.manifest_key if head is not None else "",
            store_prefix=driver.cutting.committer.prefix,
            checkpoint_every=record.checkpoint_every,
            trace=record.trace,
            codecs=record.codecs or [],
            relays=self._relays(),
        )
        message = Prepare(service.new_id(), record.session, deployment.epoch, 0, service.term)
        return message, [msgspec.msgpack.encode(body)]

    def _relays(self) -> list[PeerRef]:
        """Who can join members that can only dial, if there are two of these."""
        hidden = [peer for peer in self._driver.peers.values() if not peer.addresses]
        if len(hidden) < 2:
            return []
        living = self._driver.service.membership.living()
        return [member.peer for member in living if member.peer.addresses and member.peer.key][:MAX_RELAYS]

    # ------------------------------------------------------------ taking over

    def survey(self) -> None:
        """Find out what is committed, and make ready to commit what the deployment that is taken over has saved."""
        driver = self._driver
        driver.service.spawn(self._survey(), f"take-over of {driver.session.id}")

    async def _survey(self) -> None:
        driver, record = self._driver, self._driver.session.record
        while driver.session.adoption is not None:
            try:
                listed = self.listed = await self._list()
                async with driver.cutting.committer.lock:
                    resume = await self._checkpoint()
            except StoreUnavailableError as error:
                driver.service.logger.warning("can't take over yet", session=driver.session.id, error=str(error))
                driver.feed(events.Troubled("adopt", said_by("the orchestrator", error.message)))
                await asyncio.sleep(SURVEY_RETRY_S)
                continue
            except SupersededError as error:
                driver.service.superseded(error)
                return
            except DCNRError as error:
                driver.feed(events.Surveyed(record.committed, record.final_hash, error.message))
                return
            if record.placement:
                here: dict[NodeId, str] = {node: record.placement[node] for node in listed.work.nodes}
                in_flight = min(listed.work.microbatches, len(record.incarnations) + 1)
                self.memory_bytes = memory_needs(listed.work, here, in_flight)
                driver.cutting.begin(record.epoch, record.placement, listed)
            newest = resume.manifest
            driver.feed(events.Surveyed(newest.step if newest else 0, newest.hash if newest else ""))
            return


def _event(
    result: Plan, placement: dict[str, str], usable: dict[str, int], loss: str, resume: Resume, problems: list[str]
) -> events.Placed:
    return events.Placed(
        placement,
        {pnode: usable[pnode] for pnode in dict.fromkeys(placement.values())},
        loss,
        resume.manifest.step if resume.manifest is not None else 0,
        result.reasons,
        tuple(problems),
        result.forecast.step_s,
        resume.manifest.hash if resume.manifest is not None else "",
        tuple(CodedEdges(group.codec, list(group.edges)) for group in result.forecast.coded),
    )


def groups_of(codecs: Sequence[CodedEdges]) -> tuple[CodedGroup, ...]:
    """A record's coded edges as the planner has them."""
    return tuple(CodedGroup(coded.codec, tuple(coded.edges)) for coded in codecs)


async def damaged_parts(store: Store, prefix: str, manifest: Manifest) -> list[str]:
    """Read all parts of a checkpoint; a sentence, with its key, for each that is damaged or gone."""

    async def look(part: Part) -> str:
        try:
            await check_verified(store, part_key(prefix, part.digest), part.digest)
        except (CorruptError, NotFoundError) as error:
            return f"VNode {part.vnode}: {error.message}"
        return ""

    return [text for text in await in_parallel(look, manifest.parts, READERS) if text]
