"""Numbers as people read them: sizes, counts, rates and lengths of time. Pure."""

from __future__ import annotations

import math


def size(size_bytes: float) -> str:
    """Bytes with a decimal unit: 999 B, 1.2 kB, 3.4 MB."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def count(number: float) -> str:
    """A count with thousands separated: 804,096."""
    return f"{number:,.0f}"


def compact(number: float, *, gap: bool = False) -> str:
    """A count or rate in at most five characters: 950, 12.3k, 4.56M; with a gap for a unit that follows: 12.3 k."""
    space = " " if gap else ""
    value = float(number)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            if not unit:
                return (f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}") + space
            return f"{value:.2f}{space}{unit}" if abs(value) < 10 else f"{value:.1f}{space}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """A length of time: 85 ms, 3.2 s, 2:05, 1:02:03, 3 d 4 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.00095 else f"{seconds * 1e6:.0f} µs"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 2 * 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def ago(seconds: float) -> str:
    """How long since something: "3 s ago"."""
    if seconds < 1:
        return "now"
    if seconds < 60:
        return f"{seconds:.0f} s ago"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 86400:
        return f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86400:.0f} d ago"


def loss(value: float) -> str:
    """A loss with enough digits to compare by eye; "-" before the first."""
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:.4g}"


def plural(number: int, noun: str) -> str:
    """`1 PNode`, `3 PNodes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}es" if noun.endswith(("s", "x", "ch")) else f"{number:,} {noun}s"
