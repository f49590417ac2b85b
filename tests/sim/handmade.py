"""Histories made by hand, for tests of the checker: a tiny cluster told event by event, with every object's bytes.

Two VNodes, `a` on p1 and `b` on p2; the loss is on p2. Nothing here knows the product; formats are written out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tests.sim.history import Computed, Delivered, Fault, History, Process, Told, Truth, Wrote

SESSION = "run-1"
PREFIX = f"networks/net/sessions/{SESSION}/"
RECORD = f"registry/sessions/{SESSION}.json"
PLACEMENT = {"a": "p1", "b": "p2"}
ORCHESTRATOR = ("orch", 1)


def digest(text: str | bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def sealed(body: Mapping[str, Any]) -> bytes:
    """The stored form of a control object."""
    raw = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f'{{"sha256":"{digest(raw)}","body":{raw}}}\n'.encode()


def part_bytes(vnode: str, step: int) -> bytes:
    """What stands for the state of a VNode after a step."""
    return f"state of {vnode} after {step}".encode()


def manifest_body(step: int, epoch: int, term: int, parent: str) -> dict[str, Any]:
    """A manifest as it should be."""
    parts = [[vnode, digest(part_bytes(vnode, step)), len(part_bytes(vnode, step))] for vnode in PLACEMENT]
    return {
        "session": SESSION, "network": "net", "network_digest": "0" * 64, "step": step, "parts": parts,
        "data": {"step": step, "samples": 4 * step}, "counters": {"step": step}, "epoch": epoch, "term": term,
        "parent": parent,
    }  # fmt: skip


def state_hash(body: Mapping[str, Any]) -> str:
    """The hash of a checkpoint's state."""
    state = {
        "network": body["network_digest"],
        "step": body["step"],
        "parts": sorted([vnode, sha] for vnode, sha, _ in body["parts"]),
        "data": body["data"],
        "counters": body["counters"],
    }
    return digest(json.dumps(state, sort_keys=True, separators=(",", ":")))


def truth(steps: int) -> Truth:
    """The undisturbed run."""
    every = range(1, steps + 1)
    return Truth(
        steps,
        {step: {vnode: digest(f"{vnode}@{step}") for vnode in PLACEMENT} for step in every},
        {step: digest(f"samples of {step}") for step in every},
        {step: 1.0 / step for step in every},
        {step: state_hash(manifest_body(step, 0, 0, "")) for step in every},
    )


