"""Where the world listens in on the shipped code, and what it takes from the machine's chance and clock.

Nothing here changes what the product decides: random numbers come from the seed, what is costly and always the same is
done once (reading a network's bytes, asking what processor this is), and state machines and updates are observed.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
from torch import Tensor

import orchestrator.membership
import pnode.daemon
import wire.ids
from networks.network import Network
from orchestrator.sessions import Session
from pnode.core import Core
from pnode.events import Job, JobKind
from pnode.vnodes import VNodes
from pnode.work import Work
from tests.sim.history import Computed
from tests.sim.life import LIFE
from tests.sim.record import Recorder
from tests.sim.truth import digest_of_weights

ENVIRONMENT = ["torch sim", "device cpu", "cpu sim", "threads 1"]

_networks: dict[bytes, Network] = {}
_read_network = Network.from_bytes


class _Rss:
    rss = 1 << 20


class _Process:
    def memory_info(self) -> _Rss:
        """The same for all."""
        return _Rss()


@contextlib.contextmanager
def taps(recorder: Recorder, seed: int) -> Iterator[None]:
    """Listen in while the world runs."""
    pick = random.Random(f"chance/{seed}")
    ids = wire.ids.new_request_id
    kept_ids = (ids._prefix, ids._count)
    state = random.getstate()
    random.seed(seed)
    ids._prefix, ids._count = f"sim{seed}", 0
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        owner = next((base for base in getattr(owner, "__mro__", ()) if name in base.__dict__), owner)
        changed.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    change(uuid, "uuid4", lambda: uuid.UUID(int=pick.getrandbits(128), version=4))
    change(secrets, "token_hex", lambda count=16: pick.randbytes(count).hex())
    change(secrets, "randbits", pick.getrandbits)
    change(wire.ids, "time", SimpleNamespace(time=lambda: 1e6 + recorder.now()))
    change(psutil, "Process", _Process)
    change(pnode.daemon, "environment", lambda device, threads: list(ENVIRONMENT))
    change(Network, "from_bytes", classmethod(_known_network))
    change(Work, "run", _observed_work(Work.run, recorder))
    change(Session, "_go", _observed(Session._go, recorder, "session", lambda s: s.record.state))
    change(Session, "_stage", _observed(Session._stage, recorder, "stage", lambda s: s.stage.value))
    change(Core, "_go", _observed(Core._go, recorder, "core", lambda c: c.state.value))
    move = orchestrator.membership._move
    change(orchestrator.membership, "_move", _observed(move, recorder, "member", lambda m: m.state.value))
    try:
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)
        ids._prefix, ids._count = kept_ids
        random.setstate(state)


def _known_network(cls: type[Network], data: bytes | bytearray | memoryview) -> Network:
    """Networks are frozen: the same bytes give the same one."""
    found = _networks.get(bytes(data))
    if found is None:
        found = _networks[bytes(data)] = _read_network(data)
    return found


def _observed(change: Callable[..., Any], recorder: Recorder, kind: str, state: Callable[[Any], str]) -> Any:
    """A state machine's one function that changes its state."""

    def observed(machine: Any, *args: Any, **kwargs: Any) -> Any:
        before = state(machine)
        found = change(machine, *args, **kwargs)
        recorder.visit(f"{kind} {before}>{state(machine)}")
        return found

    return observed


def _observed_work(run: Callable[..., Any], recorder: Recorder) -> Any:
    """The compute side's jobs: updates are recorded with what they left behind."""

    notes: dict[int, tuple[str, float]] = {}

    def observed(work: Work, job: Job, inputs: Any) -> Any:
        done = run(work, job, inputs)
        if job.kind is JobKind.REPORT:
            notes[id(work)] = (done.note, done.loss / done.count if done.count else 0.0)
        elif job.kind is JobKind.UPDATE and recorder.open:
            life = LIFE.get()
            assert life is not None
            note, loss = notes.pop(id(work), ("", 0.0))
            share = work.share
            recorder.computed(
                Computed(
                    recorder.now(), life.name, life.boot, share.session, share.epoch, job.step + 1,
                    weights_of(work.vnodes), note, loss,
                )
            )  # fmt: skip
        return done

    return observed


def weights_of(vnodes: VNodes) -> dict[str, str]:
    """Digest of the parameters and buffers of each VNode here that owns any."""
    found: dict[str, dict[str, Tensor]] = {}
    for _, node, name, parameter in vnodes.parameters:
        found.setdefault(str(node), {})[name] = parameter
    for node, module in vnodes.modules.items():
        for name, buffer in module.named_buffers():
            found.setdefault(str(node), {})[name] = buffer
    return {node: digest_of_weights(tensors) for node, tensors in found.items()}
