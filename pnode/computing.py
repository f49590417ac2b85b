"""The compute threads of this PNode, one per device: started, watched, and replaced when one has died.

A dead thread is reported for a while before a fresh one takes its place, longer after each death, so that its work goes
elsewhere first and a VNode that kills threads can't do so in a circle. A thread that hangs can't be replaced: what it
does may end at any time and then use the device. When it ends, its result is dropped with the session's epoch, and the
thread is as good as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import structlog
import torch

from pnode.compute_thread import ComputeStatus, ComputeThread
from pnode.deploy import in_compute
from pnode.measure import measure_flops
from pnode.optimize import warm_up
from wire.errors import UnreachableError

ORDER = {"dead": 3, "stalled": 2, "busy": 1, "idle": 0}
REVIVE_S, MAX_REVIVE_S = 10.0, 600.0


class Computing:
    """See the module. `make`: gives a thread, not started, by the device's name. `limit_s`: of one action."""

    def __init__(
        self, devices: Sequence[torch.device], make: Callable[[str], ComputeThread], clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger, limit_s: float,
    ) -> None:  # fmt: skip
        self.devices = list(devices)
        self.threads: list[ComputeThread] = []
        self._make = make
        self._clock = clock
        self._log = log
        self._limit_s = limit_s
        self._died: dict[int, float] = {}  # place -> when a fresh thread may be started
        self._pause_s = [REVIVE_S] * len(self.devices)

    async def start(self, *, measure: bool) -> float:
        """Start all threads; with `measure` also warm them up and give their float32 operations per second."""
        flops = 0.0
        for device in self.devices:
            compute = self._make(str(device))
            compute.start()
            self.threads.append(compute)
            if measure:
                await in_compute(compute, "warm up", partial(warm_up, device))
                flops += await in_compute(compute, "measure", partial(measure_flops, device))
        return flops

    def status(self) -> ComputeStatus:
        """The worst of all threads."""
        return max((compute.status() for compute in self.threads), key=lambda status: ORDER[status.state])

    def check(self) -> None:
        """Report dead threads, and replace those that were reported for long enough."""
        now = self._clock()
        for place, compute in enumerate(self.threads):
            status = compute.status()
            if status.state != "dead":
                continue
            if place not in self._died:
                self._died[place] = now + self._pause_s[place]
                self._pause_s[place] = min(2 * self._pause_s[place], MAX_REVIVE_S)
                self._log.error("compute thread is dead", device=compute.name, doing=status.doing)
            elif now >= self._died[place]:
                del self._died[place]
                self._revive(place, compute.name)

    def _revive(self, place: int, name: str) -> None:
        fresh = self._make(name)
        try:
            fresh.start()
        except RuntimeError as error:  # no thread can be had: it stays dead, and is tried again later
            self._log.error("no fresh compute thread", device=name, error=str(error))
            return
        self.threads[place] = fresh
        self._log.warning("a fresh compute thread", device=name)

    def least_used(self, used: Sequence[ComputeThread]) -> tuple[ComputeThread, torch.device]:
        """The healthy device that occurs least in `used`. Raises UnreachableError if none is healthy."""
        states = [compute.status() for compute in self.threads]
        places = [i for i, status in enumerate(states) if status.state != "dead" and status.seconds <= self._limit_s]
        if not places:
            status = self.status()
            text = f"the compute thread is {status.state}: {status.doing}, for {status.seconds:.0f} s"
            raise UnreachableError(text, hint="restart this PNode, or wait until it ends")
        counts = {place: sum(each is self.threads[place] for each in used) for place in places}
        place = min(places, key=lambda one: counts[one])
        return self.threads[place], self.devices[place]
