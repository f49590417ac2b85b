"""Many runs, many faults in each, until every kind has come as often as asked for; goes on where it was stopped.

A run is held when all was done to it, and compared with the undisturbed run after as many steps. The state file holds
what was done: it is written after each run, and a run that fails is kept with its seed and its logs. Faults count only
when they hit something, and only in runs that ended as the undisturbed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import processes
from cli.chaos.engine import Rules, Told, Wound
from cli.chaos.faults import LINES, Kind
from cli.chaos.fleet import Shape
from cli.chaos.reference import Undisturbed
from cli.chaos.trial import Survived, Trial, undergo
from cli.preparing import Prepared
from cli.terminal import Terminal
from pnode.measure import torch_build
from storage.store import digest_of
from tests.chaos.nets import NETS, Net, truth
from tests.chaos.nursery import Nursery
from tests.chaos.smalldisk import small_disk
from tests.chaos.weed import Weed
from wire.errors import DCNRError

LINE = "lines"
LONG = "pause longer than the lease"
MEMBER = "kill of a member"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a campaign is to do. `counts`: by kind; `lines` of the connections' kinds together."""

    counts: dict[str, int]
    seed: int = 1
    lease_s: float = 1.0
    store: str = "local"
    pnodes: int = 6
    members: int = 3
    faults: int = 25
    gap_s: float = 0.7
    forks: bool = True
    """Daemons are started by fork (see `nursery`), not as `dcnr-pnode` and `dcnr-orchestrator`."""


@dataclass(slots=True)
class State:
    """What was done so far: the runs that ended as they must, with all that was done to them, and the others."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(path: Path | None) -> State:
        """From its file, if there is one."""
        if path is None or not path.exists():
            return State()
        raw = json.loads(path.read_text())
        return State(raw["runs"], raw["failures"])

    def write(self, path: Path | None) -> None:
        """To its file, whole or not at all."""
        if path is None:
            return
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({"runs": self.runs, "failures": self.failures}, indent=1))
        temporary.replace(path)

    def done(self, lease_s: float | None = None, **where: str) -> Counter[str]:
        """Faults that hit, by kind; of one lease, network or store."""
        counts: Counter[str] = Counter()
        for run in self.runs:
            if lease_s in (None, run["lease_s"]) and all(run[key] == value for key, value in where.items()):
                for hurt in run["wounds"]:
                    counts.update(names_of(hurt, run["lease_s"]))
        return counts

    def left(self, wanted: Wanted) -> dict[str, int]:
        """What is still to be done with the wanted lease."""
        done = self.done(wanted.lease_s)
        return {name: count - done[name] for name, count in wanted.counts.items() if count > done[name]}


def recorded(wound: Wound) -> dict[str, Any]:
    """A fault as the state file keeps it."""
    names = ("kind", "at_s", "step", "target", "text", "counts", "hurt_member", "seconds", "recovered_s", "redone")
    found = {name: getattr(wound, name) for name in names}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def names_of(hurt: Mapping[str, Any], lease_s: float) -> list[str]:
    """What a fault counts as: its kind, and what is to be told apart within it."""
    if not hurt["counts"]:
        return []
    kind = Kind(hurt["kind"])
    names = [str(kind), *([LINE] if kind in LINES else [])]
    if kind is Kind.PAUSE and hurt["seconds"] > lease_s:
        names.append(LONG)
    if kind is Kind.KILL and hurt["hurt_member"]:
        names.append(MEMBER)
    return names


def odds(left: Mapping[str, int]) -> dict[Kind, float]:
    """The next run's odds: what is still to be done."""
    found: dict[Kind, float] = {}
    for name, count in left.items():
        if name == LINE:
            found |= {kind: count / len(LINES) for kind in LINES}
        else:
            found[Kind(name)] = float(count)
    return found


