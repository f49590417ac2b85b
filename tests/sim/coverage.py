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


def _value(state: Any) -> str:
    return str(state.value if isinstance(state, Enum) else state)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one machine. `strange`: seen, but not in its table."""

    machine: str
    states: int
    states_seen: int
    transitions: int
    transitions_seen: int
    never: tuple[str, ...]
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
        found.append(
            Coverage(
                machine, len(states), len(reached), len(possible), len(moves & possible),
                tuple(sorted(possible - moves)) + tuple(f"state {state}" for state in sorted(states - reached)),
                tuple(sorted(moves - possible)),
            )
        )  # fmt: skip
    return found
