"""The client's end of the wire: requests to an orchestrator, each with a deadline, and the store behind it.

A client only dials; answers come back on its own connections. While an answer is awaited, standard error shows from
whom and for how long.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from cli.context import home_folder, orchestrator_target
from cli.terminal import Terminal
from wire import messages
from wire.codec import MessageError, read_body
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.ids import new_request_id
from wire.messages import Message, PeerRef

if TYPE_CHECKING:
    from storage.store import Store
    from wire.admission import Admission
    from wire.bus import Buffer, Bus

T = TypeVar("T")

ANSWER_TIMEOUT_S = 15.0
_PROBE_TIMEOUT_S = 3.0
_SHOW_AFTER_S = 0.7
_CLOSE_TIMEOUT_S = 1.0


async def _closed(bus: Bus) -> None:
    """Close it within a second or leave it; nobody may be there any more to whom a failure could be told."""
    with suppress(TimeoutError):
        await asyncio.wait_for(bus.close(), _CLOSE_TIMEOUT_S)


class Client:
    """A connection to one orchestrator. Use as `async with Client(address, terminal) as client`."""

    def __init__(
        self, address: str, terminal: Terminal, *, timeout_s: float = ANSWER_TIMEOUT_S, key: str = "",
        home: Path | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self._home = home
        self._admission: Admission | None = None
        self.terminal = terminal
        self.timeout_s = timeout_s
        self.orchestrator = PeerRef("orchestrator", 0, [address], key)
        self._bus: Bus | None = None

    @staticmethod
    def to(given: str | None, home: str | None, terminal: Terminal, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Client:
        """The orchestrator that options, environment and context lead to. Raises `UnreachableError`."""
        folder = home_folder(home)
        target = orchestrator_target(given, folder)
        return Client(target.address, terminal, timeout_s=timeout_s, key=target.key, home=folder)

    @property
    def bus(self) -> Bus:
        """The bus, once entered."""
        assert self._bus is not None
        return self._bus

    async def __aenter__(self) -> Client:
        await probe(self.address, min(self.timeout_s, _PROBE_TIMEOUT_S))
        self._bus = self._keyed_bus() if self.orchestrator.key else self._plain_bus()
        await self._bus.start()
        return self

    def _plain_bus(self) -> Bus:
        from wire.zmq_bus import ZmqBus

        return ZmqBus(f"cli-{uuid.uuid4().hex[:12]}")

    def _keyed_bus(self) -> Bus:
        """With this home folder's own key; the orchestrator knows it, or refuses it."""
        from wire.admission import Admission
        from wire.joining import client_id
        from wire.keys import load_or_make
        from wire.messages import Admitted
        from wire.roles import ORCHESTRATOR
        from wire.zmq_bus import ZmqBus

        keys = load_or_make((self._home or home_folder()) / "client")
        self._admission = Admission()
        self._admission.pin(Admitted(self.orchestrator.key, self.orchestrator.id, ORCHESTRATOR))
        return ZmqBus(client_id(keys.public), keys=keys, admission=self._admission)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            await asyncio.shield(asyncio.ensure_future(_closed(bus)))

    async def ask(
        self,
        message: Message,
        body: type[T],
        frames: Sequence[Buffer] = (),
        *,
        timeout_s: float | None = None,
        quiet: bool = False,
    ) -> T:
        """Send a request and give the decoded body of its answer (`None` type: no body).

        Raises: `UnreachableError` at the deadline, `wire.requests.RefusedError` if refused, `RemoteError` for an
        answer that does not fit.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        what = type(message).__struct_config__.tag
        asked = asyncio.ensure_future(self.bus.ask(self.orchestrator, message, frames, timeout_s=limit_s))
        try:
            if not quiet:
                await asyncio.wait([asked], timeout=_SHOW_AFTER_S)
            if not quiet and not asked.done():
                text = f"waiting for the orchestrator at {self.address}: {what} (at most {limit_s:.0f} s)"
                with self.terminal.waiting(text):
                    await asyncio.wait([asked])
            answer, received = await asked
        finally:
            asked.cancel()
        if not isinstance(answer, messages.Ok):
            raise RemoteError(f"the orchestrator answered {what} with {type(answer).__name__}")
        return decode(received, body, str(what))

    async def cluster(self) -> messages.ClusterInfo:
        """The orchestrator about itself."""
        return await self.ask(messages.AskCluster(new_request_id()), messages.ClusterInfo)

    async def pnodes(self, *, quiet: bool = False) -> list[messages.PNodeInfo]:
        """The PNodes it knows."""
        return await self.ask(messages.ListPNodes(new_request_id()), list[messages.PNodeInfo], quiet=quiet)

    async def networks(self) -> list[messages.NetworkInfo]:
        """The networks in its registry."""
        return await self.ask(messages.ListNetworks(new_request_id()), list[messages.NetworkInfo])

    async def sessions(self, network: str = "") -> list[messages.SessionInfo]:
        """Its sessions, of one network or all."""
        return await self.ask(messages.ListSessions(new_request_id(), network), list[messages.SessionInfo])

    async def session(self, name: str) -> messages.SessionInfo:
        """The session of that id, or the newest of the network of that id. Raises `DCNRError`."""
        everyone = await self.sessions()
        for info in everyone:
            if info.session == name:
                return info
        mine = [info for info in everyone if info.network == name]
        if not mine:
            close = _nearest(name, [info.session for info in everyone])
            raise DCNRError(f"no session or network {name!r}", hint=close or "dcnr ps shows what there is")
        return max(mine, key=lambda info: (info.created, info.session))

    async def act(
        self,
        session: str,
        action: str,
        *,
        until: int = 0,
        pnodes: int = 0,
        placement: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> messages.SessionInfo:
        """Start, pause, resume, stop, deploy, undeploy or remove a session."""
        message = messages.ActOnSession(new_request_id(), session, action, until, pnodes, placement or {})
        return await self.ask(message, messages.SessionInfo, timeout_s=timeout_s or max(self.timeout_s, 60.0))

    async def watch(self, session: str, after: int, wait_s: float, limit: int = 500) -> messages.WatchInfo:
        """A session and its events after `after`; waits up to `wait_s` for one."""
        message = messages.WatchSession(new_request_id(), session, after, wait_s, limit)
        return await self.ask(message, messages.WatchInfo, timeout_s=wait_s + self.timeout_s, quiet=True)

    async def rebalance(self, session: str, *, apply: bool = False) -> messages.RebalanceInfo:
        """What a session would gain elsewhere; with `apply` it is moved there."""
        message = messages.Rebalance(new_request_id(), session, apply)
        return await self.ask(message, messages.RebalanceInfo, timeout_s=max(self.timeout_s, 60.0))

    async def deployment(self, name: str) -> messages.DeploymentInfo:
        """Where the VNodes of a session, or of a network's newest deployed one, are."""
        found = await self.ask(messages.AskDeployment(new_request_id(), name), messages.DeploymentInfo)
        if self._admission is not None:
            for pnode, peer in found.peers.items():
                self._admission.pin(messages.Admitted(peer.key, pnode, "pnode"))
        return found

    async def members(self) -> list[messages.MemberInfo]:
        """Who is let in."""
        return await self.ask(messages.ListMembers(new_request_id()), list[messages.MemberInfo])

    async def invite(self, grants: str, uses: int, lifetime_s: float) -> messages.InviteInfo:
        """A token."""
        return await self.ask(messages.Invite(new_request_id(), grants, uses, lifetime_s), messages.InviteInfo)

    async def revoke(self, member: str) -> messages.MemberInfo:
        """Let somebody in no longer."""
        return await self.ask(messages.Revoke(new_request_id(), member), messages.MemberInfo)


