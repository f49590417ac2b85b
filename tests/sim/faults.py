from __future__ import annotations
from tests.sim.plan import Plan, calm


class Injector:
    def __init__(self, world):
        self.healed_s = 0.0

    def begin(self):
        pass


def draw(seed: int) -> Plan:
    return calm(seed)
