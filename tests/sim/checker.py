"""Judges a history. It knows the records of `history` and the formats of stored objects, and nothing of the product.

    breaches = check(history)

Each invariant is written as a promise of the system (docs/reliability.md), never for a particular bug; what each file
below `checks/` holds to is said in its docstring.
"""

from __future__ import annotations

from tests.sim.checks.breach import Breach, Check
from tests.sim.checks.clients import Clients
from tests.sim.checks.commits import Commits
from tests.sim.checks.liveness import Liveness
from tests.sim.checks.model import Model, understood
from tests.sim.checks.owners import Owners
from tests.sim.checks.sanity import Sanity
from tests.sim.checks.training import Training
from tests.sim.history import Computed, Delivered, Fault, History, Process, Told, Wrote

__all__ = ["Breach", "check"]


def check(history: History) -> list[Breach]:
    """All breaches, the earliest first."""
    truth, session = history.truth, history.session
    checks: list[Check] = [
        Training(truth, session), Owners(), Commits(truth, session), Clients(), Liveness(), Sanity(),
    ]  # fmt: skip
    model = Model()
    for event in history.events:
        match event:
            case Wrote():
                thing = understood(event)
                for judge in checks:
                    judge.wrote(event, thing, model)
                model.wrote(event, thing)
            case Delivered():
                model.delivered(event)
                for judge in checks:
                    judge.delivered(event, model)
            case Computed():
                model.computed(event)
                for judge in checks:
                    judge.computed(event, model)
            case Process():
                model.process(event)
                for judge in checks:
                    judge.process(event, model)
            case Told():
                for judge in checks:
                    judge.told(event, model)
            case Fault():
                pass
    for judge in checks:
        judge.end(history, model)
    found = [breach for judge in checks for breach in judge.breaches]
    return sorted(found, key=lambda breach: breach.t)
