"""Limits of an orchestrator that contradict each other are refused at start, and both are named."""

from __future__ import annotations

import pytest

from orchestrator.lifecycle import AWAY_S, RECOVER_S
from orchestrator.main import check_limits, make_parser
from wire.errors import UsageError


def test_the_defaults_are_in_order() -> None:
    given = make_parser().parse_args([])
    assert (given.lease, given.recover_limit) == (10.0, RECOVER_S)
    check_limits(given.lease, given.recover_limit)
    check_limits(0.5, 1.0)
    check_limits(3600, AWAY_S)


@pytest.mark.parametrize(
    ("lease_s", "recover_s", "text"),
    [
        (0.4, 3600, "--lease is 0.4, but is 0.5 to 3600 seconds"),
        (3601, AWAY_S, "--lease is 3601"),
        (float("nan"), 3600, "--lease is nan"),
        (10, 19, r"--recover-limit is 19 s, but is two leases \(20 s\) to 86400 s: a PNode that restarts"),
        (10, AWAY_S + 1, "--recover-limit is 86401 s"),
        (10, float("nan"), "--recover-limit is nan s"),
    ],
)
def test_limits_in_the_wrong_order_are_refused(lease_s: float, recover_s: float, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_limits(lease_s, recover_s)
