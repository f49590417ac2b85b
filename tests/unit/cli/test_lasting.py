"""Calls that outlive their deployment, against routes and an orchestrator that follow a script."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from cli import inference, lasting
from cli.client import Client
from cli.generation import PrefixLostError, generate
from cli.inference import Answer, InferFailedError, RouteLostError, Router
from cli.lasting import LastingRoute
from cli.notices import Notice
from cli.sampling import Sampling
from cli.terminal import Terminal
from tests.unit.cli.sessions import event, session
from tests.unit.cli.test_sampling import Toy
from wire.errors import DCNRError, UnreachableError
from wire.messages import DeploymentInfo, PeerRef, PNodeInfo, Profile, SessionEvent, WatchInfo
from wire.requests import RefusedError
from wire.simloop import run_sim

ANSWER = {"logits": Answer(np.zeros(1), 7, 0)}
PROFILE = Profile("host", "cpu", 1, 1e9, 1 << 30, 1e9, 1e-4, "2", "x", "0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the usual times."""
    for name in ("LOOK_S", "QUIET_S", "SAME_S", "BUSY_S", "RETRY_S", "POLL_S"):
        monkeypatch.setattr(lasting, name, getattr(lasting, name) / 100)


def pnode(name: str, state: str = "alive", seen_s: float = 1.0, health: str = "") -> PNodeInfo:
    return PNodeInfo(name, state, 1, PeerRef(name, 1, []), PROFILE, seen_s, [], 1, 0, 0.0, "idle", health=health)


def deployment(epoch: int) -> DeploymentInfo:
    return DeploymentInfo("gpt-1", "gpt", "", epoch, {"a": "p1", "b": "p2"}, {}, "", "", 7, "")


class Cluster:
    """An orchestrator. `epoch` 0: not deployed; `on_deploy`: what an act does."""

    address = "tcp://x:1"

    def __init__(self, epoch: int = 1, state: str = "finished") -> None:
        self.epoch, self.state = epoch, state
        self.ill: list[PNodeInfo] = []
        self.away = False
        self.acts = 0
        self.waiting: list[str] = []
        self.events: list[SessionEvent] = []
        self.error = ""
        self.on_deploy: Callable[[], None] = lambda: None

    async def watch(self, name: str, after: int, wait_s: float, limit: int = 500) -> WatchInfo:
        await asyncio.sleep(0)
        if self.away:
            raise UnreachableError("no orchestrator")
        info = session(self.state, 7, deployed=self.epoch > 0, epoch=self.epoch, waiting=self.waiting, error=self.error)
        return WatchInfo(info, [one for one in self.events if one.seq > after], 1)

    async def pnodes(self, *, quiet: bool = False) -> list[PNodeInfo]:
        if self.away:
            raise UnreachableError("no orchestrator")
        ill = {one.pnode: one for one in self.ill}
        return [ill.get(name, pnode(name)) for name in ("p1", "p2")]

    async def act(self, name: str, action: str) -> None:
        assert action == "deploy"
        self.acts += 1
        self.on_deploy()

    async def deployment(self, name: str) -> DeploymentInfo:
        if not self.epoch:
            raise RefusedError("not-deployed", "gpt-1 is not deployed")
        return deployment(self.epoch)


class Routes:
    """Routes whose calls do what `does` says: give, raise, or wait for ever (None)."""

    def __init__(self, client: Cluster, *does: Any) -> None:
        self.client = client
        self.does = list(does)
        self.calls: list[tuple[int, int]] = []
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open(self, deployment: DeploymentInfo, readers: frozenset[str]) -> Any:
        self.opened.append(deployment.epoch)
        return _Route(self, deployment)


