"""What any placement costs: time per step, bytes on the wire, memory. Pure.

A step is played through with the shipped stages and the 1F1B order, one microbatch after the other:

- A stage's F(m) takes `sum(forward operations) / (M * speed) + nodes * node_s`; B(m) likewise with the backward ones.
- F(m) starts when the hops of microbatch m have arrived, the stage's schedule is there (window: 1 on the last level,
  else min(M, levels - level + 1)), and the PNode's one compute thread and one of its host's cores are free.
- A hop leaves when its maker has finished and the sender's link is free; it takes
  `bytes / min(links)` on the link, coded bytes where its edges have a codec, and arrives `latency + hop_s` later. So
  the wire is hidden behind compute wherever the schedule has other work, and what it can't hide shows as waiting.
- The step ends with reports and verdict (two hops of the largest latency, where there is more than one PNode), the
  slowest update, ties (gradient there, new version back), and `step_s`.

    step_s = makespan(F, B) + verdict + max over PNodes(update) + max over PNodes(ties) + Calibration.step_s
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from networks.codecs import CodedGroup
from networks.graph import NodeId
from networks.stages import StagePlan, cut_stages
from orchestrator.coding import channel_bytes, coded_groups, fixed_groups
from orchestrator.work import Machine, Value, Work, with_gradient


@dataclass(frozen=True, slots=True)
class Forecast:
    """A placement's costs per step. `wire_bytes`: by (source, destination) PNode.

    `coded`: the groups that it assumes, `coded_because` why.
    """

    step_s: float
    makespan_s: float
    compute_s: dict[str, float]
    wire_bytes: dict[tuple[str, str], int]
    memory_bytes: dict[str, int]
    levels: int
    coded: tuple[CodedGroup, ...] = ()
    coded_because: tuple[str, ...] = ()

    @property
    def total_wire_bytes(self) -> int:
        """Bytes between all PNodes."""
        return sum(self.wire_bytes.values())


def predict_step_s(
    placement: Mapping[NodeId, str],
    work: Work,
    machines: Sequence[Machine],
    *,
    cores: Mapping[str, int] | None = None,
) -> float:
    """Seconds of one training step under `placement` (any placement); see the module's docstring for the formula.

    `cores`: by host, how many PNodes can compute at once there; hosts that aren't named have enough.
    """
    return forecast(placement, work, machines, cores=cores).step_s


def forecast(
    placement: Mapping[NodeId, str],
    work: Work,
    machines: Sequence[Machine],
    *,
    cores: Mapping[str, int] | None = None,
) -> Forecast:
    """All costs of `placement`. Raises KeyError naming a node without a place or a PNode that isn't in `machines`."""
    by_id = {machine.id: machine for machine in machines}
    coded, because = coded_groups(work, placement, machines)
    plan = cut_stages(work.graph, placement, coded)
    used = {by_id[stage.pnode].id: by_id[stage.pnode] for stage in plan.stages}
    play = _Play(work, plan, used, dict(cores or {}))
    makespan = play.run()
    update, compute, memory = dict.fromkeys(used, 0.0), dict.fromkeys(used, 0.0), dict.fromkeys(used, 0)
    calibration = work.calibration
    for stage in plan.stages:
        flight = window(stage.level, plan.levels, work.microbatches)
        for node in stage.nodes:
            order = work.order[node]
            update[stage.pnode] += work.update[order] / used[stage.pnode].speed
            update[stage.pnode] += work.tensors[order] * calibration.tensor_s
            memory[stage.pnode] += work.static_bytes[order] + flight * work.stash_bytes[order]
        compute[stage.pnode] += work.microbatches * (play.forward_s[stage.index] + play.backward_s[stage.index])
    wire = play.wire_bytes
    tie_s = dict.fromkeys(used, 0.0)
    for owner, user, value in _remote_ties(work, placement):
        link = min(used[owner].link_bytes_s, used[user].link_bytes_s)
        latency = used[owner].latency_s + used[user].latency_s
        tie_s[user] += value.step_bytes / link + latency + 2 * calibration.hop_s
        wire[user, owner] = wire.get((user, owner), 0) + value.step_bytes // 2
        wire[owner, user] = wire.get((owner, user), 0) + value.step_bytes // 2
        memory[user] += value.held_bytes
    verdict = 2 * (max(one.latency_s for one in used.values()) + calibration.hop_s) if len(used) > 1 else 0.0
    update_s = max(_crowded(update, used, cores or {}).values())
    return Forecast(
        step_s=makespan + verdict + update_s + max(tie_s.values()) + calibration.step_s,
        makespan_s=makespan,
        compute_s={pnode: compute[pnode] + update[pnode] for pnode in used},
        wire_bytes=wire,
        memory_bytes=memory,
        levels=plan.levels,
        coded=coded,
        coded_because=tuple(because),
    )


