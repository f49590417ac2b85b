"""What may be written through the service. Pure.

Whoever may use the service may read all of the store, and write blobs, checkpoint parts and traces. The truth (records
of the registry, manifests, heads) is written by the orchestrator alone, which reaches the store itself; so a PNode that
computes wrongly can spoil what it computes, and not what was committed.
"""

from __future__ import annotations

import re

_TRUTH = re.compile(r"registry/.*|networks/[^/]+/sessions/[^/]+/(?:head\.json|manifests/.*)")


def write_problem(key: str, *, truth: bool) -> str:
    """Why this key may not be written or deleted through the service; "" if it may. `truth`: all may be."""
    if truth or not _TRUTH.fullmatch(key):
        return ""
    return f"{key} is written by the orchestrator alone, not through the storage service"
