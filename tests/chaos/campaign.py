"""Many runs, many faults in each, until every kind has come as often as asked for; goes on where it was stopped.

The state file holds what was done: it is written after each run, and a run that fails is kept with its seed and its
logs. Faults count only when they hit something, and only in runs that ended as the undisturbed one.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.chaos.engine import Rules, Told, Wound
from cli.chaos.faults import LINES, Kind
from cli.chaos.fleet import Shape
from cli.chaos.reference import Undisturbed
from cli.chaos.trial import Survived, Trial, undergo
from cli.preparing import Prepared
from cli.terminal import Terminal
from tests.chaos.nets import NETS, Net, truth
from tests.chaos.weed import Weed
from wire.errors import DCNRError

LINE = "lines"


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


@dataclass(slots=True)
class State:
    """What was done so far."""

    done: Counter[str] = field(default_factory=Counter)
    by_network: dict[str, Counter[str]] = field(default_factory=dict)
    by_store: dict[str, Counter[str]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(path: Path | None) -> State:
        """From its file, if there is one."""
        if path is None or not path.exists():
            return State()
        raw = json.loads(path.read_text())
        return State(
            Counter(raw["done"]),
            {name: Counter(counts) for name, counts in raw["by_network"].items()},
            {name: Counter(counts) for name, counts in raw["by_store"].items()},
            raw["runs"],
            raw["failures"],
        )

    def write(self, path: Path | None) -> None:
        """To its file, whole or not at all."""
        if path is None:
            return
        temporary = path.with_suffix(".new")
        record = {name: getattr(self, name) for name in ("done", "by_network", "by_store", "runs", "failures")}
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(path)

    def left(self, wanted: Wanted) -> dict[str, int]:
        """What is still to be done."""
        return {name: count - self.done[name] for name, count in wanted.counts.items() if count > self.done[name]}

    def add(self, run: Mapping[str, Any], wounds: list[Wound], lease_s: float) -> None:
        """A run that ended as it must."""
        for wound in wounds:
            if not wound.counts:
                continue
            names = [str(wound.kind), *([LINE] if wound.kind in LINES else [])]
            if wound.kind is Kind.PAUSE and wound.seconds > lease_s:
                names.append("pause longer than the lease")
            if wound.kind is Kind.KILL and wound.hurt_member:
                names.append("kill of a member")
            for counts in (
                self.done,
                self.by_network.setdefault(str(run["network"]), Counter()),
                self.by_store.setdefault(str(run["store"]), Counter()),
            ):
                counts.update(names)
        self.runs.append(dict(run))


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

    def run(self, *, max_failures: int = 3) -> bool:
        """Until all is done; False if runs failed."""
        weed = Weed(self.folder / "weed") if self.wanted.store != "local" else None
        began, before = time.monotonic(), sum(self.state.done[name] for name in self.wanted.counts)
        failed = 0
        try:
            if weed is not None:
                weed.start()
                weed.make_bucket("dcnr")
            while self.state.left(self.wanted) and failed < max_failures:
                failed += not self._once(weed)
                left = sum(self.state.left(self.wanted).values())
                done = sum(self.state.done[name] for name in self.wanted.counts) - before
                if done:
                    eta = (time.monotonic() - began) / done * left / 60
                    self.said(f"  {left} of {sum(self.wanted.counts.values())} faults left, about {eta:.0f} min")
        finally:
            if weed is not None:
                weed.stop()
        return not failed

    def _truth(self, net: Net) -> tuple[Prepared, Undisturbed]:
        if net.name not in self._truths:
            prepared = net.prepared(self.folder / "data")
            self._truths[net.name] = (prepared, truth(prepared))
        return self._truths[net.name]

    def _once(self, weed: Weed | None) -> bool:
        wanted, number = self.wanted, len(self.state.runs) + len(self.state.failures)
        net = NETS[number % len(NETS)]
        prepared, expected = self._truth(net)
        remote = weed is not None and (wanted.store == "seaweed" or number // len(NETS) % 2 == 1)
        seed = random.Random(f"{wanted.seed}/{number}").randrange(1, 10**6)
        home = self.folder / f"run-{number}"
        chosen = odds(self.state.left(wanted))
        if not remote:
            chosen.pop(Kind.STORE, None)
        if not chosen:
            chosen = {Kind.CLI: 1.0}
        shape = Shape(
            home, wanted.pnodes, wanted.lease_s, seed=seed,
            store=weed.url("dcnr", f"run-{number}-{uuid.uuid4().hex[:8]}") if remote and weed is not None else "",
            server=weed if remote else None,
        )  # fmt: skip
        run = {
            "run": number, "network": net.name, "store": "seaweed" if remote else "local", "seed": seed,
            "lease_s": wanted.lease_s, "odds": {str(kind): weight for kind, weight in chosen.items()},
        }  # fmt: skip
        began = time.monotonic()
        story: list[str] = []
        rules = Rules(faults=wanted.faults, stuck_s=max(120.0, 20 * wanted.lease_s))
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
            run |= {"hash": outcome.final_hash, "missing": outcome.missing, "flipped": outcome.flipped}
        if problems or survived is None:
            self.state.failures.append({**run, "problems": problems, "story": story, "home": str(home)})
            self.said(f"run {number}: {net.name}, seed {seed}: FAILED: {'; '.join(problems)} (logs: {home})")
        else:
            self.state.add(run, survived.outcome.wounds, wanted.lease_s)
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(run["faults"].items()))
            self.said(
                f"run {number}: {net.name} on {run['store']}, seed {seed}: equal after {told}; "
                f"{run['redone']} steps made again, {run['epochs']} epochs, {run['seconds']} s"
            )
            shutil.rmtree(home, ignore_errors=True)
        self.state.write(self.path)
        return not problems

    def _problems(self, survived: Survived, expected: Undisturbed) -> list[str]:
        steps = len(expected.losses)
        problems = survived.sight.compare(expected.losses, expected.hashes[steps], steps)
        return problems + [text for text in survived.outcome.breaches if text not in problems]


def listened(story: list[str]) -> Told:
    def hurt(wound: Wound) -> None:
        story.append(f"{wound.at_s:.1f} s, step {wound.step}: {wound.kind} {wound.target}: {wound.text}")

    def healed(wound: Wound) -> None:
        story.append(f"  new step {wound.recovered_s or 0.0:.1f} s after {wound.kind} of {wound.target}")

    return Told(hurt, healed)


def table(state: State, wanted: Wanted) -> str:
    """What was done, by network and store."""
    names = [*wanted.counts, *sorted(set(state.done) - set(wanted.counts))]
    columns = [*state.by_network, *state.by_store]
    counts = {**state.by_network, **state.by_store}
    lines = ["| fault | wanted | done | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for name in names:
        cells = " | ".join(str(counts[column][name]) for column in columns)
        lines.append(f"| {name} | {wanted.counts.get(name, '')} | {state.done[name]} | {cells} |")
    equal = len(state.runs)
    lines.append("")
    lines.append(
        f"{equal} runs ended with the hash and the losses of the undisturbed run, {len(state.failures)} did not."
    )
    return "\n".join(lines)
