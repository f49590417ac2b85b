"""The sessions of this PNode: prepared, run, and released as the orchestrator says, each in the epoch that it says.

A session has one seat here, whatever becomes of its epochs. A `Prepare` ends what ran in an older epoch at once, and
builds the new session from the cuts that the seat keeps in memory and from the store. Is it refused, or another
`Prepare` takes its place, the memory stays for the next one; `Release` gives the seat up. A message of an epoch that is
over is refused: the newest epochs of given-up seats are remembered, too (the last `REMEMBERED` of them).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pnode.causes import said
from pnode.computing import Computing
from pnode.core import State
from pnode.deploy import deploy, explain
from pnode.fetch import Fetch
from pnode.hub import Hub
from pnode.memory import CutMemory
from pnode.session import Session
from storage.store import StoreUnavailableError
from wire.codec import MessageError, read_body
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.messages import (
    Deployment,
    HoldRun,
    InspectRun,
    Ok,
    PeerRef,
    Prepare,
    Refused,
    Release,
    SessionBeat,
    StartRun,
)
from wire.refusals import STALE_EPOCH, SUPERSEDED

REMEMBERED = 1000
FETCH_AWAY_S = 20.0
"""A store that is away for so long while a session is prepared: the orchestrator is told, and tries again."""
MEET_S = 15.0
"""A peer that does not answer for so long while a session is prepared: likewise."""


@dataclass(slots=True)
class _Seat:
    """One session on this PNode. `epoch`: the newest that was asked for; `problem`: why it could not be prepared."""

    name: str
    epoch: int = 0
    session: Session | None = None
    building: asyncio.Task[None] | None = None
    fetch: Fetch | None = None
    askers: list[tuple[PeerRef, str]] = field(default_factory=list)
    memory: CutMemory = field(default_factory=CutMemory)
    start_step: int = 0
    problem: str = ""
    since: float = 0.0


class Deployments:
    """See the module. Called in the event loop's thread."""

    def __init__(self, hub: Hub, computing: Computing) -> None:
        self._hub = hub
        self._computing = computing
        self._seats: dict[str, _Seat] = {}
        self._over: OrderedDict[str, int] = OrderedDict()

    # ------------------------------------------------------------------------------------ questions

    @property
    def sessions(self) -> dict[str, Session]:
        """The sessions that are prepared or more, by name."""
        return {name: seat.session for name, seat in self._seats.items() if seat.session is not None}

    def find(self, name: str) -> Session | None:
        """The session of that name, if it is prepared."""
        seat = self._seats.get(name)
        return seat.session if seat is not None else None

    def beats(self, now: float) -> list[SessionBeat]:
        """What the heartbeat says about every seat."""
        return [
            seat.session.beat(now) if seat.session is not None else _unprepared(seat, self._hub.name, now)
            for seat in self._seats.values()
        ]

    # ------------------------------------------------------------------------------------ preparing

    def prepare(self, sender: PeerRef, message: Prepare, frames: Sequence[memoryview]) -> None:
        """Build a session, or say that it is built."""
        seat = self._seats.get(message.session)
        newest = seat.epoch if seat is not None else self._over.get(message.session, 0)
        if message.epoch < newest or (seat is None and message.epoch == newest):
            text = f"epoch {message.epoch} of {message.session} is over, epoch {newest} is known here"
            self._hub.bus.send(sender, Refused(message.request_id, STALE_EPOCH, text))
            return
        if seat is not None and seat.epoch == message.epoch and seat.session is not None:
            self._hub.bus.send(sender, Ok(message.request_id))
            return
        if seat is not None and seat.epoch == message.epoch and seat.building is not None:
            seat.askers.append((sender, message.request_id))
            return
        if seat is None:
            seat = self._seats[message.session] = _Seat(message.session)
        self._end(seat, f"epoch {message.epoch} of {message.session} has taken its place")
        seat.epoch = message.epoch
        seat.askers = [(sender, message.request_id)]
        seat.problem = ""
        seat.since = self._hub.clock()
        seat.building = self._hub.spawn(self._build(seat, message, frames))

    def _end(self, seat: _Seat, why: str, *, finish: bool = False) -> None:
        """Whatever runs or is being built here ends; its memory stays. `finish`: as for `Session.release`."""
        if seat.building is not None:
            seat.building.cancel()
            seat.building = seat.fetch = None
            self._answer(seat, lambda request_id: Refused(request_id, SUPERSEDED, why))
        if seat.session is not None:
            seat.session.release(finish=finish)
            seat.session = None

    def _answer(self, seat: _Seat, answer: Callable[[str], Ok | Refused]) -> None:
        askers, seat.askers = seat.askers, []
        for peer, request_id in askers:
            try:
                self._hub.bus.send(peer, answer(request_id))
            except DCNRError as error:
                self._hub.log.warning("unanswered", session=seat.name, to=peer.id, error=str(error))

    async def _build(self, seat: _Seat, message: Prepare, frames: Sequence[memoryview]) -> None:
        hub = self._hub
        try:
            if hub.store is None:
                text = "this PNode has no store yet: the orchestrator's answer to its registration is on its way"
                raise StoreUnavailableError(text, hint="dcnr ps; dcnr doctor looks at the line between them")
            fetch = seat.fetch = Fetch(hub.store, hub.clock, FETCH_AWAY_S)
            deployment = read_deployment(message, frames)
            seat.start_step = deployment.start_step
            compute, device = self._computing.least_used([session.compute for session in self.sessions.values()])
            await self._meet(deployment)
            session = await deploy(
                hub, deployment, fetch, seat.memory, epoch=message.epoch, replica=message.replica, compute=compute,
                device=device,
            )  # fmt: skip
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            code, text, hint = explain(error)
            text = said(text, hub.name)
            unforeseen = None if isinstance(error, DCNRError) else error
            hub.log.warning("can't prepare", session=seat.name, epoch=message.epoch, text=text, exc_info=unforeseen)
            seat.problem, seat.building, seat.fetch = text, None, None
            self._answer(seat, lambda request_id: Refused(request_id, code, text, hint))
            return
        seat.session, seat.building, seat.fetch = session, None, None
        hub.counters["states_from_memory"] += fetch.remembered
        hub.counters["states_fetched"] += fetch.fetched
        hub.counters["state_bytes_fetched"] += fetch.part_bytes
        hub.log.info(
            "prepared", session=seat.name, epoch=message.epoch, stages=session.share.stages,
            vnodes=len(session.share.nodes), step=deployment.start_step, device=str(device),
            from_memory=fetch.remembered, fetched=fetch.fetched, fetched_bytes=fetch.part_bytes,
            seconds=round(hub.clock() - seat.since, 3),
        )  # fmt: skip
        self._answer(seat, Ok)

    async def _meet(self, deployment: Deployment) -> None:
        """Where nobody can dial this PNode, it dials the others now: they answer on its connections."""
        hub, bus = self._hub, self._hub.bus
        if bus.me.addresses:
            return
        others = [peer for pnode, peer in deployment.peers.items() if pnode != hub.name]
        async with asyncio.TaskGroup() as group:
            for peer in others:
                if peer.addresses:
                    group.create_task(bus.meet(peer, timeout_s=MEET_S))
        hidden = [peer for peer in others if not peer.addresses]
        if hidden and hub.relays is None:
            text = f"neither {hub.name} nor {hidden[0].id} can be dialled"
            raise UnreachableError(text, hint="in a cluster with keys a third PNode relays")
        if hidden and hub.relays is not None:
            for peer in await hub.relays.join(hidden, deployment.relays):
                deployment.peers[peer.id] = peer

    # ------------------------------------------------------------------------------------ running

    def control(self, sender: PeerRef, message: StartRun | HoldRun | InspectRun) -> None:
        """Carry out what the orchestrator asks of a prepared session."""
        session = self.find(message.session)
        if session is None or session.share.epoch != message.epoch:
            here = f"epoch {session.share.epoch}" if session is not None else "nothing"
            text = f"session {message.session} epoch {message.epoch} is not deployed here ({here} is)"
            self._refuse(sender, message.request_id, "unknown-session", text, "dcnr ps")
            return
        if isinstance(message, InspectRun):
            self._hub.spawn(self._inspect(sender, message, session))
            return
        if session.core.state is State.FAILED:
            self._refuse(sender, message.request_id, "failed", session.error, "resume deploys it anew")
            return
        if isinstance(message, StartRun):
            session.start(message.until)
        elif session.share.pnode != session.share.loss_pnode:
            text = f"{session.share.loss_pnode} decides about holds, not {self._hub.name}"
            self._refuse(sender, message.request_id, "not-loss", text)
            return
        else:
            session.hold(message.save)
        self._hub.bus.send(sender, Ok(message.request_id))

    def release(self, sender: PeerRef, message: Release) -> None:
        """Give a seat up, unless a newer epoch than the named one has it."""
        seat = self._seats.get(message.session)
        if seat is not None and seat.epoch <= message.epoch:
            self._give_up(seat, finish=True)
        elif seat is None:
            self._remember(message.session, message.epoch)
        self._hub.bus.send(sender, Ok(message.request_id))

    def release_all(self, *, forget: bool = False) -> None:
        """Give every seat up; with `forget` also what was known of epochs (they were another cluster's)."""
        for seat in list(self._seats.values()):
            self._give_up(seat)
        if forget:
            self._over.clear()

    def _give_up(self, seat: _Seat, *, finish: bool = False) -> None:
        self._end(seat, f"{seat.name} was released", finish=finish)
        seat.memory.clear()
        del self._seats[seat.name]
        self._remember(seat.name, seat.epoch)

    def _remember(self, name: str, epoch: int) -> None:
        self._over[name] = max(epoch, self._over.pop(name, 0))
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    async def _inspect(self, sender: PeerRef, message: InspectRun, session: Session) -> None:
        try:
            reports = await session.inspect()
        except Exception as error:
            text = error.message if isinstance(error, DCNRError) else f"{type(error).__name__}: {error}"
            self._refuse(sender, message.request_id, "inspect", text)
            return
        self._hub.bus.send(sender, Ok(message.request_id), [msgspec.msgpack.encode(reports)])

    def _refuse(self, to: PeerRef, request_id: str, code: str, text: str, hint: str = "") -> None:
        self._hub.bus.send(to, Refused(request_id, code, text, hint))


