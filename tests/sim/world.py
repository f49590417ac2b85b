"""The simulated world: the shipped orchestrator, PNodes, an operator and a store in one process, in virtual time.

    history = run(7)                                  # everything comes from the seed
    python -m tests.sim.world 7 --trace               # the same, as a story

A run ends when the operator has seen it finish, or, long after the last fault was over, when it has not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from tests.sim.client import Client
from tests.sim.drawing import draw
from tests.sim.faults import Injector
from tests.sim.history import History
from tests.sim.life import Stand, WorldLoop
from tests.sim.nets import built
from tests.sim.network import WorldNetwork, nobody
from tests.sim.plan import Plan
from tests.sim.processes import ORCHESTRATOR, Machine, Machines
from tests.sim.record import Recorder, digest_of_history
from tests.sim.store import SimStore
from tests.sim.taps import taps
from tests.sim.truth import truth_of

logging.getLogger("stamina").setLevel(logging.ERROR)  # tries anew are no news here

Patch = Callable[[], AbstractContextManager[object]]
"""Changes the shipped code while a run lasts; for planted bugs."""

SESSION = "run"


class World:
    """See the module."""

    def __init__(self, seed: int, plan: Plan, loop: WorldLoop, recorder: Recorder, folder: Path) -> None:
        self.seed, self.plan, self.loop, self.recorder, self.folder = seed, plan, loop, recorder, folder
        self.session = SESSION
        self.built = built(plan.network)
        self.over = False
        self.network = WorldNetwork(loop, seed, recorder, plan.line)
        self.network.hints = plan.hints
        self.machines = Machines(self)
        self.store = SimStore(loop, seed, recorder, lambda: 1_000_000.0 + loop.time())
        self.client = Client(self)
        self.operator = self.machines.add("client", "client")
        self.orchestrators: list[Machine] = [self.machines.add(ORCHESTRATOR, "orchestrator")]
        self.pnodes = [self.machines.add(f"p{n + 1}", "pnode") for n in range(plan.pnodes + plan.spares)]
        for machine, slowness in zip(self.pnodes, plan.slowness, strict=False):
            machine.slowness = slowness
        self.injector = Injector(self)

    async def live(self) -> str:
        """Everything, from the first start to the end: "finished", or what was still awaited."""
        for machine in [*self.orchestrators, *self.pnodes[: self.plan.pnodes], self.operator]:
            machine.wanted = True
            self.machines.start(machine)
        self.injector.begin()
        limit_s = self.plan.healed_s + self.plan.give_up_s
        try:
            async with asyncio.timeout(limit_s):
                await self.client.finished.wait()
        except TimeoutError:
            last = self.client.last
            seen = f"{last.state} at step {last.step}, {last.committed} committed" if last is not None else "nothing"
            return f"not finished after {limit_s:.0f} s; the operator last saw: {seen}"
        return "finished"

    def waiting(self) -> list[str]:
        """What the operator was last shown."""
        return list(self.client.last.waiting) if self.client.last is not None else []

    def end(self) -> None:
        """Let go of everything. What the processes still do on their way out has no effect."""
        self.over = True
        self.recorder.open = False
        self.store.gone = True
        for machine in self.machines.by_name.values():
            self.machines.kill(machine)
        for life in self.machines.lives:
            life.stand = Stand.RUNS
            self.loop.thaw(life)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coroutines that never began
            self.loop.finish()


def plan_of(seed: int) -> Plan:
    """The plan of a seed, with its faults."""
    return draw(seed)


def run(
    seed: int, *, plan: Plan | None = None, patches: Sequence[Patch] = (), trace: list[str] | None = None
) -> History:
    """One run. `plan`: instead of the seed's own. `trace`: lines for people are added to it."""
    plan = plan if plan is not None else plan_of(seed)
    truth = truth_of(plan.network)
    loop = WorldLoop()
    recorder = Recorder(loop.time)
    recorder.trace = trace
    history = History(seed, truth, SESSION, truth.steps, recorder.events)
    folder = Path(tempfile.mkdtemp(prefix="dcnr-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    collecting = gc.isenabled()
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(taps(recorder, seed))
            for patch in patches:
                stack.enter_context(patch())
            asyncio.set_event_loop(loop)
            world = World(seed, plan, loop, recorder, folder)
            try:
                history.ended = loop.run_until_complete(loop.create_task(world.live(), context=nobody()))
                history.end_s = loop.time()
                history.healed_s = world.injector.healed_s
                history.waiting = world.waiting()
                history.store = {key: (kept.etag, len(kept.data)) for key, kept in sorted(world.store.objects.items())}
                history.objects = {k: kept.data for k, kept in world.store.objects.items() if k.endswith(".json")}
                for failure in loop.failures:
                    recorder.error(_failure(failure))
            finally:
                history.errors, history.visited = recorder.errors, recorder.visited
                world.end()
    finally:
        asyncio.set_event_loop(None)
        shutil.rmtree(folder, ignore_errors=True)
        if collecting:
            gc.enable()
    return history


def _failure(context: dict[str, object]) -> str:
    import traceback

    error = context.get("exception")
    text = "".join(traceback.format_exception(error)[-4:]) if isinstance(error, BaseException) else ""
    return f"{context.get('message')}: {error!r}\n{text}"


def story(history: History, lines: Sequence[str], plan: Plan) -> str:
    """A run for people: its plan, what happened, and how it ended."""
    return "\n".join(
        [
            f"seed {history.seed}", plan.text(), *lines,
            f"{history.ended}; {history.end_s:.1f} virtual seconds, healed at {history.healed_s:.1f}",
            *(f"waiting: {line}" for line in history.waiting), *(f"error: {line}" for line in history.errors),
            f"history {digest_of_history(history)[:16]}",
        ]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.world", description="One simulated run.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--trace", action="store_true", help="tell what happened")
    parser.add_argument("--calm", action="store_true", help="without faults")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--check", action="store_true", help="judge the history")
    arguments = parser.parse_args(argv)
    plan = plan_of(arguments.seed)
    if arguments.calm:
        plan = replace(plan, faults=(), healed_s=0.0)
    lines: list[str] = []
    if arguments.profile:
        import cProfile
        import pstats

        run(arguments.seed, plan=plan)
        profile = cProfile.Profile()
        history = profile.runcall(run, arguments.seed, plan=plan)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    else:
        history = run(arguments.seed, plan=plan, trace=lines if arguments.trace else None)
    print(story(history, lines, plan))
    if arguments.check:
        from tests.sim.checker import check

        for breach in check(history):
            print(breach)
    return 0 if history.ended == "finished" and not history.errors else 1


if __name__ == "__main__":
    sys.exit(main())
