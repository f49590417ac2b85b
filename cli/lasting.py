"""Forward requests that outlive the deployment they go to.

A `LastingRoute` asks through one `Route` after another. When a PNode of it is lost, or the session is placed anew, the
call under way is given up; a session at rest is deployed again from its last committed step, one that trains recovers
by itself; and the call is made there. All the while it is shown who is awaited, since when and at most how long.

What the attention VNodes kept is gone with a route. A call that builds on it ends with `PrefixLostError`, and its
caller sends the whole prefix. Nothing else changes for the caller: a choice among the answers is made once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from cli.following import newest_event
from cli.generation import PrefixLostError
from cli.inference import Answer, Array, InferFailedError, Route, RouteLostError, Router
from cli.notices import Notice
from cli.waits import readable
from wire.errors import DCNRError, UnreachableError
from wire.messages import DeploymentInfo, PNodeInfo, SessionInfo

T = TypeVar("T")

AGAIN_S = 300.0
"""How long a session may take to be placed anew, by itself or on our behalf, before a call gives up."""
LOOK_S = 1.0
QUIET_S = 2.0
"""A call that takes longer is explained."""
SILENT_S = 4.0
"""PNodes report every 2 s; one that was not heard for so long is named."""
SAME_S = 3.0
"""All of its PNodes are well for so long: the deployment stands, and the call is made there again."""
BUSY_S = 0.5
RETRY_S = 3.0
POLL_S = 0.2
AT_REST = frozenset({"created", "paused", "stopped", "finished", "failed"})
ELSEWHERE = frozenset({"moved", "unknown-session", "timeout"})
"""Codes of `InferFailed` that say: not here, or not any more."""
FOR_NOW = frozenset({"not-deployed", "superseded", "unavailable", "unreachable"})
"""Codes of an orchestrator's refusals that may be different a moment later."""
NO_EVENTS = 2**53


@dataclass(frozen=True, slots=True)
class Sight:
    """A deployment as the orchestrator sees it. `moved`: why it's no longer this one; `unwell`: who isn't well."""

    moved: str
    unwell: list[str]