def _unprepared(seat: _Seat, pnode: str, now: float) -> SessionBeat:
    """A seat whose session is being built, or could not be."""
    if seat.building is None:
        return SessionBeat(seat.name, seat.epoch, seat.start_step, "failed", seat.problem[:1000], now - seat.since)
    moved, waiting, since, limit_s = 0, "", 0.0, 0.0
    if seat.fetch is not None:
        moved = seat.fetch.moved
        text, away_since = seat.fetch.trouble
        if text:
            waiting, since, limit_s = f"store: {said(text, pnode)}", now - away_since, seat.fetch.away_s
    return SessionBeat(
        seat.name, seat.epoch, seat.start_step, "preparing", waiting[:1000], since, moved, limit_s=limit_s
    )


def read_deployment(message: Prepare, frames: Sequence[memoryview]) -> Deployment:
    """The deployment in a `Prepare`. Raises RemoteError."""
    if len(frames) != 1:
        raise RemoteError(f"Prepare has one frame, got {len(frames)}")
    try:
        deployment: Deployment = read_body(frames[0], Deployment)
    except MessageError as error:
        raise RemoteError(f"the deployment can't be read: {error}") from error
    if deployment.session != message.session:
        raise RemoteError(f"Prepare names {message.session}, its deployment {deployment.session}")
    return deployment