def window(level: int, levels: int, microbatches: int) -> int:
    """Microbatches in flight at a stage of that level, as the PNodes' schedule has it."""
    return 1 if level >= levels - 1 else min(microbatches, levels - level + 1)


def wire_bytes(placement: Mapping[NodeId, str], work: Work) -> int:
    """Bytes per step between all PNodes under any placement; edges whose codec is still open count in full."""
    plan = cut_stages(work.graph, placement, fixed_groups(work, placement))
    sizes = channel_bytes(work, plan)
    total = sum(sum(sizes[channel.index]) for channel in plan.channels if not channel.local)
    return total + sum(value.step_bytes for _, _, value in _remote_ties(work, placement))


def _remote_ties(work: Work, placement: Mapping[NodeId, str]) -> list[tuple[str, str, Value]]:
    """(owner's PNode, user's PNode, the tie) for each other PNode that uses a tied weight; once per PNode."""
    found: list[tuple[str, str, Value]] = []
    nodes = work.nodes
    for value in work.values:
        if not value.held_bytes:
            continue
        owner = placement[nodes[value.maker]]
        users = dict.fromkeys(placement[nodes[reader]] for reader in value.readers)
        found.extend((owner, user, value) for user in users if user != owner)
    return found


def _crowded(times: Mapping[str, float], used: Mapping[str, Machine], cores: Mapping[str, int]) -> dict[str, float]:
    """Times of work that all PNodes do at once, longer where a host has fewer cores than PNodes."""
    crowd: dict[str, int] = {}
    for machine in used.values():
        crowd[machine.host] = crowd.get(machine.host, 0) + 1
    return {
        pnode: time * max(1.0, crowd[used[pnode].host] / cores.get(used[pnode].host, crowd[used[pnode].host]))
        for pnode, time in times.items()
    }


