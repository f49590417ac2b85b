"""Which states and transitions of the product's tables were seen, and which never."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Table = Mapping[Any, Collection[Any]]


def tables() -> dict[str, Table]:
    """The product's transition tables, by the name that `History.visited` has for the machine."""
    from orchestrator import lifecycle, membership
    from pnode import core

    return {
        "session": lifecycle.TRANSITIONS,
        "stage": lifecycle.STAGES,
        "member": membership.TRANSITIONS,
        "core": core.TRANSITIONS,
    }


NO_FAULT_LEADS_THERE = {
    "session running>failed": "only numbers that are not finite, a bad input or a defect end a run that is under way",
    "session recovering>failed": "no fault lasts for the hour that room is awaited, nor breaks four tries in a row",
    "session pausing>failed": "as running>failed: whatever is lost, it rests at the last commit",
    "session stopping>failed": "as pausing>failed",
}
"""Transitions that no fault of the world may cause, and why: each would be a breach of `a disturbed run goes on`."""


def _value(state: Any) -> str:
    return str(state.value if isinstance(state, Enum) else state)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one machine. `never`: not seen; `barred`: not seen, and rightly so; `strange`: seen, but not in its table."""

    machine: str
    states: int
    states_seen: int
    transitions: int
    transitions_seen: int
    never: tuple[str, ...]
    barred: tuple[str, ...]
    strange: tuple[str, ...]


def coverage(visited: Collection[str], known: Mapping[str, Table] | None = None) -> list[Coverage]:
    """Of each machine; `visited` holds strings such as "session running>recovering" or "session running"."""
    found = []
    for machine, table in (known if known is not None else tables()).items():
        possible = {f"{_value(before)}>{_value(after)}" for before, afters in table.items() for after in afters}
        seen = {text.partition(" ")[2] for text in visited if text.startswith(f"{machine} ")}
        moves = {text for text in seen if ">" in text and (len(set(text.split(">"))) == 2 or text in possible)}
        states = {_value(state) for state in table}
        reached = {part for text in seen for part in text.split(">")} & states
        barred = {move for move in possible - moves if f"{machine} {move}" in NO_FAULT_LEADS_THERE}
        found.append(
            Coverage(
                machine, len(states), len(reached), len(possible), len(moves & possible),
                tuple(sorted(possible - moves - barred)) + tuple(f"state {s}" for s in sorted(states - reached)),
                tuple(sorted(barred)), tuple(sorted(moves - possible)),
            )
        )  # fmt: skip
    return found
