"""The decision on a step, made by the PNode of the loss from everybody's report. Pure.

The squared norms are summed in network order in double precision, whatever the order of arrival and whoever sent
them, so placement can't change the scale. `clip` is torch's formula: clip / (norm + 1e-6), at most 1; the norm is that
of the gradient of the mean loss, so the sums are divided by the number of targets first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pnode.events import Decision, ReportArrived
from pnode.share import Share


def gradient_norm(norms: Iterable[tuple[int, float]], count: int) -> float:
    """Global norm of the mean's gradient, from (parameter's index in the network, sum of squares)."""
    total = 0.0
    for _, square in sorted(norms):
        total += square
    return math.sqrt(total) / count if count else 0.0


def clip_scale(norm: float, count: int, clip: float | None) -> float:
    """The one factor that every gradient is multiplied by: clip coefficient / number of targets."""
    coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return coefficient / count if count else 0.0


def decide(
    step: int, reports: Mapping[str, ReportArrived], *, loss: float, count: int, share: Share, hold: bool, save: bool,
) -> Decision:  # fmt: skip
    """All reports of a step are in: apply it everywhere, or nowhere.

    The culprit is the first VNode in network order with a value that is not finite.
    """
    norm = gradient_norm((pair for report in reports.values() for pair in report.norms), count)
    if not math.isfinite(loss) or not math.isfinite(norm) or not all(report.finite for report in reports.values()):
        culprits = [report.culprit for report in reports.values() if not report.finite and report.culprit]
        culprit = min(culprits or [share.loss_vnode], key=lambda vnode: share.order.get(vnode, len(share.order)))
        return Decision(step, False, 0.0, count, norm, False, False, culprit)
    return Decision(step, True, clip_scale(norm, count, share.clip), count, norm, hold, save, "")
