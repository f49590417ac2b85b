"""The codes with which a PNode refuses to prepare a session: what its orchestrator may do about it."""

from __future__ import annotations

STORE_AWAY = "store-away"
"""The store does not answer, has no room, or isn't known yet: the same may be tried again, for as long as it takes."""
UNHEALTHY = "unhealthy"
"""This PNode can't compute: another one should be tried."""
CANNOT_PREPARE = "cannot-prepare"
"""What it was given is missing, damaged or can't be."""
SUPERSEDED = "superseded"
"""Another `Prepare` took its place."""
STALE_EPOCH = "stale-epoch"
STALE_TERM = "stale-term"