class Campaign:
    """See the module's docstring."""

    def __init__(self, wanted: Wanted, path: Path | None, folder: Path, said: Callable[[str], None]) -> None:
        self.wanted = wanted
        self.path = path
        self.folder = folder
        self.said = said
        self.state = State.read(path)
        self._truths: dict[str, tuple[Prepared, Undisturbed]] = {}

    def run(self, *, max_failures: int = 3, seconds: float = math.inf) -> bool:
        """Until all is done, or no more run is begun after so long; False if runs failed."""
        weed = Weed(self.folder / "weed") if self.wanted.store != "local" else None
        began, before = time.monotonic(), sum(self.state.left(self.wanted).values())
        failed = 0
        nursery = Nursery() if self.wanted.forks else None
        try:
            if nursery is not None:
                nursery.open()
            if weed is not None:
                weed.start()
                weed.make_bucket("dcnr")
            while self.state.left(self.wanted) and failed < max_failures and time.monotonic() - began < seconds:
                failed += not self._once(weed, nursery)
                left = sum(self.state.left(self.wanted).values())
                if done := before - left:
                    eta = (time.monotonic() - began) / done * left / 60
                    self.said(f"  {left} of {sum(self.wanted.counts.values())} faults left, about {eta:.0f} min")
        finally:
            if weed is not None:
                weed.stop()
            if nursery is not None:
                nursery.close()
        return not failed

    def _truth(self, net: Net) -> tuple[Prepared, Undisturbed]:
        if net.name not in self._truths:
            prepared = net.prepared(self.folder / "data")
            self._truths[net.name] = (prepared, kept(prepared, self.folder / "truths"))
        return self._truths[net.name]

    def _once(self, weed: Weed | None, nursery: Nursery | None) -> bool:
        wanted, number = self.wanted, len(self.state.runs) + len(self.state.failures)
        net = NETS[number % len(NETS)]
        prepared, expected = self._truth(net)
        remote = weed is not None and (wanted.store == "seaweed" or number // len(NETS) % 2 == 1)
        seed = random.Random(f"{wanted.seed}/{number}").randrange(1, 10**6)
        home = self.folder / f"run-{number}"
        shutil.rmtree(home, ignore_errors=True)  # of a run that was interrupted
        chosen = odds(self.state.left(wanted))
        chosen.pop(Kind.DISK if remote else Kind.STORE, None)
        if not chosen:
            chosen = {Kind.CLI: 1.0}
        run = {
            "run": number, "network": net.name, "store": "seaweed" if remote else "local", "seed": seed,
            "lease_s": wanted.lease_s, "forks": wanted.forks,
            "odds": {str(kind): weight for kind, weight in chosen.items()},
        }  # fmt: skip
        began = time.monotonic()
        story: list[str] = []
        rules = Rules(faults=wanted.faults, stuck_s=max(120.0, 20 * wanted.lease_s), pause_at_end=True)
        with contextlib.ExitStack() as stack:
            store, disk = "", None
            if remote:
                store = weed.url("dcnr", f"run-{number}-{uuid.uuid4().hex[:8]}")
            elif Kind.DISK in chosen:
                disk = stack.enter_context(small_disk(home / "disk"))
                store = (disk / "store").as_uri() if disk is not None else ""
            shape = Shape(
                home, wanted.pnodes, wanted.lease_s, seed=seed, store=store, server=weed if remote else None, disk=disk,
                launch=nursery.start if nursery is not None else processes.start,
            )  # fmt: skip
            trial = Trial(shape, seed, chosen, rules, wanted.gap_s, wanted.members, told=listened(story))
            try:
                survived = asyncio.run(undergo(trial, prepared, Terminal("json")))
                problems = self._problems(survived, expected)
            except DCNRError as error:
                survived, problems = None, [error.message]
            run["seconds"] = round(time.monotonic() - began, 1)
        if survived is not None:
            outcome = survived.outcome
            run |= {"faults": dict(outcome.counts()), "epochs": outcome.epochs, "redone": outcome.redone}
            run |= {"state": outcome.state, "steps": outcome.step}
            run |= {"hash": outcome.final_hash, "missing": outcome.missing, "flipped": outcome.flipped}
            run["wounds"] = [recorded(wound) for wound in outcome.wounds]
        if problems or survived is None:
            self.state.failures.append({**run, "problems": problems, "story": story, "home": str(home)})
            self.said(f"run {number}: {net.name}, seed {seed}: FAILED: {'; '.join(problems)} (logs: {home})")
        else:
            self.state.runs.append(run)
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(run["faults"].items()))
            self.said(
                f"run {number}: {net.name} on {run['store']}, seed {seed}: equal after {told}; "
                f"{run['redone']} steps made again, {run['epochs']} epochs, {run['seconds']} s"
            )
            shutil.rmtree(home, ignore_errors=True)
        self.state.write(self.path)
        return not problems

    def _problems(self, survived: Survived, expected: Undisturbed) -> list[str]:
        outcome = survived.outcome
        problems = survived.sight.compare(expected.losses, expected.hashes.get(outcome.step, "none"), outcome.step)
        if outcome.state not in ("paused", "finished"):
            problems.append(f"it ended {outcome.state}")
        return problems + [text for text in outcome.breaches if text not in problems]