class LastingRoute:
    """See the module. Use as `async with LastingRoute(router, deployment, readers, notice) as route`."""

    def __init__(self, router: Router, deployment: DeploymentInfo, readers: frozenset[str], notice: Notice) -> None:
        self.moves = 0
        """How many times a call had to go on elsewhere."""
        self._router, self._client = router, router.client
        self._readers, self._notice = readers, notice
        self._route = router.open(deployment, readers)
        self._renewing = asyncio.Lock()
        self._stuck: float | None = None

    async def __aenter__(self) -> LastingRoute:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._notice.over()
        self._route.close()

    async def call(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        *,
        position: int = 0,
        cache: bool = False,
        split: str = "",
        start: int = 0,
        count: int = 0,
        timeout_s: float,
    ) -> dict[str, Answer]:
        """As `Route.call`, through any number of deployments; they get `AGAIN_S` together.

        Raises: `PrefixLostError` if `position` is not 0 and what came before is gone; `UnreachableError` at a deadline,
        naming who is missing; `DCNRError` when a PNode can't answer.
        """
        while True:
            route = self._route
            try:
                answers = await self._watched(
                    route,
                    route.call(
                        inputs, outputs, position=position, cache=cache, split=split, start=start, count=count,
                        timeout_s=timeout_s,
                    ),
                    timeout_s,
                )  # fmt: skip
            except RouteLostError as lost:
                await self._renew(route, lost.message)
            except InferFailedError as failed:
                if failed.code == "busy":
                    so_far = self._check_time(failed.message)
                    self._notice.show(f"{failed.message}; asked again for {so_far:.0f} s (at most {AGAIN_S:.0f} s)")
                    await asyncio.sleep(BUSY_S)
                    continue
                if failed.code in ELSEWHERE:
                    await self._renew(route, failed.message)
                elif failed.code != "cache-miss" or not position:
                    raise
            else:
                self._stuck = None
                self._notice.over()
                return answers
            if position:
                raise PrefixLostError("what came before this token is gone from the PNodes")

    # ------------------------------------------------------------ a call under way

    async def _watched(self, route: Route, call: Awaitable[T], timeout_s: float) -> T:
        """What the call gives. While it does not, look whether the deployment still stands, and say who is awaited.

        Raises `RouteLostError` as soon as it does not, and at the call's deadline if one of its PNodes is not well.
        """
        asked = asyncio.ensure_future(call)
        look: asyncio.Future[Sight | None] | None = None
        sight: Sight | None = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        session = route.deployment.session
        try:
            await asyncio.wait([asked], timeout=LOOK_S)
            while not asked.done():
                look = look or asyncio.ensure_future(self._look(route))
                both: list[asyncio.Future[Any]] = [asked, look]
                await asyncio.wait(both, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if look.done() and not asked.done():
                    sight, look = look.result(), None
                    if sight is not None and sight.moved:
                        raise RouteLostError(sight.moved)
                    await asyncio.wait([asked], timeout=LOOK_S)
                if (took := loop.time() - began) > QUIET_S:
                    whom = _joined(sight.unwell if sight is not None else [self._away()]) or "an answer"
                    self._notice.show(f"{session}: waiting for {whom}, for {took:.0f} s (at most {timeout_s:.0f} s)")
            return await asked
        except RouteLostError:
            raise
        except UnreachableError as late:
            if sight is not None and sight.unwell:
                raise RouteLostError(_joined(sight.unwell)) from late
            raise
        finally:
            under_way = [one for one in (asked, look) if one is not None and not one.done()]
            for one in under_way:
                one.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _look(self, route: Route) -> Sight | None:
        """How the deployment is; None if the orchestrator does not say."""
        here = route.deployment
        try:
            info = (await self._client.watch(here.session, NO_EVENTS, 0.0, 1)).session
            ill = unwell(await self._client.pnodes(quiet=True), here)
            moved = not info.deployed or info.epoch != here.epoch
            return Sight(_why(info, ill) if moved else "", ill)
        except UnreachableError:
            return None

    def _away(self) -> str:
        return f"the orchestrator at {self._client.address}, which does not answer"

    # ------------------------------------------------------------ another deployment

    def _check_time(self, why: str) -> float:
        """Seconds since calls get no answer. Raises `UnreachableError` after `AGAIN_S`."""
        now = asyncio.get_running_loop().time()
        self._stuck = self._stuck if self._stuck is not None else now
        if now - self._stuck > AGAIN_S:
            raise UnreachableError(
                f"{self._route.deployment.session} gave no answer within {AGAIN_S:.0f} s: {why}",
                hint="dcnr status shows who waits for whom",
            )
        return now - self._stuck

    async def _renew(self, old: Route, why: str) -> None:
        """Have a route to where the session is deployed now, which is not `old`. Raises `DCNRError`."""
        async with self._renewing:
            if self._route is not old:
                return
            old.close()
            deployment = await self._deployed_again(old.deployment, why)
            self._route = self._router.open(deployment, self._readers)
            if deployment.epoch != old.deployment.epoch:
                self.moves += 1
                where = ", ".join(dict.fromkeys(deployment.placement.values()))
                self._notice.over(f"{deployment.session}: goes on in epoch {deployment.epoch} on {where}")

    async def _deployed_again(self, old: DeploymentInfo, why: str) -> DeploymentInfo:
        name = old.session
        loop = asyncio.get_running_loop()
        after: int | None = None
        well_since: float | None = None
        retry_at = 0.0
        problem = ""
        while True:
            whom = problem
            try:
                if after is None:
                    after = await self._told(name, why, self._away(), newest_event(self._client, name))
                watched = await self._told(name, why, "", self._client.watch(name, after, LOOK_S))
                info = watched.session
                for event in watched.events:
                    after = event.seq
                    if event.kind == "error":
                        problem, retry_at = event.text, loop.time() + RETRY_S
                if info.deployed:
                    if info.epoch != old.epoch:
                        return await self._client.deployment(name)
                    ill = unwell(await self._client.pnodes(quiet=True), old)
                    well_since = None if ill else well_since or loop.time()
                    if well_since is not None and loop.time() - well_since >= SAME_S:
                        return old
                    whom = _joined(ill)
                elif info.waiting:
                    whom = _joined(readable(info.waiting))
                elif info.state in AT_REST and loop.time() >= retry_at:
                    await self._client.act(name, "deploy")
            except UnreachableError:
                whom = self._away()
            except DCNRError as refused:
                if getattr(refused, "code", "") not in FOR_NOW:
                    raise
            self._say(name, why, whom)
            await asyncio.sleep(POLL_S)

    async def _told(self, name: str, why: str, whom: str, question: Awaitable[T]) -> T:
        """The answer; while it is not there, the wait for it is shown."""
        asked = asyncio.ensure_future(question)
        try:
            while True:
                await asyncio.wait([asked], timeout=2 * LOOK_S)
                if asked.done():
                    return await asked
                self._say(name, why, whom or self._away())
        finally:
            asked.cancel()

    def _say(self, name: str, why: str, whom: str) -> None:
        so_far = self._check_time("; ".join(part for part in (why, whom) if part))
        awaited = f"; waiting for {whom}" if whom and whom not in why else ""
        self._notice.show(f"{name} is placed anew ({why}), for {so_far:.0f} s (at most {AGAIN_S:.0f} s){awaited}")


def unwell(pnodes: Sequence[PNodeInfo], deployment: DeploymentInfo) -> list[str]:
    """The PNodes of a deployment that may not answer, each as a sentence."""
    known = {info.pnode: info for info in pnodes}
    found = []
    for pnode in dict.fromkeys(deployment.placement.values()):
        info = known.get(pnode)
        if info is None or info.state in ("lost", "gone"):
            found.append(f"{pnode} is {'unknown' if info is None else info.state}")
        elif info.state == "suspect" or info.seen_s > SILENT_S:
            found.append(f"{pnode}: no sign of life for {info.seen_s:.0f} s")
        elif info.health:
            found.append(f"{pnode} is unhealthy: {info.health}")
    return found


def _why(info: SessionInfo, ill: Sequence[str]) -> str:
    if info.error and info.state not in AT_REST:
        return info.error
    if ill:
        return _joined(ill)
    return f"it is in epoch {info.epoch} now" if info.deployed else "it is not deployed any more"


def _joined(sentences: Sequence[str]) -> str:
    return "; ".join(sentences)
