"""Field case B31: two faults at once, ten times in one run, real processes: a PNode is killed, and while its VNodes are
prepared anew one that gives its state or takes its place. (The simulator has many more: `double` in tests/sim.)

Another seed: DCNR_CHAOS_SEED=17 pytest tests/chaos/test_double.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.chaos.faults import Kind
from cli.chaos.fleet import Shape
from tests.chaos.nets import GPT
from tests.chaos.test_short import survive

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(290)]

POINTS = 10


def test_donors_and_replacements_die_while_a_loss_is_mended(tmp_path: Path) -> None:
    survived = survive(GPT, Shape(tmp_path / "home", 5, 1.0), (Kind.DOUBLE,) * POINTS, tmp_path)
    hit = [wound for wound in survived.outcome.wounds if wound.counts]
    roles = {"gives its state", "takes its place"}
    assert len(hit) >= POINTS // 2, "the second one came too late each time"
    assert any(role in wound.text for wound in hit for role in roles)
    assert survived.outcome.epochs > POINTS