@asynccontextmanager
async def store_of(url: str) -> AsyncIterator[Store]:
    """The store of a cluster, opened and closed."""
    from storage.open import Remote, keyed_bus, open_store

    def bus(service_key: str) -> Bus:
        from wire.joining import client_id
        from wire.keys import load_or_make

        if not service_key:
            return keyed_bus(f"cli-{uuid.uuid4().hex[:12]}", None, "")
        keys = load_or_make(home_folder() / "client")
        return keyed_bus(client_id(keys.public), keys, service_key)

    store = open_store(url, Remote(bus))
    try:
        yield store
    finally:
        await store.close()


async def probe(address: str, timeout_s: float) -> None:
    """See at once whether anything listens at `tcp://host:port`. Raises `UnreachableError`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        raise UnreachableError(
            f"the orchestrator at {address} did not answer within {timeout_s:.0f} s",
            hint="is its address right, and does a firewall let it through?",
        ) from None
    except OSError as problem:
        reason = os.strerror(problem.errno) if problem.errno and problem.errno > 0 else str(problem)
        raise UnreachableError(
            f"no orchestrator at {address}: {reason}",
            hint="dcnr up starts a cluster here; dcnr context ls shows others",
        ) from problem
    writer.close()


def decode(frames: Sequence[Any], body: type[T], what: str) -> T:
    """The msgpack body of an answer as its type. Raises `RemoteError`."""
    if body is type(None):
        return None
    if not frames:
        raise RemoteError(f"the answer to {what} has no body", hint="is the orchestrator of another version?")
    try:
        answer: T = read_body(frames[0], body)
    except MessageError as problem:
        raise RemoteError(
            f"the answer to {what} is not as expected: {problem}", hint="is the orchestrator of another version?"
        ) from problem
    return answer


def absolute(path: str) -> Path:
    """A path that a person typed."""
    return Path(path).expanduser().absolute()


def _nearest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, known, n=1)
    return f"did you mean {found[0]!r}?" if found else ""
