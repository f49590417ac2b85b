"""Answers to every message that a client sends; `docs/protocol.md` says what each one means.

A request is answered exactly once, by Ok with its body or by Refused with a code, a sentence and the next step. The bus
answers a repeated request from its first answer; `CreateSession` is idempotent over a restart too, by its request id.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from orchestrator import events, plans, views
from orchestrator.driver import SessionDriver
from orchestrator.lifecycle import RESUMABLE
from orchestrator.records import NetworkRecord, SessionRecord
from orchestrator.sweep import sweep
from orchestrator.truth import SupersededError
from storage.keys import DIGEST, check_id, network_prefix
from storage.retention import delete_all
from wire import messages
from wire.bus import Frame
from wire.codec import MessageError, read_body
from wire.errors import DCNRError, UnreachableError, UsageError
from wire.messages import Message, PeerRef
from wire.requests import RefusedError

if TYPE_CHECKING:
    from orchestrator.guests import Guests
    from orchestrator.service import Service

INSPECT_S = 15.0
MAX_WATCH_S = 120.0
REMOVE_S = 60.0
MAX_STEPS = 10**9
MAX_SEED = 2**63


class NotFoundHereError(DCNRError):
    """There is no network or session of that name."""


class Handlers:
    """The answers; `take` never blocks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._answers: dict[type[Message], Callable[[Any, Sequence[Frame]], Awaitable[object]]] = {
            messages.AskCluster: self._ask_cluster,
            messages.ListPNodes: self._list_pnodes,
            messages.ListNetworks: self._list_networks,
            messages.ListSessions: self._list_sessions,
            messages.PutNetwork: self._put_network,
            messages.PlanNetwork: self._plan_network,
            messages.CreateSession: self._create_session,
            messages.ActOnSession: self._act_on_session,
            messages.Rebalance: self._rebalance,
            messages.WatchSession: self._watch_session,
            messages.AskDeployment: self._ask_deployment,
            messages.InspectSession: self._inspect_session,
            messages.RemoveNetwork: self._remove_network,
            messages.CollectGarbage: self._collect_garbage,
            messages.ShutDown: self._shut_down,
            messages.ListMembers: self._list_members,
            messages.Invite: self._invite,
            messages.Revoke: self._revoke,
        }

    def take(self, sender: PeerRef, message: Message, frames: Sequence[Frame]) -> None:
        """Answer a message, sooner or later."""
        if isinstance(message, messages.Join):
            work = self._join(sender, message)
            self._service.spawn(self._run(sender, message.request_id, work), f"Join of {message.name}")
            return
        answer = self._answers.get(type(message))
        request_id = getattr(message, "request_id", None)
        kind = type(message).__name__
        if answer is None:
            if isinstance(request_id, str) and request_id and not isinstance(message, messages.Ok | messages.Refused):
                text = f"an orchestrator does not answer {kind}"
                self._service.answer_refused(sender, request_id, "unknown", text)
            return
        assert isinstance(request_id, str)
        self._service.spawn(self._run(sender, request_id, answer(message, frames)), f"{kind} of {sender.id}")

    def refuse(self, sender: PeerRef, message: Message) -> None:
        """Say to whoever asks that another orchestrator has the store."""
        request_id = getattr(message, "request_id", None)
        if type(message) in self._answers and isinstance(request_id, str):
            try:
                self._service.check_term()
            except SupersededError as error:
                self._service.answer_refused(sender, request_id, "superseded", error.message, error.hint)

    async def _run(self, sender: PeerRef, request_id: str, answer: Awaitable[object]) -> None:
        service = self._service
        try:
            body = await answer
            service.check_term()
        except SupersededError as error:
            service.superseded(error)
            service.answer_refused(sender, request_id, "superseded", error.message, error.hint)
        except DCNRError as error:
            code = getattr(error, "code", "") or _code(error)
            service.answer_refused(sender, request_id, str(code), error.message, error.hint)
        except TimeoutError:
            service.answer_refused(sender, request_id, "unavailable", "it took too long", "ask again, or see its log")
        except Exception as error:
            service.answer_refused(sender, request_id, "bug", f"{type(error).__name__}: {error}", "see its log")
            raise
        else:
            if isinstance(body, messages.Joined):
                service.send(sender, body)
            else:
                service.answer_ok(sender, request_id, body)

    # ------------------------------------------------------------ questions

    async def _ask_cluster(self, message: messages.AskCluster, frames: Sequence[Frame]) -> object:
        service = self._service
        return messages.ClusterInfo(
            service.truth.term.cluster, service.version, service.term, service.store_url, service.started, os.getpid(),
            list(service.damage.told),
        )  # fmt: skip

    async def _list_pnodes(self, message: messages.ListPNodes, frames: Sequence[Frame]) -> object:
        return views.pnodes(self._service)

    async def _list_networks(self, message: messages.ListNetworks, frames: Sequence[Frame]) -> object:
        return [views.network(self._service, record) for _, record in sorted(self._service.networks.items())]

    async def _list_sessions(self, message: messages.ListSessions, frames: Sequence[Frame]) -> object:
        found = [
            driver
            for driver in self._service.sessions.values()
            if message.network in ("", driver.session.record.network)
        ]
        found.sort(key=lambda driver: (driver.session.record.created, driver.session.id))
        return [views.session(self._service, driver) for driver in found]

    async def _watch_session(self, message: messages.WatchSession, frames: Sequence[Frame]) -> object:
        driver = self._session(message.session)
        deadline = self._service.now() + _bounded(message.wait_s, MAX_WATCH_S)
        while True:
            changed = driver.changed
            found = driver.log.after(message.after, min(message.limit, 2000))
            left = deadline - self._service.now()
            if found or left <= 0 or driver.gone.is_set():
                return messages.WatchInfo(views.session(self._service, driver), found, self._service.term)
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _ask_deployment(self, message: messages.AskDeployment, frames: Sequence[Frame]) -> object:
        service = self._service
        driver = service.sessions.get(message.name)
        if driver is None:
            mine = [one for one in service.sessions.values() if one.session.record.network == message.name]
            if not mine and message.name not in service.networks:
                raise self._unknown(message.name)
            up = [one for one in mine if one.session.deployed]
            if not up:
                raise _not_deployed(max(mine, key=_age).session.id if mine else "", message.name)
            driver = max(up, key=_age)
        if not driver.session.deployed or driver.session.deployment is None:
            raise _not_deployed(driver.session.id, message.name)
        return views.deployment(service, driver)

    async def _inspect_session(self, message: messages.InspectSession, frames: Sequence[Frame]) -> object:
        service, driver = self._service, self._session(message.session)
        session, deployment = driver.session, driver.session.deployment
        if not session.deployed or deployment is None:
            raise _not_deployed(session.id, session.id)

        async def ask(pnode: str) -> list[messages.VNodeReport]:
            question = messages.InspectRun(service.new_id(), session.id, deployment.epoch)
            _, body = await service.bus.ask(driver.peers[pnode], question, timeout_s=INSPECT_S)
            try:
                found: list[messages.VNodeReport] = read_body(body[0], list[messages.VNodeReport]) if body else []
            except MessageError as error:
                raise DCNRError(f"{pnode} answered with something that is no report: {error}") from error
            return found

        answers = await asyncio.gather(*(ask(pnode) for pnode in session.pnodes))
        order = {vnode: place for place, vnode in enumerate(deployment.placement)}
        reports = [report for answer in answers for report in answer]
        return sorted(reports, key=lambda report: order.get(report.vnode, len(order)))

    async def _plan_network(self, message: messages.PlanNetwork, frames: Sequence[Frame]) -> object:
        record = self._service.networks.get(message.network)
        if record is None:
            raise self._unknown(message.network)
        return await plans.plan_network(self._service, record, message.pnodes)

    async def _rebalance(self, message: messages.Rebalance, frames: Sequence[Frame]) -> object:
        return await plans.rebalance(self._service, self._session(message.session), apply=message.apply)

    # ------------------------------------------------------------ networks

    async def _put_network(self, message: messages.PutNetwork, frames: Sequence[Frame]) -> object:
        service = self._service
        check_id(message.network, "network id")
        if len(frames) != 1:
            raise UsageError(f"PutNetwork has one frame with the network, got {len(frames)}")
        listed = await service.catalog.put(bytes(frames[0]))
        if listed.id != message.network:
            raise UsageError(f"the network calls itself {listed.id!r}, but was sent as {message.network!r}")
        async with self._lock(f"network {message.network}"):
            known = service.networks.get(message.network)
            if known is not None and known.graph_digest != listed.graph_digest and not message.replace:
                digests = f"digest {known.digest[:12]}, not {listed.digest[:12]}"
                raise _Refusal(
                    "exists",
                    f"another network is registered as {message.network} ({digests})",
                    "replace it, or give yours another name",
                )
            if known is None or known.digest != listed.digest:
                record = NetworkRecord(
                    message.network,
                    listed.digest,
                    len(listed.graph.nodes),
                    listed.parameters,
                    service.wall(),
                    listed.graph.loss is not None,
                    listed.graph_digest,
                )
                await service.truth.put_network(record)
                service.networks[message.network] = record
                service.registry.put_network(record, listed.vnodes)
        return views.network(service, service.networks[message.network])

    async def _remove_network(self, message: messages.RemoveNetwork, frames: Sequence[Frame]) -> object:
        service = self._service
        record = service.networks.get(message.network)
        if record is None:
            raise self._unknown(message.network)
        async with self._lock(f"network {message.network}"):
            mine = [one for one in service.sessions.values() if one.session.record.network == message.network]
            used = [one.session.id for one in mine if one.session.in_use]
            if used and not message.force:
                raise _Refusal("deployed", f"{message.network} is deployed: {', '.join(used)}", "use --force")
            for driver in mine:
                driver.feed(events.Acted("remove", force=True))
            async with asyncio.timeout(REMOVE_S):
                await asyncio.gather(*(driver.removed() for driver in mine))
            info = views.network(service, record)
            await service.truth.drop_network(message.network)
            del service.networks[message.network]
            service.registry.drop_network(message.network)
            await delete_all(service.store, network_prefix(message.network))
        return info

    async def _collect_garbage(self, message: messages.CollectGarbage, frames: Sequence[Frame]) -> object:
        if message.network and message.network not in self._service.networks:
            raise self._unknown(message.network)
        async with self._lock("garbage"):
            return await sweep(self._service, message.network, dry_run=message.dry_run)

    # ------------------------------------------------------------ sessions

    async def _create_session(self, message: messages.CreateSession, frames: Sequence[Frame]) -> object:
        service = self._service
        if message.network not in service.networks:
            raise self._unknown(message.network)
        async with self._lock("sessions"), self._lock(f"network {message.network}"):
            for driver in service.sessions.values():
                if driver.session.record.request_id == message.request_id:
                    return views.session(service, driver)
            driver = await service.create_session(await self._new_record(message))
        if message.start:
            await driver.act(events.Acted("start", until=message.until))
        return views.session(service, driver)

    async def _new_record(self, message: messages.CreateSession) -> SessionRecord:
        """The record of a session as asked for. Raises `DCNRError` for what can't be."""
        service = self._service
        network = service.networks.get(message.network)
        if network is None:
            raise self._unknown(message.network)
        name = message.name or self._free_name(message.network)
        check_id(name, "session id")
        if name in service.sessions:
            raise _Refusal("exists", f"there is a session {name} already", f"dcnr resume {name}, or dcnr rm {name}")
        if name in service.damage.sessions:
            raise _Refusal("exists", f"the record of session {name} is damaged, its name is taken", "dcnr status")
        if name in service.networks and name != message.network:
            raise _Refusal("exists", f"{name} is the name of a network", "give the session another name")
        if not 0 <= message.steps <= MAX_STEPS or not 0 <= message.until <= max(message.steps, 0):
            raise UsageError(f"steps is {message.steps} and until is {message.until}", hint="0 ≤ until ≤ steps")
        if not 0 <= message.seed < MAX_SEED or message.checkpoint_every < 0 or message.keep < 1 or message.pnodes < 0:
            raise UsageError("seed, checkpoint_every and pnodes are 0 or more, keep is 1 or more")
        if message.start and (not message.data_digest or not message.steps):
            raise UsageError("a session without data or steps can't be started", hint="deploy it instead")
        if message.start and not network.trainable:
            raise UsageError(
                f"{message.network} has no loss, so it can't be trained", hint="add a cross_entropy or mse node"
            )
        for what, digest in (("data", message.data_digest), ("tokenizer", message.tokenizer_digest)):
            if digest and (not DIGEST.fullmatch(digest) or not await service.catalog.has_blob(digest)):
                raise _Refusal("missing", f"the {what} blob {digest[:12]} is not in the store", "put it there first")
        return SessionRecord(
            session=name,
            network=message.network,
            network_digest=network.digest,
            data_digest=message.data_digest,
            tokenizer_digest=message.tokenizer_digest,
            data=message.data[:500],
            steps=message.steps,
            seed=message.seed,
            checkpoint_every=message.checkpoint_every,
            keep=message.keep,
            trace=message.trace,
            tag=message.tag[:100],
            created=service.wall(),
            request_id=message.request_id,
            until=message.until or message.steps,
            pnodes=message.pnodes,
            wanted=dict(message.placement),
        )

    def _free_name(self, network: str) -> str:
        numbers = [
            int(tail)
            for name in (*self._service.sessions, *self._service.damage.sessions)
            if (tail := name.removeprefix(f"{network}-")) != name and tail.isdecimal() and len(tail) < 10
        ]
        number = max(numbers, default=0) + 1
        return f"{network[: 62 - len(str(number))]}-{number}"

    async def _act_on_session(self, message: messages.ActOnSession, frames: Sequence[Frame]) -> object:
        driver = self._session(message.session)
        record = driver.session.record
        if message.pnodes < 0 or message.until < 0:
            raise UsageError("until and pnodes are 0 or more")
        starts = message.action in ("start", "resume") and driver.session.state in RESUMABLE
        if starts and message.until > record.steps:
            raise UsageError(f"until is {message.until}, but {record.session} has {record.steps} steps")
        await driver.act(events.Acted(message.action, message.until, message.pnodes, dict(message.placement)))
        info = views.session(self._service, driver)
        if message.action == "remove":
            async with asyncio.timeout(REMOVE_S):
                await driver.removed()
        return info

    async def _shut_down(self, message: messages.ShutDown, frames: Sequence[Frame]) -> object:
        addresses = self._service.bus.me.addresses
        if not addresses or not all(_is_loopback(address) for address in addresses):
            raise _Refusal("not-local", "this orchestrator can be reached from elsewhere", "send it SIGTERM")
        asyncio.get_running_loop().call_later(0.1, self._service.stop)
        return None

    # ------------------------------------------------------------ who is let in

    @property
    def _guests(self) -> Guests:
        if self._service.guests is None:
            raise _Refusal("no-keys", "this orchestrator has no keys, so it has no allow-list", "dcnr orchestrator")
        return self._service.guests

    async def _join(self, sender: PeerRef, message: messages.Join) -> object:
        return await self._guests.join(sender, message)

    async def _list_members(self, message: messages.ListMembers, frames: Sequence[Frame]) -> object:
        return self._guests.members()

    async def _invite(self, message: messages.Invite, frames: Sequence[Frame]) -> object:
        return await self._guests.invite(message.grants, message.uses, message.lifetime_s)

    async def _revoke(self, message: messages.Revoke, frames: Sequence[Frame]) -> object:
        return await self._guests.revoke(message.member)

    # ------------------------------------------------------------ inside

    def _session(self, name: str) -> SessionDriver:
        driver = self._service.sessions.get(name)
        if driver is None:
            raise self._unknown(name)
        return driver

    def _unknown(self, name: str) -> NotFoundHereError:
        from difflib import get_close_matches

        known = [*self._service.sessions, *self._service.networks]
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "dcnr ps and dcnr net ls show what there is"
        return NotFoundHereError(f"there is no network or session {name[:80]!r}", hint=hint)

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock of that name; it is there for as long as somebody holds it or waits for it."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


class _Refusal(DCNRError):
    """A refusal with a code of its own."""

    def __init__(self, code: str, text: str, hint: str = "") -> None:
        super().__init__(text, hint=hint)
        self.code = code


def _not_deployed(session: str, name: str) -> _Refusal:
    hint = f"dcnr resume {session} or dcnr infer {session} deploys it" if session else f"dcnr train {name}"
    return _Refusal("not-deployed", f"{name} is not deployed", hint)


def _bounded(seconds: float, most: float) -> float:
    """A time that a client gave; a NaN would end the event loop."""
    return min(seconds, most) if seconds > 0 else 0.0


def _age(driver: SessionDriver) -> tuple[float, str]:
    return driver.session.record.created, driver.session.id


def _code(error: DCNRError) -> str:
    match error:
        case NotFoundHereError():
            return "not-found"
        case UsageError():
            return "usage"
        case UnreachableError():
            return "unreachable"
        case RefusedError():
            return error.code
        case _:
            return {65: "bad-file", 69: "unavailable"}.get(error.exit_code, "refused")


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        found = ipaddress.ip_address(host)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return (mapped or found).is_loopback
    except ValueError:
        return host == "localhost"