class _Route:
    def __init__(self, routes: Routes, deployment: DeploymentInfo) -> None:
        self.routes, self.deployment = routes, deployment

    def close(self) -> None:
        self.routes.closed.append(self.deployment.epoch)

    async def call(self, inputs: Any, outputs: Sequence[str], *, position: int, timeout_s: float, **more: Any) -> Any:
        self.routes.calls.append((self.deployment.epoch, position))
        does = self.routes.does.pop(0) if self.routes.does else ANSWER
        if callable(does):
            does = does()
        if does is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            except TimeoutError:
                raise UnreachableError(f"gpt-1 did not answer within {timeout_s:.0f} s") from None
        if isinstance(does, Exception):
            raise does
        return does


class Bench:
    """A lasting route on a script; `err` is what a person reads."""

    def __init__(self, cluster: Cluster, *does: Any) -> None:
        self.cluster, self.routes = cluster, Routes(cluster, *does)
        self.err = io.StringIO()
        self.notice = Notice(Terminal(stdout=io.StringIO(), stderr=self.err))
        self.route = LastingRoute(cast(Router, self.routes), deployment(1), frozenset(), self.notice)

    async def told(self, text: str) -> None:
        """Wait until a person has read that."""
        async with asyncio.timeout(10):
            while text not in self.err.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def call(self, position: int = 0, timeout_s: float = 30.0) -> Any:
        return await self.route.call({}, ["logits"], position=position, timeout_s=timeout_s)


def up(cluster: Cluster, epoch: int) -> Callable[[], None]:
    """What deploys it."""

    def deploy() -> None:
        cluster.epoch = epoch

    return deploy


def lost(cluster: Cluster, error: Exception | None, epoch: int = 0) -> Callable[[], Exception | None]:
    """A call during which the deployment is lost; `error` None: nobody tells the caller."""

    def happens() -> Exception | None:
        cluster.epoch = epoch
        return error

    return happens


GONE = RouteLostError("p2 is gone: its process ended")
MOVED = InferFailedError("moved", "p1: session gpt-1 has ended here, or was placed anew")


@pytest.mark.parametrize("error", [GONE, MOVED, InferFailedError("unknown-session", "p1: not here"), None])
async def test_a_session_at_rest_is_deployed_again_and_asked_again(error: Exception | None) -> None:
    cluster = Cluster()
    cluster.on_deploy = up(cluster, 2)
    bench = Bench(cluster, lost(cluster, error))
    assert await bench.call() == ANSWER
    assert bench.routes.calls == [(1, 0), (2, 0)]
    assert (bench.routes.closed, cluster.acts, bench.route.moves) == ([1], 1, 1)
    assert "gpt-1: goes on in epoch 2 on p1, p2\n" in bench.err.getvalue()


@pytest.mark.parametrize("error", [GONE, None])
async def test_what_builds_on_a_lost_prefix_is_not_asked_again(error: Exception | None) -> None:
    cluster = Cluster()
    cluster.on_deploy = up(cluster, 2)
    bench = Bench(cluster, lost(cluster, error))
    with pytest.raises(PrefixLostError):
        await bench.call(position=5)
    assert bench.routes.calls == [(1, 5)]
    assert await bench.call(position=0) == ANSWER
    assert bench.routes.calls == [(1, 5), (2, 0)]


async def test_a_session_that_trains_is_left_to_recover_by_itself() -> None:
    cluster = Cluster(state="recovering")
    cluster.error, cluster.waiting = "PNode p2 is lost: no sign of life for 12 s", ["p1: prepare its VNodes, for 1 s"]
    bench = Bench(cluster, lost(cluster, None))
    called = asyncio.ensure_future(bench.call())
    await bench.told("waiting for p1: prepare")
    assert not called.done()
    cluster.epoch, cluster.state = 4, "running"
    assert await called == ANSWER
    assert cluster.acts == 0
    assert bench.routes.calls == [(1, 0), (4, 0)]
    assert "gpt-1 is placed anew (PNode p2 is lost: no sign of life for 12 s), for " in bench.err.getvalue()
    assert "(at most 300 s); waiting for p1: prepare its VNodes" in bench.err.getvalue()