class _Play:
    """One step, played through in virtual time."""

    def __init__(self, work: Work, plan: StagePlan, machines: dict[str, Machine], cores: dict[str, int]) -> None:
        self._work, self._plan, self._machines = work, plan, machines
        self._cores = cores
        microbatches = work.microbatches
        grads = with_gradient(work.graph)
        self.forward_s, self.backward_s = [], []
        flows: list[bool] = []
        for stage in plan.stages:
            speed = machines[stage.pnode].speed * microbatches
            fixed = len(stage.nodes) * work.calibration.node_s
            orders = [work.order[node] for node in stage.nodes]
            flows.append(any(node in grads for node in stage.nodes))
            self.forward_s.append(sum(work.forward[order] for order in orders) / speed + fixed)
            backward = sum(work.backward[order] for order in orders) / speed + fixed
            self.backward_s.append(backward if flows[-1] else 0.0)
        self._flows = flows
        self._bytes = channel_bytes(work, plan)
        self.wire_bytes: dict[tuple[str, str], int] = {}
        self._next: list[list[tuple[int, int]]] = [
            _schedule(window(stage.level, plan.levels, microbatches), microbatches, flows[stage.index])
            for stage in plan.stages
        ]
        self._outs: list[list[int]] = [[] for _ in plan.stages]
        self._ins: list[list[int]] = [[] for _ in plan.stages]
        for channel in plan.channels:
            self._outs[channel.src].append(channel.index)
            self._ins[channel.dst].append(channel.index)
            if not channel.local:
                there = (plan.stages[channel.src].pnode, plan.stages[channel.dst].pnode)
                forward, backward = self._bytes[channel.index]
                for pair, size in ((there, forward), (there[::-1], backward)):
                    if size:
                        self.wire_bytes[pair] = self.wire_bytes.get(pair, 0) + size
        gradients = [sum(self._returns(index) for index in outs) for outs in self._outs]
        self._missing = {
            0: [[len(ins)] * microbatches for ins in self._ins],
            1: [[count] * microbatches for count in gradients],
        }

    def _returns(self, index: int) -> bool:
        """A gradient comes back on that channel."""
        channel = self._plan.channels[index]
        return self._bytes[index][1] > 0 and self._flows[channel.src] and self._flows[channel.dst]

    def run(self) -> float:
        """The time at which the last action ends."""
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._ready: dict[str, list[tuple[int, int, int]]] = {pnode: [] for pnode in self._machines}
        self._busy: set[str] = set()
        self._link_free = dict.fromkeys(self._machines, 0.0)
        self._place = [0] * len(self._plan.stages)
        self._running: dict[str, int] = {}
        self._queue: dict[str, list[str]] = {}
        for stage in self._plan.stages:
            self._offer(stage.index)
        for pnode in self._machines:
            self._start(pnode, 0.0)
        end = 0.0
        while self._heap:
            time, _, place, direction, microbatch = heapq.heappop(self._heap)
            if direction < 2:
                self._missing[direction][place][microbatch] -= 1
                if self._missing[direction][place][microbatch] == 0:
                    self._offer(place)
                    self._start(self._plan.stages[place].pnode, time)
            else:
                end = max(end, time)
                self._finish(time, place, direction - 2, microbatch)
        return end

    def _offer(self, stage: int) -> None:
        """Put the stage's next action into its PNode's list if it can run."""
        if self._place[stage] < len(self._next[stage]):
            direction, microbatch = self._next[stage][self._place[stage]]
            if self._missing[direction][stage][microbatch] == 0:
                entry = (-direction, microbatch, stage)
                ready = self._ready[self._plan.stages[stage].pnode]
                if entry not in ready:
                    heapq.heappush(ready, entry)

    def _start(self, pnode: str, time: float) -> None:
        if pnode in self._busy or not self._ready[pnode]:
            return
        host = self._machines[pnode].host
        if self._running.get(host, 0) >= self._cores.get(host, 1 << 30):
            waiting = self._queue.setdefault(host, [])
            if pnode not in waiting:
                waiting.append(pnode)
            return
        negative, microbatch, stage = heapq.heappop(self._ready[pnode])
        self._place[stage] += 1
        self._offer(stage)
        self._busy.add(pnode)
        self._running[host] = self._running.get(host, 0) + 1
        took = (self.backward_s if negative else self.forward_s)[stage]
        heapq.heappush(self._heap, (time + took, 1, stage, 2 - negative, microbatch))

    def _finish(self, time: float, stage: int, direction: int, microbatch: int) -> None:
        pnode = self._plan.stages[stage].pnode
        host = self._machines[pnode].host
        self._busy.discard(pnode)
        self._running[host] -= 1
        for index in self._ins[stage] if direction else self._outs[stage]:
            self._send(time, index, direction, microbatch)
        waiting = self._queue.pop(host, [])
        for other in (*waiting, pnode):
            self._start(other, time)

    def _send(self, time: float, index: int, direction: int, microbatch: int) -> None:
        channel = self._plan.channels[index]
        if direction and not self._returns(index):
            return
        source, target = (channel.dst, channel.src) if direction else (channel.src, channel.dst)
        arrival = time
        if not channel.local:
            sender = self._machines[self._plan.stages[source].pnode]
            receiver = self._machines[self._plan.stages[target].pnode]
            size = self._bytes[index][direction] / self._work.microbatches
            gone = max(time, self._link_free[sender.id]) + size / min(sender.link_bytes_s, receiver.link_bytes_s)
            self._link_free[sender.id] = gone
            arrival = gone + max(sender.latency_s, receiver.latency_s) + self._work.calibration.hop_s
        heapq.heappush(self._heap, (arrival, 0, target, direction, microbatch))


def _schedule(window: int, microbatches: int, gradient: bool) -> list[tuple[int, int]]:
    """1F1B as (direction, microbatch)."""
    if not gradient:
        return [(0, microbatch) for microbatch in range(microbatches)]
    found = [(0, microbatch) for microbatch in range(window)]
    for microbatch in range(microbatches):
        found.append((1, microbatch))
        if microbatch + window < microbatches:
            found.append((0, microbatch + window))
    return found
