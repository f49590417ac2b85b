"""Bugs of the arithmetic: data, gradients, counts, and what is restored."""

from __future__ import annotations

from tests.sim.planted.edit import Edit


def data_off_by_one() -> list[Edit]:
    """after a replay the data are those of the next step"""
    from pnode.executor import StageExecutor
    from pnode.work import Work

    return [
        Edit(
            StageExecutor._fetch,
            'self.data.batch("train", step, microbatch,',
            'self.data.batch("train", step + getattr(self.vnodes, "replayed", 0), microbatch,',
        ),
        Edit(
            Work.load,
            "for node, state in states.items():",
            "self.vnodes.replayed = 1\nfor node, state in states.items():",
        ),
    ]


def wrong_microbatch() -> list[Edit]:
    """where two activations meet, the second one is the newest that has come, of whichever microbatch"""
    from pnode.turns import Turns

    return [
        Edit(
            Turns.take,
            "inputs[channel.index] = self._inbox.take_hop(channel.index, step, m)",
            "hops = self._inbox._hops\n"
            "newest = max(key for key in hops if key[:2] == (channel.index, step))\n"
            "inputs[channel.index] = hops[newest if channel is not self.ins[stage][0] else (channel.index, step, m)]\n"
            "self._inbox.take_hop(channel.index, step, m)",
        )
    ]


def count_lost() -> list[Edit]:
    """the targets of a step's last microbatch are counted only if the one before was"""
    from pnode.work import Work

    return [Edit(Work._report, "count += targets", "count = max(count, targets)")]


def optimizer_not_restored() -> list[Edit]:
    """a replay begins with the optimizer's state at zero"""
    from pnode.vnodes import VNodes

    return [Edit(VNodes.load_state, "if owned.parameter.requires_grad:", "if False:")]


def buffers_not_restored() -> list[Edit]:
    """a replay begins with batchnorm's buffers as they were at first"""
    from pnode.vnodes import VNodes

    return [Edit(VNodes.load_state, 'if not key.startswith("optim."):', 'if key.startswith("param."):')]


def tie_gradient_twice() -> list[Edit]:
    """the gradient of a tied weight's other use is added twice"""
    from pnode.vnodes import VNodes

    return [Edit(VNodes._sum_ties, "else weight.grad + gradient", "else weight.grad + gradient + gradient")]


def wrong_cut_from_memory() -> list[Edit]:
    """a replay takes the newest cut that is in memory, not the one that was committed"""
    from pnode.memory import CutMemory

    return [
        Edit(CutMemory.find, "self._cuts.get(step, {})", "self._cuts.get(max(self._cuts, default=step), {})"),
        Edit(CutMemory.find, "kept.digest == digest and digest", "digest"),
    ]