class Story:
    """Tells a history; each method is one thing that happens."""

    def __init__(self, steps: int = 4) -> None:
        self.t = 0.0
        self.steps = steps
        self.history = History(7, truth(steps), SESSION, steps)
        self.truth = self.history.truth
        self.boots = {"orch": 1, "p1": 11, "p2": 12, "client": 5}
        self.term = 1
        self.epoch = 0
        self.start = 0
        self.committed = 0
        self.parent = ""
        self.placement = dict(PLACEMENT)
        self.incarnations = {"p1": 1, "p2": 1}

    def add(self, event: Any) -> None:
        """Append an event."""
        self.history.events.append(event)

    def later(self, seconds: float = 0.1) -> float:
        """Time passes."""
        self.t = round(self.t + seconds, 6)
        return self.t

    # ------------------------------------------------------------ things that happen

    def process(self, who: str, what: str, boot: int = 0) -> None:
        """A process begins or ends."""
        if what == "start" and boot:
            self.boots[who] = boot
        self.add(Process(self.later(), who, boot or self.boots[who], what))

    def fault(self, kind: str, where: str) -> None:
        """The world does something."""
        self.add(Fault(self.later(), kind, where, 1.0))

    def write(self, who: str, key: str, data: bytes, *, how: str = "put", boot: int = 0, sha: str = "") -> None:
        """A write becomes visible. `sha`: what the store really holds, if other bytes."""
        kept = data if key.endswith(".json") else b""
        there = sha or digest(data)
        self.add(Wrote(self.later(), who, boot or self.boots[who], how, key, there, len(data), kept))
        self.history.store[key] = (there, len(data))

    def delete(self, who: str, key: str) -> None:
        """A deletion becomes visible."""
        self.add(Wrote(self.later(), who, self.boots[who], "delete", key, "", 0))
        self.history.store.pop(key, None)

    def deliver(self, src: str, dst: str, kind: str, **fields: Any) -> None:
        """A message is handed over."""
        self.add(Delivered(self.later(), src, self.boots[src], dst, self.boots[dst], kind, fields))

    def told(self, what: str, **more: Any) -> None:
        """The client hears something."""
        self.add(Told(self.later(), SESSION, what, **more))

    # ------------------------------------------------------------ what orchestrators write

    def take_over(self, who: str = "orch", term: int = 1) -> None:
        """A term is taken."""
        self.term = term
        self.write(who, "registry/term.json", sealed({"cluster": "c", "term": term}), how="if_match")

    def grant(self, pnode: str, number: int, who: str = "orch") -> None:
        """An incarnation becomes durable, and is told."""
        self.incarnations[pnode] = number
        body = sealed({"granted": self.incarnations})
        self.write(who, "registry/incarnations.json", body, how="if_match")
        self.deliver(who, pnode, "Registered", incarnation=number, term=self.term)

    def record(self, who: str = "orch", **changed: Any) -> None:
        """The session's record is written."""
        body = {
            "session": SESSION, "state": "running", "epoch": self.epoch, "step": 0, "committed": self.committed,
            "keep": 2, "steps": self.steps, "start_step": self.start, "placement": self.placement,
            "incarnations": self.incarnations if self.epoch else {},
        } | changed  # fmt: skip
        self.write(who, RECORD, sealed(body), how="if_match")

    def new_epoch(self, start: int, who: str = "orch", placement: Mapping[str, str] | None = None) -> None:
        """An epoch begins."""
        self.epoch += 1
        self.start = start
        self.placement = dict(placement or self.placement)
        self.record(who)
        for pnode in dict.fromkeys(self.placement.values()):
            self.deliver(who, pnode, "Prepare", session=SESSION, epoch=self.epoch, term=self.term)

    # ------------------------------------------------------------ what PNodes do

    def apply(self, pnode: str, step: int, *, boot: int = 0, **changed: Any) -> None:
        """One PNode's U(step)."""
        mine = [vnode for vnode, where in self.placement.items() if where == pnode]
        loss = self.placement["b"] == pnode
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "weights": {vnode: self.truth.weights[step][vnode] for vnode in mine},
            "samples": self.truth.samples[step] if loss else "",
            "loss": self.truth.losses[step] if loss else 0.0,
        } | changed
        self.add(Computed(self.later(), pnode, boot or self.boots[pnode], SESSION, step=step, **fields))

    def step(self, step: int) -> None:
        """Every PNode's U(step)."""
        for pnode in dict.fromkeys(self.placement.values()):
            self.apply(pnode, step)

    def parts(self, step: int, but: str = "") -> None:
        """The parts of a cut reach the store."""
        for vnode, pnode in self.placement.items():
            if vnode != but:
                data = part_bytes(vnode, step)
                self.write(pnode, f"{PREFIX}parts/{digest(data)}.safetensors", data)

    def manifest(self, step: int, who: str = "orch", **changed: Any) -> tuple[str, str, str]:
        """A manifest is written: its key, digest and hash."""
        body = manifest_body(step, self.epoch, self.term, self.parent) | changed
        data = json.dumps(body, sort_keys=True).encode()
        key = f"{PREFIX}manifests/{step:010d}-{digest(data)}.json"
        self.write(who, key, data)
        return key, digest(data), state_hash(body)

    def head(self, step: int, named: tuple[str, str, str], who: str = "orch", **changed: Any) -> None:
        """The head moves."""
        key, sha, state = named
        body = {
            "step": step, "epoch": self.epoch, "term": self.term, "manifest_key": key, "manifest_digest": sha,
            "hash": state,
        } | changed  # fmt: skip
        self.write(who, f"{PREFIX}head.json", sealed(body), how="if_match")
        self.parent = key

    def commit(self, step: int, who: str = "orch") -> None:
        """A cut is saved, committed and told."""
        self.parts(step)
        self.head(step, self.manifest(step, who), who)
        self.committed = step
        for pnode in dict.fromkeys(self.placement.values()):
            self.deliver(who, pnode, "Committed", session=SESSION, epoch=self.epoch, step=step)
        self.record(who)
        self.told("committed", step=step)

    # ------------------------------------------------------------ whole stretches

    def begin(self) -> Story:
        """A cluster stands, and the session is created and placed."""
        for who in self.boots:
            self.process(who, "start")
        self.take_over()
        for pnode in ("p1", "p2"):
            self.grant(pnode, 1)
        self.record(state="created", placement={}, incarnations={})
        self.told("state", state="created")
        self.told("state", state="starting")
        self.new_epoch(0)
        self.told("state", state="running")
        return self

    def finish(self) -> History:
        """The run is over."""
        self.record(state="finished")
        self.told("state", state="finished", step=self.steps)
        self.history.ended = "finished"
        self.history.end_s = self.later()
        return self.history


def good(steps: int = 4) -> Story:
    """A run with a kill, a recovery and a take-over, up to its last step."""
    story = Story(steps).begin()
    story.step(1)
    story.commit(1)
    story.step(2)
    story.fault("kill", "p1")
    story.process("p1", "kill")
    story.told("state", state="recovering")
    story.process("p1", "start", boot=13)
    story.grant("p1", 2)
    story.new_epoch(1)
    story.told("state", state="running")
    story.step(2)
    story.commit(2)
    story.fault("kill", "orch")
    story.process("orch", "kill")
    story.process("orch", "start", boot=2)
    story.take_over(term=2)
    for step in range(3, steps + 1):
        story.step(step)
        story.commit(step)
    return story
