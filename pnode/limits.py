"""The order of a PNode's limits: a wait that ends before what it waits for is allowed to take would end good runs."""

from __future__ import annotations

from pnode.hub import Bounds
from wire.errors import UsageError

_ORDER = (
    ("compute_s", "--compute-limit", "wait_s", "--wait-limit", "others wait while one action computes"),
    ("wait_s", "--wait-limit", "away_s", "--away-limit", "a run may wait for the store behind another PNode"),
    ("infer_s", "the time a forward request may be incomplete", "cache_s", "the life of an unused KV cache",
     "a cache must outlive the request that uses it"),
)  # fmt: skip


def check_order(bounds: Bounds) -> None:
    """Raises UsageError that names the two limits that are in the wrong order, and why that matters."""
    for low, low_name, high, high_name, why in _ORDER:
        first, second = getattr(bounds, low), getattr(bounds, high)
        if first > second:
            raise UsageError(
                f"{low_name} is {first:g} s, above {high_name}, which is {second:g} s: {why}",
                hint=f"lower {low_name} or raise {high_name}",
            )


def lease_problem(bounds: Bounds, lease_s: float) -> str:
    """What is wrong between a PNode's limits and the cluster's lease, or ""."""
    if bounds.wait_s < lease_s:
        return (
            f"--wait-limit is {bounds.wait_s:g} s, below the lease of {lease_s:g} s: "
            "runs will end by it before a lost PNode is noticed"
        )
    return ""