def kept(prepared: Prepared, folder: Path) -> Undisturbed:
    """The undisturbed run, computed unless it is in the folder already."""
    steps = prepared.network.recipe.steps
    name = digest_of(prepared.network.to_bytes() + prepared.packed.digest.encode() + torch_build().encode())
    path = folder / f"{name}-each-{steps}.json"
    if path.exists():
        raw = json.loads(path.read_text())
        return Undisturbed(raw["losses"], {int(step): found for step, found in raw["hashes"].items()})
    found = truth(prepared)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"losses": found.losses, "hashes": found.hashes}))
    return found


def listened(story: list[str]) -> Told:
    def hurt(wound: Wound) -> None:
        story.append(f"{wound.at_s:.1f} s, step {wound.step}: {wound.kind} {wound.target}: {wound.text}")

    def healed(wound: Wound) -> None:
        story.append(f"  new step {wound.recovered_s or 0.0:.1f} s after {wound.kind} of {wound.target}")

    return Told(hurt, healed)


def table(state: State, wanted: Wanted) -> str:
    """What was done, by network, store and lease, and how long until the first new step."""
    whole = state.done()
    leases = sorted({float(run["lease_s"]) for run in state.runs})
    columns = {
        **{name: state.done(network=name) for name in sorted({run["network"] for run in state.runs})},
        **{name: state.done(store=name) for name in sorted({run["store"] for run in state.runs})},
        **{f"lease {lease:g} s": state.done(lease) for lease in leases},
    }
    lines = ["| fault | wanted | done | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for name in [*wanted.counts, *sorted(set(whole) - set(wanted.counts))]:
        cells = " | ".join(str(counts[name]) for counts in columns.values())
        lines.append(f"| {name} | {wanted.counts.get(name, '')} | {whole[name]} | {cells} |")
    lines += ["", "| fault | lease | times | new step after: median | p95 | longest | steps made again: median |"]
    lines.append("|---" * 7 + "|")
    for lease in leases:
        hurts = [hurt for run in state.runs if run["lease_s"] == lease for hurt in run["wounds"]]
        for name in sorted({name for hurt in hurts for name in names_of(hurt, lease)}):
            mine = [hurt for hurt in hurts if name in names_of(hurt, lease) and hurt["recovered_s"] is not None]
            if mine:
                times = sorted(hurt["recovered_s"] for hurt in mine)
                shown = f"{statistics.median(times):.1f} s | {at_rank(times, 0.95):.1f} s | {times[-1]:.1f} s"
                again = statistics.median(hurt["redone"] for hurt in mine)
                lines.append(f"| {name} | {lease:g} s | {len(mine)} | {shown} | {again:g} |")
    redone, made = sum(run["redone"] for run in state.runs), sum(run["steps"] for run in state.runs)
    hits = sum(count for name, count in whole.items() if name in set(Kind))
    lines += [
        "",
        f"{len(state.runs)} runs with {hits} faults ended with the hash and the losses of the undisturbed run, ",
    ]
    lines[-1] += f"{len(state.failures)} did not; {redone} of {made + redone} steps were made again."
    return "\n".join(lines)


def at_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
