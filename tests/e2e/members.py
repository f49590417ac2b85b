"""An orchestrator in this process, PNodes in their own, one of which may be strange; and a run to compare with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from networks.load import load
from pnode.data import pack
from storage.blobs import Blobs
from tests.integration.orchestrator.cluster import Cluster
from wire import messages
from wire.ids import new_request_id

NETWORK = "mlp-digits"
SPREAD = {"flat": "p1", "fc1": "p1", "act1": "p1", "fc2": "p2", "act2": "p2", "head": "p3", "loss": "p3"}
COMMAND_S = 60.0


class Members:
    """See the module."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        self.folder = folder
        self.here = Cluster(folder, lease_s=lease_s)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.data = ""

    async def spawn(
        self, name: str, *options: str, strange: Sequence[str] = (), home: str = ""
    ) -> asyncio.subprocess.Process:
        """Start a PNode. `strange`: how, and for how many seconds; see `strange_pnode`."""
        program = ["pnode.main"]
        if strange:
            program = ["tests.e2e.strange_pnode", *strange, str(self.flag(name))]
        place = self.folder / (home or name)
        with open(f"{place}.err", "ab") as errors:  # noqa: ASYNC230
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", *program, "--name", name, "--orchestrator", self.here.address, "--threads", "1",
                "--home", str(place), *options, stdout=errors, stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def flag(self, name: str) -> Path:
        """The file that makes a PNode strange."""
        return self.folder / f"{name}.flag"

    def told(self, name: str) -> str:
        """What a PNode wrote to its standard error."""
        return (self.folder / f"{name}.err").read_text()

    async def until(self, reached: Callable[[], bool], limit_s: float) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(limit_s):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def joined(self, *names: str) -> None:
        """Wait until these are members."""
        membership = self.here.service.membership
        await self.until(lambda: set(names) <= {member.id for member in membership.living()}, 200)

    async def register(self, **sets: Any) -> None:
        """Register the network, and store its data."""
        network = load(NETWORK, sets=[f"{key}={value}" for key, value in sets.items()])
        assert network.recipe.data is not None
        packed = await asyncio.to_thread(pack, network.recipe.data, cache_dir=self.folder / "cache")
        message = messages.PutNetwork(str(new_request_id()), NETWORK, replace=True)
        await self.here.client.ask(message, messages.NetworkInfo, [network.to_bytes()], 60)
        self.data = await Blobs(self.here.store).put_file(packed.path)

    async def train(self, name: str, steps: int, **more: Any) -> None:
        """Begin a run, spread over p1, p2 and p3."""
        fields = {"placement": SPREAD, "pnodes": 0, "checkpoint_every": 20, "seed": 7, **more}
        await self.here.create(NETWORK, name=name, data_digest=self.data, data="digits", steps=steps, **fields)

    async def finished(self, name: str, limit_s: float = 200.0) -> messages.SessionInfo:
        """Wait until a run is over, and take it down."""
        info = await self.here.client.until(name, lambda info: info.state in ("finished", "failed"), limit_s)
        assert info.state == "finished", f"{info.error}\n" + "\n".join(self.told(member) for member in self.processes)
        await self.here.client.act(name, "undeploy")
        return info

    async def story(self, name: str) -> str:
        """Everything that was logged of a run."""
        return "\n".join(f"{event.kind}: {event.text}" for event in await self.here.events(name))

    async def dcnr(self, *arguments: str) -> tuple[int, str, str]:
        """A command as a person gives it: exit code, standard output and error."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "cli.main", *arguments, "--orchestrator", self.here.address,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "DCNR_HOME": str(self.folder / "cli"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        out, err = await asyncio.wait_for(child.communicate(), COMMAND_S)
        assert child.returncode is not None
        return child.returncode, out.decode(), err.decode()

    async def status(self) -> dict[str, dict[str, Any]]:
        """The PNodes as `dcnr status` shows them."""
        code, out, err = await self.dcnr("status", "-o", "json")
        assert code == 0, err
        return {node["pnode"]: node for node in json.loads(out)["pnodes"]}


@asynccontextmanager
async def members(
    folder: Path, *names: str, lease_s: float, strange: dict[str, Sequence[str]] | None = None,
    options: dict[str, Sequence[str]] | None = None,
) -> AsyncIterator[Members]:  # fmt: skip
    """A cluster of these PNodes; everything ends with it."""
    made = Members(folder, lease_s)
    await made.here.up()
    try:
        for name in names:
            made.processes[name] = await made.spawn(
                name, *(options or {}).get(name, ()), strange=(strange or {}).get(name, ())
            )
        await made.joined(*names)
        await made.register()
        yield made
    finally:
        for process in made.processes.values():
            if process.returncode is None:
                process.terminate()
        for process in made.processes.values():
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()
        await made.here.down()
    assert not made.here.bugs, made.here.bugs[0]
