"""Who waits for whom, as an orchestrator tells it, made short enough to read. Pure.

A sentence is "WHO: what, for N s (at most M s)", or "p1 waits for p2: what, …". Long limits get units, digests lose
most of their digits, and what differs in numbers alone (ten cuts that one store owes) is told once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LIMIT = re.compile(r"\(at most (\d+) s\)")
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b")
_NUMBER = re.compile(r"\d+")
_PARTS = re.compile(r"\S*/parts/")


def readable(sentences: Sequence[str]) -> list[str]:
    """The sentences as people read them, in their order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for sentence in sentences:
        short = _LIMIT.sub(lambda found: f"(at most {limit(int(found[1]))})", sentence)
        short = _PARTS.sub("", _DIGEST.sub(r"\1…", short))
        who, _, what = short.partition(": ")
        groups.setdefault((who, _NUMBER.sub("", _DIGEST.sub("", what))), []).append(short)
    return [group[0] + (f", and {len(group) - 1} more like it" if len(group) > 1 else "") for group in groups.values()]


def waits_for(sentence: str) -> str:
    """A sentence behind the name of who waits, or behind nothing: "waiting for p2: …"; "p1 waits for p2: …" stays."""
    return sentence if " waits for " in sentence else f"waiting for {sentence}"


def limit(seconds: int) -> str:
    """How long something may take: 90 s, 15 min, 24 h."""
    if seconds >= 3600 and seconds % 3600 == 0:
        return f"{seconds // 3600} h"
    if seconds >= 600 and seconds % 60 == 0:
        return f"{seconds // 60} min"
    return f"{seconds} s"


def about(text: str) -> str:
    """What stays the same while only time passes."""
    return _NUMBER.sub("", text)