async def test_a_deployment_that_fails_is_asked_for_again_but_not_in_a_hurry() -> None:
    cluster = Cluster()

    def deploy() -> None:
        if cluster.acts == 3:
            cluster.epoch = 2
        else:
            cluster.events.append(event(cluster.acts, "error", f"not deployed: no room, try {cluster.acts}"))

    cluster.on_deploy = deploy
    bench = Bench(cluster, lost(cluster, GONE))
    began = asyncio.get_running_loop().time()
    assert await bench.call() == ANSWER
    assert asyncio.get_running_loop().time() - began >= 2 * lasting.RETRY_S
    assert cluster.acts == 3
    assert "waiting for not deployed: no room, try 1" in bench.err.getvalue()


async def test_an_orchestrator_that_is_away_meanwhile_is_named_and_waited_for() -> None:
    cluster = Cluster()
    cluster.on_deploy = up(cluster, 3)
    bench = Bench(cluster, lost(cluster, GONE))
    cluster.away = True
    called = asyncio.ensure_future(bench.call())
    await bench.told("waiting for the orchestrator at tcp://x:1, which does not answer")
    cluster.away = False
    assert await called == ANSWER


def test_it_gives_up_at_a_deadline_and_says_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "AGAIN_S", 0.2)

    async def gives_up() -> None:
        cluster = Cluster(state="recovering")
        cluster.waiting = ["PNodes: room for gpt-1, for 9 s"]
        bench = Bench(cluster, lost(cluster, GONE))
        with pytest.raises(UnreachableError, match=r"gave no answer within 0 s: p2 is gone.*PNodes: room for gpt-1"):
            await bench.call()

    run_sim(gives_up())


def test_a_late_answer_is_an_error_where_everybody_is_well_and_a_loss_where_not() -> None:
    """In virtual time, so that how busy this machine is makes no difference."""

    async def well() -> None:
        bench = Bench(Cluster(), None)
        with pytest.raises(UnreachableError, match="did not answer within"):
            await bench.call(timeout_s=0.2)
        assert "gpt-1: waiting for an answer, for 0 s (at most 0 s)" in bench.err.getvalue()

    async def ill() -> None:
        cluster = Cluster()
        cluster.ill = [pnode("p2", seen_s=9.0)]
        bench = Bench(cluster, None)
        called = asyncio.ensure_future(bench.call(timeout_s=0.2))
        await bench.told("is placed anew (p2: no sign of life for 9 s)")
        assert "gpt-1: waiting for p2: no sign of life for 9 s, for" in bench.err.getvalue()
        cluster.epoch = 2
        assert await called == ANSWER

    run_sim(well())
    run_sim(ill())


async def test_a_deployment_that_stands_is_asked_again() -> None:
    cluster = Cluster()
    bench = Bench(cluster, GONE)
    assert await bench.call() == ANSWER
    assert bench.routes.calls == [(1, 0), (1, 0)]
    assert (cluster.acts, bench.route.moves) == (0, 0)


async def test_busy_is_asked_again_and_a_dropped_cache_is_a_lost_prefix() -> None:
    missed = InferFailedError("cache-miss", "p1: holds 0 positions, asked to go on at 5")
    bench = Bench(Cluster(), InferFailedError("busy", "p1: 256 requests are open here"), ANSWER, missed)
    assert await bench.call() == ANSWER
    with pytest.raises(PrefixLostError):
        await bench.call(position=5)
    assert bench.routes.opened == [1]


@pytest.mark.parametrize("code", ["bad-request", "compute", "cache-miss"])
async def test_what_would_fail_again_is_an_error(code: str) -> None:
    bench = Bench(Cluster(), InferFailedError(code, "p1, a: no"))
    with pytest.raises(InferFailedError, match="p1, a: no"):
        await bench.call()


