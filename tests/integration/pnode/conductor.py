"""The least orchestrator that PNodes need, and PNodes as real processes; for tests of the PNode alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from networks.network import Network
from storage.blobs import Blobs
from storage.checkpoints import Manifest, commit, read_head
from storage.open import open_store
from wire.ids import new_request_id
from wire.messages import (
    Committed,
    Deployment,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    HoldRun,
    Message,
    Ok,
    Part,
    PartsSaved,
    PeerRef,
    Prepare,
    Progress,
    Refused,
    Register,
    Registered,
    Release,
    RunFailed,
    RunHeld,
    StartRun,
    StepReport,
)
from wire.zmq_bus import ZmqBus

PREFIX = "networks/{network}/sessions/{session}/"


class Conductor:
    """Admits every PNode, deploys, starts, and remembers what it is told."""

    def __init__(self, home: Path, *, bind: str = "tcp://127.0.0.1:0", term: int = 1) -> None:
        self.home = home
        self.store = open_store(str(home / "store"))
        self.bus = ZmqBus("conductor", bind=bind)
        self.peers: dict[str, PeerRef] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.steps: dict[str, list[StepReport]] = {}
        self.held: dict[str, dict[str, int]] = {}
        self.failed: list[RunFailed] = []
        self.parts: dict[tuple[str, int], dict[str, list[Part]]] = {}
        self.gone: list[str] = []
        self.deployments: dict[str, Deployment] = {}
        self.epochs: dict[str, int] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.changed = asyncio.Condition()
        self.refuse: str = ""
        self.deaf = False
        self.term = term
        self.cluster = "test"
        self.incarnations: dict[str, int] = {}
        self.commits: set[str] = set()
        """Sessions whose cuts are committed as soon as they are whole."""
        self._committed: dict[str, int] = {}
        self._committing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()

    def take_over(self, other: Conductor) -> None:
        """Know what another one had in its store, and nothing that it was told."""
        self.deployments, self.epochs = other.deployments, other.epochs
        self.processes, self.commits = other.processes, set(other.commits)

    @property
    def store_url(self) -> str:
        return f"file://{self.home / 'store'}"

    def _spawn(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _whole(self, session: str, step: int) -> bool:
        members = set(self.deployments[session].placement.values())
        return self.parts.get((session, step), {}).keys() == members

    def committed(self, session: str) -> int:
        return self._committed.get(session, 0)

    async def _commit_new(self, session: str, step: int) -> None:
        async with self._committing:
            head = await read_head(self.store, self.deployments[session].store_prefix)
            if self._whole(session, step) and (head is None or head.step < step):
                await self.commit(session, step)
                await self._notify()

    async def start(self) -> None:
        self.bus.on_message(self._on_message)
        self.bus.on_loss(lambda peer, reason: None)
        await self.bus.start()

    @property
    def address(self) -> str:
        return self.bus.me.addresses[0]

    async def spawn(
        self, name: str, *extra: str, program: Sequence[str] = ("pnode.main",)
    ) -> asyncio.subprocess.Process:
        """Start a PNode. `program`: what is run instead, and its own arguments."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.home / f"{name}.err", "ab") as errors:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *program, "--name", name, "--orchestrator", self.address, "--threads", "1",
                "--home", str(self.home / name), *extra, env=environment, stderr=errors,
            )  # fmt: skip
        self.processes[name] = process
        return process

    async def until(self, what: object, timeout_s: float = 120.0) -> None:
        """Wait until `what()` is true. Fails with what the PNodes said."""
        try:
            async with asyncio.timeout(timeout_s), self.changed:
                await self.changed.wait_for(what)  # type: ignore[arg-type]
        except TimeoutError:
            raise AssertionError(f"not in {timeout_s} s; failed {self.failed}; {self.beats}; {self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.home.glob("*.err")))

    def _on_message(self, sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        match message:
            case Register():
                if self.refuse:
                    self.bus.send(sender, Refused(message.request_id, "held", self.refuse))
                    return
                self.peers[message.pnode] = message.peer
                number = self.incarnations.setdefault(message.pnode, 1)
                answer = Registered(message.request_id, number, self.term, 10.0, 0.2, self.store_url, self.cluster)
                self.bus.send(sender, answer)
            case Heartbeat():
                self.beats[message.pnode] = message
                if not self.deaf:
                    self.bus.send(sender, HeartbeatAck(message.incarnation, self.term, True))
            case Progress():
                self.steps.setdefault(message.session, []).extend(message.steps)
            case RunHeld():
                self.held.setdefault(message.session, {})[message.pnode] = message.step
            case RunFailed():
                self.failed.append(message)
            case PartsSaved():
                found = self.parts.setdefault((message.session, message.step), {})
                found[message.pnode] = msgspec.msgpack.decode(frames[0], type=list[Part])
                if message.session in self.commits and self._whole(message.session, message.step):
                    self._spawn(self._commit_new(message.session, message.step))
            case Goodbye():
                self.gone.append(message.pnode)
        self._spawn(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def put(self, network: Network, data: bytes) -> tuple[str, str]:
        blobs = Blobs(self.store)
        return await blobs.put(network.to_bytes()), await blobs.put(data)

    async def deploy(
        self, session: str, network: Network, data_digest: str, placement: dict[str, str], **options: object
    ) -> Deployment:
        epoch = self.epochs[session] = self.epochs.get(session, 0) + 1
        for key in [key for key in self.parts if key[0] == session]:
            del self.parts[key]
        prefix = PREFIX.format(network=network.id, session=session)
        fields: dict[str, object] = {
            "session": session, "network": network.id, "network_digest": network.digest, "placement": placement,
            "peers": {name: self.peers[name] for name in dict.fromkeys(placement.values())},
            "incarnations": dict.fromkeys(placement.values(), 1), "orchestrator": self.bus.me,
            "data_digest": data_digest, "tokenizer_digest": "", "steps": network.recipe.steps,
            "seed": network.recipe.seed, "start_step": 0, "manifest_digest": "", "manifest_key": "",
            "store_prefix": prefix, "checkpoint_every": 0,
        }  # fmt: skip
        deployment = self.deployments[session] = Deployment(**{**fields, **options})  # type: ignore[arg-type]
        body = msgspec.msgpack.encode(deployment)
        await asyncio.gather(
            *(
                self.bus.ask(peer, Prepare(str(new_request_id()), session, epoch, 0, self.term), [body], timeout_s=60)
                for peer in deployment.peers.values()
            )
        )
        self.held.pop(session, None)
        return deployment

    async def redeploy(
        self, session: str, network: Network, data_digest: str, placement: dict[str, str], **options: object
    ) -> Deployment:
        """Deploy anew from the head: the next epoch."""
        async with self._committing:
            head = await read_head(self.store, self.deployments[session].store_prefix)
        assert head is not None, "nothing was committed"
        return await self.deploy(
            session, network, data_digest, placement, start_step=head.step, manifest_digest=head.manifest_digest,
            manifest_key=head.manifest_key, **options,
        )  # fmt: skip

    def prepared(self, pnode: str, session: str) -> list[dict[str, Any]]:
        """What a PNode's log says of each preparation of a session."""
        lines = (self.home / pnode / f"{pnode}.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if '"prepared"' in line]
        return [line for line in found if line["session"] == session]

    async def kill(self, name: str) -> None:
        """SIGKILL, and out of the books."""
        process = self.processes.pop(name)
        process.kill()
        await process.wait()
        self.peers.pop(name)
        self.beats.pop(name, None)

    async def run(self, session: str, until: int) -> None:
        self.held.pop(session, None)
        for peer in self.deployments[session].peers.values():
            message = StartRun(str(new_request_id()), session, self.epochs[session], self.term, until)
            answer, _ = await self.bus.ask(peer, message, timeout_s=10)
            assert isinstance(answer, Ok)

    async def hold(self, session: str, pnode: str, save: bool) -> None:
        message = HoldRun(str(new_request_id()), session, self.epochs[session], self.term, save)
        await self.bus.ask(self.peers[pnode], message, timeout_s=10)

    async def release(self, session: str) -> None:
        for peer in self.deployments[session].peers.values():
            message = Release(str(new_request_id()), session, self.epochs[session], self.term)
            await self.bus.ask(peer, message, timeout_s=10)

    def all_held(self, session: str, step: int) -> bool:
        members = set(self.deployments[session].placement.values())
        return self.held.get(session) == dict.fromkeys(members, step)

    async def commit(self, session: str, step: int) -> Manifest:
        """Commit a cut once every PNode's parts are there."""
        deployment = self.deployments[session]
        await self.until(lambda: self._whole(session, step))
        head = await read_head(self.store, deployment.store_prefix)
        parts = sorted((p for ps in self.parts[session, step].values() for p in ps), key=lambda p: p.vnode)
        manifest = Manifest(
            session, deployment.network, deployment.network_digest, step, parts, epoch=self.epochs[session],
            parent=head.manifest_key if head else "",
        )  # fmt: skip
        await commit(self.store, deployment.store_prefix, manifest, head)
        self._committed[session] = step
        for peer in deployment.peers.values():
            self.bus.send(peer, Committed(session, self.epochs[session], 0, step))
        return manifest

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await self.bus.close()
        await self.store.close()
