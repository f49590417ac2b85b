"""What the tests of real faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.chaos.fleet import Launch
from tests.chaos.nursery import Nursery


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """Starts daemons fast."""
    nursery = Nursery()
    nursery.open()
    yield nursery.start
    nursery.close()
