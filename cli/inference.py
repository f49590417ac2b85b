"""Forward requests through a deployed session: sent to its PNodes directly, answered by them directly.

One `Route` serves one request id: a single forward pass, or a generation whose keys and values stay in the attention
VNodes between its calls. Arrays are numpy's; torch is not needed on this side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cli.client import Client
from cli.following import newest_event
from cli.notices import Notice
from cli.waits import readable
from wire.errors import DCNRError, RemoteError, UnreachableError
from wire.ids import new_request_id
from wire.messages import (
    DeploymentInfo,
    InferEnd,
    InferFailed,
    InferInput,
    InferOutput,
    Message,
    PeerRef,
    SessionInfo,
    TensorMeta,
)
from wire.requests import RefusedError

Array = NDArray[Any]

DEPLOY_TIMEOUT_S = 180.0
QUIET_S = 1.0
"""A deployment that takes longer is explained."""

_DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4",
    "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """One output: its value, after which step's weights, and how many targets a loss sums over."""

    value: Array
    step: int
    count: int


class Router:
    """Hands the answers that arrive on a client's bus to the route that waits for them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._routes: dict[str, Route] = {}
        client.bus.on_message(self._arrived)
        client.bus.on_loss(self._lost)

    def open(self, deployment: DeploymentInfo, readers: frozenset[str]) -> Route:
        """A route with a request id of its own. `readers`: the nodes that read an input of the network."""
        route = Route(self, deployment, readers)
        self._routes[route.request_id] = route
        return route

    def close(self, route: Route) -> None:
        """Forget it."""
        self._routes.pop(route.request_id, None)

    def _arrived(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        match message:
            case InferOutput() | InferFailed():
                route = self._routes.get(message.request_id)
                if route is not None:
                    route.arrived(sender, message, frames)
            case _:
                return

    def _lost(self, peer: PeerRef, reason: str) -> None:
        for route in list(self._routes.values()):
            route.lost(peer, reason)


class InferFailedError(RemoteError):
    """A PNode can't answer. `code` is that of `InferFailed`."""

    def __init__(self, code: str, text: str, hint: str = "") -> None:
        super().__init__(text, hint=hint)
        self.code = code


class RouteLostError(UnreachableError):
    """A PNode of the route is gone, or the session is not deployed there any more."""


class Route:
    """One request and its calls; `close` it at the end."""

    def __init__(self, router: Router, deployment: DeploymentInfo, readers: frozenset[str]) -> None:
        self.request_id = str(new_request_id())
        self.deployment = deployment
        self._router = router
        self._sequence = 0
        self._waiting: dict[int, _Call] = {}
        involved = sorted(set(deployment.placement.values()))
        self._peers = {pnode: deployment.peers[pnode] for pnode in involved}
        self._reading = {pnode for node, pnode in deployment.placement.items() if node in readers}

    def close(self) -> None:
        """Nothing more is asked here; PNodes forget what they kept for it."""
        self._router.close(self)
        for peer in self._peers.values():
            self._router.client.bus.send(peer, InferEnd(self.request_id, self.deployment.session))

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
        """One forward pass; with `split` over rows of the session's own data.

        Raises: `UnreachableError` at the deadline, naming the outputs that are missing; `RouteLostError` when a PNode
        is gone, `InferFailedError` when one can't answer.
        """
        names = list(inputs)
        arrays = [np.ascontiguousarray(inputs[name]) for name in names]
        number, self._sequence = self._sequence, self._sequence + 1
        message = InferInput(
            self.request_id, self.deployment.session, number, self._router.client.bus.me, list(outputs), names,
            [TensorMeta(array.dtype.name, list(array.shape)) for array in arrays],
            split, start, count, position, cache,
        )  # fmt: skip
        bare = msgspec.structs.replace(message, inputs=[], tensors=[], split="", start=0, count=0)
        frames = [array.tobytes() for array in arrays]
        call = _Call(frozenset(outputs))
        self._waiting[number] = call
        try:
            for pnode, peer in self._peers.items():
                reads = pnode in self._reading
                self._router.client.bus.send(peer, message if reads else bare, frames if reads else ())
            async with asyncio.timeout(timeout_s):
                return await call.done
        except TimeoutError:
            missing = ", ".join(sorted(call.outputs - call.answers.keys()))
            raise UnreachableError(
                f"{self.deployment.session} did not answer within {timeout_s:.0f} s: {missing} is missing",
                hint="dcnr status shows who waits for whom",
            ) from None
        finally:
            del self._waiting[number]

    def arrived(self, sender: PeerRef, message: InferOutput | InferFailed, frames: Sequence[memoryview]) -> None:
        """An answer came."""
        call = self._waiting.get(message.sequence)
        if call is None or call.done.done():
            return
        if isinstance(message, InferFailed):
            where = f"{message.pnode}, {message.vnode}" if message.vnode else message.pnode
            call.done.set_exception(InferFailedError(message.code, f"{where}: {message.text}", message.hint))
            return
        try:
            value = array_of(message.tensors, frames)
        except ValueError as problem:
            call.done.set_exception(RemoteError(f"{sender.id} sent an output that is no tensor: {problem}"))
            return
        call.answers[message.output] = Answer(value, message.step, message.count)
        if call.outputs <= call.answers.keys():
            call.done.set_result(call.answers)

    def lost(self, peer: PeerRef, reason: str) -> None:
        """A peer is gone: nobody waits for it any longer."""
        known = self._peers.get(peer.id)
        if known is None or (known.boot and peer.boot and known.boot != peer.boot):
            return
        for call in self._waiting.values():
            if not call.done.done():
                call.done.set_exception(RouteLostError(f"{peer.id} is gone: {reason}", hint="dcnr status"))