async def test_a_session_that_is_gone_is_an_error() -> None:
    cluster = Cluster()

    async def watch(*what: Any, **more: Any) -> WatchInfo:
        raise RefusedError("not-found", "there is no network or session 'gpt-1'")

    cluster.watch = watch  # type: ignore[method-assign]
    with pytest.raises(DCNRError, match="there is no network or session"):
        await Bench(cluster, GONE).call()


async def test_calls_in_flight_share_one_new_deployment() -> None:
    cluster = Cluster()
    cluster.on_deploy = up(cluster, 2)
    bench = Bench(cluster, *(lost(cluster, GONE) for _ in range(4)))
    assert await asyncio.gather(*(bench.call() for _ in range(4))) == [ANSWER] * 4
    assert bench.routes.opened == [1, 2]
    assert cluster.acts == 1


class Losing(Toy):
    """Loses what it kept before some of its calls, and says so where the call builds on it."""

    def __init__(self, context: int, at: set[int]) -> None:
        super().__init__(context)
        self.at = at
        self.losses = 0
        self._number = 0

    async def __call__(self, tokens_1T: np.ndarray, position: int, keep: bool) -> np.ndarray:
        self._number += 1
        if self._number in self.at:
            self.kept = []
            if position:
                self.losses += 1
                raise PrefixLostError("gone")
        return await super().__call__(tokens_1T, position, keep)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("at", [{1}, {2}, {4}, {5, 6, 7}, {4, 9}, {20}, set(range(2, 20, 2))])
async def test_losses_change_no_token(at: set[int], cache: bool) -> None:
    """At the first token, in the middle, twice in a row, and where the text no longer fits the context."""

    async def ids(toy: Toy) -> list[int]:
        sampling = Sampling(1.0)
        found = generate(toy, [1, 2, 3], context=8, max_tokens=20, sampling=sampling, seed=3, cache=cache)
        return [token.id async for token in found]

    toy = Losing(8, at)
    assert await ids(toy) == await ids(Toy(8))
    assert (toy.losses > 0) == (cache and bool(at & {2, 3, 4, 5, 6, 7}))


class Resting(Cluster):
    """An orchestrator whose session is known by name; `terminal` is where a client would tell of a wait."""

    def __init__(self, err: io.StringIO) -> None:
        super().__init__(epoch=0)
        self.terminal = Terminal(stdout=io.StringIO(), stderr=err)
        self.losses = 1

    async def session(self, name: str) -> Any:
        return session(self.state, 7, deployed=self.epoch > 0, epoch=self.epoch, committed=7)

    async def act(self, name: str, action: str) -> Any:
        await super().act(name, action)
        return session(self.state, 7, deployed=False, epoch=0, committed=7)

    async def deployment(self, name: str) -> DeploymentInfo:
        if self.losses:
            self.losses -= 1
            self.epoch = 0
        return await super().deployment(name)


async def test_a_session_at_rest_is_deployed_and_once_more_if_it_comes_down_meanwhile() -> None:
    cluster = Resting(io.StringIO())
    cluster.on_deploy = up(cluster, 2)
    found = await inference.deployed(cast(Client, cluster), "gpt-1")
    assert (found.epoch, cluster.acts) == (2, 2)


async def test_a_deployment_that_takes_its_time_says_who_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "QUIET_S", 0.0)
    monkeypatch.setattr(inference, "DEPLOY_TIMEOUT_S", 0.1)
    err = io.StringIO()
    cluster = Resting(err)
    cluster.waiting = ["p1: prepare its VNodes, for 3 s (at most 180 s)"]
    with pytest.raises(UnreachableError, match=r"not deployed after 0 s, waiting for p1: prepare its VNodes"):
        await inference.deployed(cast(Client, cluster), "gpt-1")
    assert "gpt-1 is deployed from step 7, for 0 s (at most 0 s); waiting for its PNodes" in err.getvalue()
    assert "; waiting for p1: prepare its VNodes, for 3 s" in err.getvalue()
