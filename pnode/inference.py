"""Forward requests through the stages of one session, by request id, beside its training.

A request runs on the stages that its outputs need: each stage as soon as the request itself and the tensors it reads
are here, in any order of arrival. Outputs go straight to the client. Bounded: number of open requests, their age, and
the bytes of the keys and values that the attention VNodes keep. Weights are those of the moment.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from networks.graph import BATCH
from networks.stages import Channel
from pnode.hub import Hub
from pnode.kvcache import CacheMiss, KVCache
from pnode.liveness import needed_nodes
from pnode.tensors import Packed, Received, pack, unpack
from wire.errors import DCNRError
from wire.messages import InferEnd, InferFailed, InferHop, InferInput, InferOutput, Message, PeerRef

if TYPE_CHECKING:
    from pnode.session import Session
    from pnode.work import Work

Key = tuple[str, int]
SWEEP_S = 30.0
AGAIN = "ask for the deployment again, and send the whole input under a new request id"


@dataclass(slots=True)
class _Request:
    """One forward request on its way through this PNode. `local` and `inputs` belong to the compute thread."""

    since: float
    asked: InferInput | None = None
    frames: Sequence[memoryview] = ()
    hops: dict[int, Received] = field(default_factory=dict)
    stages: list[int] = field(default_factory=list)
    channels: frozenset[int] = frozenset()
    queued: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    local: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Made:
    sends: dict[int, Packed]
    outputs: dict[str, Packed]
    count: int
    step: int


class Inference:
    """See the module. Called in the event loop's thread, except for `_compute`."""

    def __init__(self, hub: Hub, session: Session, lane: str) -> None:
        self.hub = hub
        self.session = session
        self.lane = lane
        self._open: dict[Key, _Request] = {}
        self._needed: dict[frozenset[str], tuple[list[int], frozenset[int]]] = {}
        self._caching = False
        self._swept = 0.0
        self._closed: tuple[str, str] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def on(self, message: InferInput | InferHop | InferEnd, frames: Sequence[memoryview]) -> None:
        """One message about a forward request."""
        match message:
            case InferEnd(request_id):
                for key in [key for key in self._open if key[0] == request_id]:
                    del self._open[key]
                if self._caching:
                    self.session.submit(self.lane, "end", lambda work: work.caches.drop(request_id), _ignore)
            case InferInput():
                self._asked(message, frames)
            case InferHop():
                self._arrived(message, frames)

    def close(self, code: str, text: str) -> None:
        """Answer every open request, and each that comes from now on, with a refusal: nothing is computed here."""
        self._closed = (code, text)
        for request in self._open.values():
            if request.asked is not None:
                self._failed(request.asked, code, text, AGAIN)
        self._open.clear()

    def sweep(self, now: float) -> None:
        """Give up requests that got no further for too long, and keys and values that nobody used."""
        limit = self.hub.bounds.infer_s
        for key, request in list(self._open.items()):
            if now - request.since > limit and request.queued == request.done:
                del self._open[key]
                if request.asked is not None:
                    text = f"waited {limit:g} s for {'; '.join(self._missing(request)) or 'the client'}"
                    self._failed(request.asked, "timeout", text, "is every PNode alive? (dcnr ps)")
        if self._caching and now - self._swept > SWEEP_S:
            self._swept = now
            self.session.submit(self.lane, "sweep", lambda work: work.caches.sweep(now), _ignore)

    # ------------------------------------------------------------------------------------ arrival

    def _open_one(self, key: Key) -> _Request | None:
        request = self._open.get(key)
        if request is None:
            if len(self._open) >= self.hub.bounds.infer_requests:
                return None
            request = self._open[key] = _Request(self._now())
        return request

    def _now(self) -> float:
        return self.session.now()

    def _asked(self, message: InferInput, frames: Sequence[memoryview]) -> None:
        key = (message.request_id, message.sequence)
        if self._closed is not None:
            self._failed(message, *self._closed, AGAIN)
            return
        problem = self._problem(message)
        if problem:
            self._failed(message, "bad-request", problem, "dcnr net show prints inputs and outputs")
            return
        request = self._open_one(key)
        if request is None:
            self._failed(message, "busy", f"{len(self._open)} requests are open here", "try again later")
            return
        if request.asked is not None:
            self.session.refuse("duplicate-request", f"request {key} came before")
            return
        request.asked, request.frames = message, frames
        request.stages, request.channels = self._needs(frozenset(message.outputs))
        self._caching = self._caching or message.cache
        if not request.stages:
            del self._open[key]
            return
        self._advance(key, request)

    def _problem(self, message: InferInput) -> str:
        graph = self.session.network.graph
        unknown = sorted(set(message.outputs) - graph.outputs.keys())
        if unknown or not message.outputs:
            return f"the network has no output {unknown}; it has {', '.join(graph.outputs)}"
        if message.split:
            most = self.hub.bounds.infer_rows
            return "" if 0 < message.count <= most else f"{message.count} rows asked for, 1 to {most} are allowed"
        if len(message.inputs) != len(message.tensors):
            return f"{len(message.inputs)} inputs named, {len(message.tensors)} tensors came"
        for name, meta in zip(message.inputs, message.tensors, strict=True):
            spec = graph.inputs.get(name)
            if spec is None:
                return f"the network has no input '{name}'; it has {', '.join(graph.inputs)}"
            small = all(
                extent == BATCH or 0 < got <= int(extent) for got, extent in zip(meta.shape, spec.shape, strict=False)
            )
            if meta.dtype != spec.dtype or len(meta.shape) != len(spec.shape) or not small:
                return f"input '{name}': expected {spec}, got {meta.dtype}({', '.join(map(str, meta.shape))})"
        return ""

    def _needs(self, outputs: frozenset[str]) -> tuple[list[int], frozenset[int]]:
        found = self._needed.get(outputs)
        if found is None:
            share = self.session.share
            nodes = needed_nodes(self.session.network.graph, outputs)
            stages = [stage for stage in share.stages if nodes.intersection(share.plan.stages[stage].nodes)]
            channels = frozenset(
                c.index for c in share.plan.channels if any(edge.dst.node in nodes for edge in c.edges)
            )
            found = self._needed[outputs] = (stages, channels)
        return found

    def _arrived(self, hop: InferHop, frames: Sequence[memoryview]) -> None:
        share = self.session.share
        channel = self.session.channels.get(hop.channel)
        graph = self.session.network.graph
        if channel is None or channel.dst not in share.schedules or len(hop.tensors) != 1:
            self.session.refuse("bad-infer-hop", f"request {hop.request_id}: channel {hop.channel}")
            return
        spec = graph.costs[channel.port.node].outputs[channel.port.port]
        meta = hop.tensors[0]
        if (
            meta.codec != channel.codec
            or len(meta.shape) != len(spec.shape)
            or (meta.dtype != spec.dtype and meta.dtype not in self.session.floats)
        ):
            self.session.refuse("bad-infer-hop", f"request {hop.request_id}: '{channel.port}' came as {meta}")
            return
        key = (hop.request_id, hop.sequence)
        request = self._open_one(key) if self._closed is None else None
        if request is None or hop.channel in request.hops:
            self.session.refuse("infer-hop", f"request {hop.request_id}: too many, or twice")
            return
        request.hops[hop.channel] = Received(hop.tensors, frames)
        request.since = self._now()
        self._advance(key, request)

    # ------------------------------------------------------------------------------------ going on

    def _ins(self, request: _Request, stage: int) -> list[Channel]:
        return [c for c in self.session.share.plan.ins(stage) if c.index in request.channels]

    def _missing(self, request: _Request) -> list[str]:
        plan = self.session.share.plan
        return [
            f"'{channel.port}' from {plan.stages[channel.src].pnode}"
            for stage in request.stages
            for channel in self._ins(request, stage)
            if not channel.local and channel.index not in request.hops
        ]

    def _advance(self, key: Key, request: _Request) -> None:
        if request.asked is None:
            return
        for stage in request.stages:
            if stage in request.queued:
                continue
            ready = all(
                channel.src in request.queued if channel.local else channel.index in request.hops
                for channel in self._ins(request, stage)
            )
            if ready:
                request.queued.add(stage)
                name = f"infer {key[0]} in stage {stage}"
                self.session.submit(
                    self.lane,
                    name,
                    partial(self._compute, request, stage, self._now()),
                    partial(self._computed, key, stage),
                )

    def _compute(self, request: _Request, stage: int, now: float, work: Work) -> _Made:
        asked = request.asked
        assert asked is not None
        if request.inputs is None:
            if asked.split:
                if work.source is None:
                    raise DCNRError("this session has no data here", hint="send the inputs themselves")
                request.inputs = work.source.rows(asked.split, asked.start, asked.count)
            else:
                tensors = unpack(Received(asked.tensors, request.frames), work.device)
                request.inputs = dict(zip(asked.inputs, tensors, strict=True))
        received: dict[int, Tensor] = {}
        for channel in self._ins(request, stage):
            if channel.local:
                received[channel.index] = request.local[channel.index]
            else:
                (received[channel.index],) = unpack(request.hops[channel.index], work.device, channel.codec)
        cache: KVCache | None = None
        if asked.cache or asked.position > 0:
            cache = work.caches.get(asked.request_id, now)
        sends, outputs, count = work.executors[stage].infer(
            received, request.inputs, set(asked.outputs), cache, asked.position
        )
        leaving: dict[int, Packed] = {}
        for channel in self.session.share.plan.outs(stage):
            if channel.index in sends:
                if channel.local:
                    request.local[channel.index] = sends[channel.index]
                else:
                    leaving[channel.index] = pack([sends[channel.index]], channel.codec)
        made = {name: pack([tensor]) for name, tensor in outputs.items()}
        return _Made(leaving, made, count or 0, work.applied)

    def _computed(self, key: Key, stage: int, made: Any, error: BaseException | None) -> None:
        request = self._open.get(key)
        if request is None or request.asked is None:
            return
        if error is not None:
            del self._open[key]
            self._report(request.asked, stage, error)
            return
        assert isinstance(made, _Made)
        request.done.add(stage)
        request.since = self._now()
        share, asked = self.session.share, request.asked
        for index, packed in made.sends.items():
            to = share.plan.stages[self.session.channels[index].dst].pnode
            hop = InferHop(
                asked.request_id, share.session, share.epoch, asked.sequence, index, made.step, list(packed.metas)
            )
            self._send(self.session.deployment.peers[to], hop, packed)
        for name, packed in made.outputs.items():
            output = InferOutput(asked.request_id, asked.sequence, name, made.step, made.count, list(packed.metas))
            self._send(asked.reply_to, output, packed)
        if request.done.issuperset(request.stages):
            del self._open[key]

    def _report(self, asked: InferInput, stage: int, error: BaseException) -> None:
        if isinstance(error, CacheMiss):
            self._failed(asked, "cache-miss", error.message, error.hint or "send the whole prefix again")
        elif isinstance(error, DCNRError):
            self._failed(asked, "compute", error.message, error.hint)
        else:
            self.hub.log.error("inference", error="".join(traceback.format_exception(error)))
            vnode = getattr(error, "vnode", "") or str(self.session.share.plan.stages[stage].nodes[0])
            text, hint = f"{type(error).__name__}: {error}", ""
            if not isinstance(error, Exception):
                action = f"infer {asked.request_id} in stage {stage}"
                text, hint = self.session.thread_ended(action, error), "dcnr status shows the PNodes"
            self._failed(asked, "compute", text, hint, vnode=vnode)

    def _failed(self, asked: InferInput, code: str, text: str, hint: str, *, vnode: str = "") -> None:
        failed = InferFailed(asked.request_id, asked.sequence, self.hub.name, vnode, code, text[:4000], hint)
        self._send(asked.reply_to, failed, None)

    def _send(self, to: PeerRef, message: Message, packed: Packed | None) -> None:
        try:
            self.hub.bus.send(to, message, packed.frames if packed is not None else ())
        except DCNRError as error:
            self.hub.log.warning("unsent", message=type(message).__name__, to=to.id, error=str(error))


def _ignore(_value: Any, _error: BaseException | None) -> None:
    return None
