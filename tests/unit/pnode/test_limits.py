from __future__ import annotations

from dataclasses import replace

import pytest

from pnode.hub import Bounds
from pnode.limits import check_order, lease_problem
from wire.errors import UsageError


def test_the_defaults_are_in_order() -> None:
    check_order(Bounds())


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"wait_s": 60.0}, ("--compute-limit is 900 s", "--wait-limit, which is 60 s")),
        ({"compute_s": 1000.0}, ("--compute-limit is 1000 s", "--wait-limit, which is 900 s")),
        ({"away_s": 100.0}, ("--wait-limit is 900 s", "--away-limit, which is 100 s")),
        ({"cache_s": 1.0}, ("forward request", "KV cache")),
    ],
)
def test_two_limits_in_the_wrong_order_are_both_named(changes: dict[str, float], names: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as refused:
        check_order(replace(Bounds(), **changes))
    assert all(name in refused.value.message for name in names)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_wait_below_the_lease_is_said() -> None:
    assert lease_problem(Bounds(), 10.0) == ""
    assert "--wait-limit is 5 s, below the lease of 10 s" in lease_problem(replace(Bounds(), wait_s=5.0), 10.0)