class _Call:
    def __init__(self, outputs: frozenset[str]) -> None:
        self.outputs = outputs
        self.answers: dict[str, Answer] = {}
        self.done: asyncio.Future[dict[str, Answer]] = asyncio.get_running_loop().create_future()


def array_of(tensors: Sequence[TensorMeta], frames: Sequence[memoryview]) -> Array:
    """The one tensor of an answer as an array of its own; bfloat16 becomes float32. Raises ValueError."""
    if len(tensors) != 1 or len(frames) != 1:
        raise ValueError(f"{len(tensors)} tensors in {len(frames)} frames")
    meta = tensors[0]
    if meta.dtype == "bfloat16":
        halves = np.frombuffer(frames[0], dtype="<u2").astype(np.uint32) << 16
        return halves.view(np.float32).reshape(meta.shape)
    if meta.dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {meta.dtype[:40]!r}")
    return np.frombuffer(frames[0], dtype=_DTYPES[meta.dtype]).reshape(meta.shape).copy()


async def deployed(client: Client, name: str) -> DeploymentInfo:
    """The deployment of a session or network; a session at rest is deployed first, from its last checkpoint.

    Raises `DCNRError` if there is nothing to deploy, `UnreachableError` naming who is awaited at the deadline.
    """
    notice = Notice(client.terminal)
    deadline = asyncio.get_running_loop().time() + DEPLOY_TIMEOUT_S
    try:
        while True:
            found = await client.session(name)
            if not found.deployed:
                if found.committed == 0 and found.state != "created" and found.step == 0:
                    raise DCNRError(
                        f"{found.session} is {found.state} and has saved nothing yet",
                        hint=f"dcnr train {found.network}",
                    )
                after = await newest_event(client, found.session)
                await until_deployed(client, await client.act(found.session, "deploy"), after, deadline, notice)
            try:
                return await client.deployment(found.session)
            except RefusedError as refused:  # it came down again meanwhile
                if refused.code != "not-deployed" or asyncio.get_running_loop().time() > deadline:
                    raise
    finally:
        notice.over()


async def until_deployed(client: Client, info: SessionInfo, after: int, deadline: float, notice: Notice) -> None:
    """Wait until the session's VNodes are ready. `after`: its last event before it was asked to deploy.

    Raises: `DCNRError` with the reason why it can't be, `UnreachableError` naming who is awaited.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not info.deployed:
        whom = "; ".join(readable(info.waiting)) or "its PNodes"
        left = deadline - loop.time()
        if left <= 0:
            raise UnreachableError(
                f"{info.session} is not deployed after {DEPLOY_TIMEOUT_S:.0f} s, waiting for {whom}", hint="dcnr status"
            )
        if (took := loop.time() - began) > QUIET_S:
            what = "recovers" if info.state == "recovering" else f"is deployed from step {info.committed}"
            limit = f"for {took:.0f} s (at most {DEPLOY_TIMEOUT_S:.0f} s)"
            notice.show(f"{info.session} {what}, {limit}; waiting for {whom}")
        watched = await client.watch(info.session, after, min(0.5, left))
        info = watched.session
        for event in watched.events:
            after = event.seq
            if event.kind == "error":
                raise DCNRError(
                    f"{info.session}: {event.text}", hint=f"dcnr resume {info.session} --pnodes N, or dcnr status"
                )
